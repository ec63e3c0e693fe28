"""A contact sheet of what one step delivers, and the section of `store report` about an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bucketline.command_line import counted
from bucketline.loader.collate.buffers import captions_of
from bucketline.loader.config import LoaderConfig
from bucketline.loader.loader import Loader
from bucketline.loader.plan.plan import make_plan, plan_counts
from bucketline.pages.page import Card, Finding, Section, document, parts, tinted
from bucketline.store.format.block import TARGET, LatentKind
from bucketline.store.report.latent_rgb import latent_images

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bucketline.loader.batch import Batch
    from bucketline.loader.mixture import WeightedStore
    from bucketline.store.read.store import Store
    from bucketline.store.report.report import ReportOptions

    Peeked = tuple[int, Batch, list[dict[str, Any]]]


def read_step(stores: Sequence[WeightedStore], config: LoaderConfig, step: int, world_size: int) -> list[Peeked]:
    """Return every rank's micro-batches of a step, read by a loader that begins there."""
    peeked = []
    for rank in range(world_size):
        with Loader(tuple(stores), config, rank=rank, world_size=world_size) as loader:
            loader.load_state_dict({**loader.state_dict(), "step": step, "micro_step": 0})
            for batch, _ in zip(loader.forever(), range(config.accumulation), strict=False):
                chosen = captions_of([weighted.store for weighted in loader.stores], batch, loader.config.caption_dropout)
                delivered = zip(chosen, batch.flipped.tolist(), batch.weight.tolist(), strict=True)
                rows = [
                    {"id": c.id, "caption": c.text, "num_captions": c.num_captions, "flipped": flipped, "weight": weight}
                    for c, flipped, weight in delivered
                ]
                peeked.append((rank, batch, rows))
    return peeked


def _latents(batch: Batch) -> NDArray[Any] | None:
    """Return a batch's latents, `[B, C, …]` as stored; of moments the means; None without such a column."""
    target = batch.columns.get(TARGET)
    if target is None or not target.is_floating_point() or target.ndim <= 2:
        return None
    values: NDArray[Any] = target.float().numpy()
    return values[:, : values.shape[1] // 2] if batch.latent_kind is LatentKind.MOMENTS else values


def _references(batch: Batch) -> list[NDArray[Any]]:
    return [own.float().numpy() for own in batch.references]


def _masked(images: Sequence[bytes], batch: Batch, row: int) -> Sequence[bytes]:
    """Return a row's images, the target's with its mask over it."""
    if batch.mask is None or not images:
        return images
    return [tinted(images[0], (255 * batch.mask[row]).round().byte().numpy()), *images[1:]]


def _note(how: str, batches: Sequence[Batch]) -> str:
    pairs = " Each target, then its references." if any(batch.references for batch in batches) else ""
    masks = " Red is what a mask leaves out." if any(batch.mask is not None for batch in batches) else ""
    return f"Latents {how}.{pairs}{masks}"


def peek_page(stores: Sequence[str], step: int, batches: Sequence[Peeked], vae: dict[str, Any]) -> bytes:
    """Return the contact sheet; `vae`: what the store records of its VAE."""
    latents = [[own for own in (_latents(batch), *_references(batch)) if own is not None] for _, batch, _ in batches]
    drawn, note = latent_images([one for of_batch in latents for own in of_batch for one in own], vae)
    images = iter(drawn)
    groups = []
    for (rank, batch, rows), of_batch in zip(batches, latents, strict=True):
        shown = list(zip(*([next(images) for _ in own] for own in of_batch), strict=True)) or [()] * len(rows)
        cards = [
            Card(
                images=_masked(own, batch, number),
                title=row["id"],
                notes=_notes(row),
                captions=[row["caption"] or "(the empty caption)"],
                problem="no image latent",
            )
            for number, (row, own) in enumerate(zip(rows, shown, strict=True))
        ]
        groups.append((f"rank {rank}, micro-batch {batch.micro_step}", counted(len(rows), "row"), cards))
    _, first, _ = batches[0]
    facts = [
        ("stores", ", ".join(stores)),
        ("step", step),
        ("epoch", first.epoch),
        ("bucket", first.bucket),
        ("rows of all ranks", sum(len(rows) for _, _, rows in batches)),
    ]
    return document(
        title=f"Step {step}",
        subtitle=f"{first.bucket}, epoch {first.epoch}, of {', '.join(stores)}",
        made_by="loader peek",
        sections=[
            Section(
                anchor="batch",
                title="What is delivered",
                note=_note(note, [batch for _, batch, _ in batches]) if drawn else "",
                body=parts.gallery(groups, "Search ids and captions", "wide"),
            ),
            Section(anchor="step", title="The step", body=parts.table(("", ""), facts, texts=2)),
        ],
    )


def _notes(row: dict[str, Any]) -> list[str]:
    values = {
        "flipped": row["flipped"],
        "padding, weight 0": row["weight"] == 0,
        f"one of {row['num_captions']} captions": row["num_captions"] > 1,
    }
    return [note for note, holds in values.items() if holds]


# ---------------------------------------------------------------------------------------------------------------- plan section
# The section of `store report` about an epoch, found by its name: the store's folder imports no loader.


def plan_section(store: Store, options: ReportOptions) -> Section:
    """Return the steps and batches of an epoch of the split train, as `loader plan` prints them, and what is wrong."""
    plan = make_plan(store, LoaderConfig(batch_size=options.batch_size))
    counts = plan_counts(plan, 1, "train")
    head = ("bucket", "rows", "global batch", "batches", "carried to the next epoch")
    rows = [[bucket[name] for name in ("name", "rows", "global_batch", "batches", "carried")] for bucket in counts["buckets"]]
    small = plan.small_buckets(can_drop=False)  # who reads the report may have no --split
    return Section(
        anchor="plan",
        title="Plan",
        note=f"One epoch of the split train by loader plan --batch-size {options.batch_size}: "
        f"{counted(counts['steps'], 'step')}, {counted(counts['rows'], 'row')} delivered.",
        body=parts.table(head, rows),
        findings=[Finding(level="warning", title="Small buckets", detail=small, anchor="plan")] if small else [],
    )
