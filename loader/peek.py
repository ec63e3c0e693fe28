"""A contact sheet of what one step delivers: each row's latent, shown without a VAE, and the caption that was chosen for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bucketline.loader.collate.columns import captions_of
from bucketline.loader.loader import Loader
from bucketline.pages.page import Card, Section, document, parts
from bucketline.store.format.columns import TARGET, LatentKind
from bucketline.store.report.latent_rgb import latent_images

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bucketline.loader.batch import Batch
    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.mixture import WeightedStore


@dataclass(frozen=True, slots=True, kw_only=True)
class PeekedRow:
    """A row of a step."""

    id: str
    caption: str  # "" if it was dropped, or the sample has none
    num_captions: int
    flipped: bool
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeekedBatch:
    """A rank's micro-batch of a step."""

    rank: int
    micro_step: int
    bucket: str
    epoch: int
    rows: tuple[PeekedRow, ...]
    latents: NDArray[Any] | None  # [B, C, …] as stored; of moments the means; None without such a column


def read_step(shares: Sequence[WeightedStore], config: LoaderConfig, step: int, world_size: int) -> list[PeekedBatch]:
    """Return every rank's micro-batches of a step, read by a loader that begins there."""
    found = []
    for rank in range(world_size):
        with Loader(tuple(shares), config, rank=rank, world_size=world_size) as loader:
            loader.load_state_dict({**loader.state_dict(), "step": step, "micro_step": 0})
            for batch, _ in zip(loader.forever(), range(config.accumulation), strict=False):
                found.append(_peeked(loader, batch, rank))
    return found


def _peeked(loader: Loader, batch: Batch, rank: int) -> PeekedBatch:
    chosen = captions_of([share.store for share in loader.shares], batch, loader.config.caption_dropout)
    rows = tuple(
        PeekedRow(
            id=one.id,
            caption=one.text,
            num_captions=one.num_captions,
            flipped=bool(batch.flipped[n]),
            weight=float(batch.weight[n]),
        )
        for n, one in enumerate(chosen)
    )
    latents = None
    target = batch.columns.get(TARGET)
    if target is not None and target.is_floating_point() and target.ndim > 2:
        values = target.float().numpy().copy()  # the buffer is used again
        latents = values[:, : values.shape[1] // 2] if batch.latent_kind is LatentKind.MOMENTS else values
    return PeekedBatch(
        rank=rank,
        micro_step=batch.micro_step,
        bucket=batch.bucket,
        epoch=batch.epoch,
        rows=rows,
        latents=latents,
    )


def peek_page(stores: Sequence[str], step: int, batches: Sequence[PeekedBatch], vae: dict[str, Any]) -> bytes:
    """Return the contact sheet; `vae`: what the store records of its VAE."""
    latents = [latent for batch in batches if batch.latents is not None for latent in batch.latents]
    made, how = latent_images(latents, vae)
    images = iter(made)
    groups = []
    for batch in batches:
        cards = [
            Card(
                images=[next(images)] if batch.latents is not None else (),
                title=row.id,
                notes=_notes(row),
                captions=[row.caption or "(the empty caption)"],
                problem="no image latent",
            )
            for row in batch.rows
        ]
        groups.append((f"rank {batch.rank}, micro-batch {batch.micro_step}", f"{len(batch.rows)} rows", cards))
    first = batches[0]
    facts = [
        ("stores", ", ".join(stores)),
        ("step", step),
        ("epoch", first.epoch),
        ("bucket", first.bucket),
        ("rows of all ranks", sum(len(batch.rows) for batch in batches)),
    ]
    return document(
        title=f"Step {step}",
        subtitle=f"{first.bucket}, epoch {first.epoch}, of {', '.join(stores)}",
        made_by="loader peek",
        sections=[
            Section(
                anchor="batch",
                title="What is delivered",
                note=f"Latents {how}." if made else "",
                body=parts.gallery(groups, "Search ids and captions", "wide"),
            ),
            Section(anchor="step", title="The step", body=parts.table(("", ""), facts, texts=2)),
        ],
    )


def _notes(row: PeekedRow) -> list[str]:
    notes = []
    if row.flipped:
        notes.append("flipped")
    if row.weight == 0:
        notes.append("padding, weight 0")
    if row.num_captions > 1:
        notes.append(f"one of {row.num_captions} captions")
    return notes
