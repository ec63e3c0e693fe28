"""The end of a pack: the sums, what is to be dropped, and the last generation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.files.atomic_write import write_or_explain
from bucketline.ingest.images.crop import crop_losses_as_json
from bucketline.ingest.packed_index import SampleChanges, sample_changes
from bucketline.ingest.packing.packed_model import note_model
from bucketline.ingest.pipeline.captions import remove_kept_captions
from bucketline.ingest.pipeline.model import NOT_COMPARED
from bucketline.ingest.pipeline.pool import slowest_of
from bucketline.ingest.summary import (
    WITHOUT_CAPTION,
    by_reason,
    check_identity,
    joined_summaries,
    partner_notes,
    rejects_as_lines,
    without_caption_as_lines,
)
from bucketline.store.format.block import PLAIN_FAMILY
from bucketline.store.remote.generations import find_newest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.packing.run import ListedSource, PackPlan
    from bucketline.ingest.summary import RunSummary
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.text import TextError
    from bucketline.store.write.publish import StoreTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class PackResult(SampleChanges):
    """Result of a run, as `ingest pack --json` prints it."""

    found: int
    packed: int
    latents_kept: int  # packed images whose captions or mtime changed, with latents reused from the store
    moved: int  # packed images that the store had in its other split
    recaptioned: str | None  # the first caption rule that --recaption changed, with both values
    captions_as_before: int  # samples that --recaption kept with captions of the rules before, because it could not read them
    unchanged: int
    rejected: int
    withdrawn: int  # left out, since `store drop` withdrew their ids
    without_caption: int  # of the source's images that are not rejected or withdrawn
    captions_from: dict[str, int]  # number of images per origin of their captions
    notes: list[str]  # what was left out of the source, or may be a misunderstanding
    enlarged: int
    crop_loss: dict[str, dict[str, float]]  # by bucket, of packed images: count, share cropped away (mean, max)
    captions_cut: dict[str, int]  # by encoder: captions of the store's samples that it did not see to their end
    captions_beyond: list[str]  # ids of samples with more captions than max_captions
    captions_without_image: list[str]
    passed_over: list[str]  # images that are skipped on purpose, each with the reason
    rejected_by_reason: dict[str, int]
    held_out: int  # of the store's samples
    samples: int  # of the store, after this run
    text_error: TextError | None  # of the store's captions, if their tokens are quantised
    payload_bytes: int
    disk_bytes: int
    generation: int
    generations_meanwhile: int  # published during packing, by the ranks and by others
    seconds: float
    stage_seconds: dict[str, float]  # of the encoding threads: wait for decoded images, encode, wait for the writer
    slowest_stage: str  # decode, encode or write


def finish(
    config: PackConfig,
    target: StoreTarget,
    listed: ListedSource,
    plan: PackPlan,
    newest: Manifest,
    sealed: Sequence[str],
    summaries: Sequence[RunSummary],
) -> PackResult:
    """Add up what all ranks have packed, and publish the last generation: rank 0's shards, without what is to be dropped.

    `newest` is the newest generation that rank 0 knows, `sealed` are its shards.
    """
    outline, before, account = listed.outline, plan.manifest, joined_summaries(summaries)
    account.withdrawn = listed.num_withdrawn
    check_identity(outline.num_items + listed.num_withdrawn, account)
    dropped, changes = sample_changes(config, target.open(before), outline, account)
    write_or_explain(config.store / "rejects.jsonl", rejects_as_lines(account))
    without_caption = without_caption_as_lines(outline.without_caption, account)
    write_or_explain(config.store / WITHOUT_CAPTION, without_caption)
    if plan.num_ranks > 1:  # other ranks have committed
        newest = find_newest(target.folder, lists=True) or newest
    published = target.publish(newest, sealed, dropped, {**newest.rules, **config.caption_rules.as_json()})
    unnoted = note_model(config, is_compared=account.has_encoded)
    target.send_lists()
    remove_kept_captions(config.store)
    change = config.caption_rules.difference(before.rules)
    as_before = changes["not_in_source"] + changes["kept_unreadable"] + changes["kept_beyond_limit"]
    stages = {stage: round(seconds, 3) for stage, seconds in account.stage_seconds.items()}
    return PackResult(
        found=account.total,
        packed=account.packed,
        latents_kept=account.latents_kept,
        moved=account.moved,
        recaptioned=change and f"{change[0]} = {change[1]!s:.200}, now {change[2]!s:.200}",
        captions_as_before=as_before if change else 0,
        unchanged=account.unchanged,
        rejected=len(account.rejects),
        withdrawn=account.withdrawn,
        without_caption=without_caption.count(b"\n"),
        captions_from=dict(outline.listing.captions_from.most_common()),
        notes=[*outline.listing.notes, *partner_notes(account), *unnoted, *_notes_about_encoders(config, before, account)],
        enlarged=account.enlarged,
        crop_loss=crop_losses_as_json(account.crop_losses),
        captions_cut=published.captions_cut,
        captions_beyond=account.captions_beyond,
        captions_without_image=outline.listing.orphans,
        passed_over=outline.listing.passed_over,
        rejected_by_reason=by_reason(account),
        **changes,
        held_out=sum(rows for shard in published.shards for name, rows in shard.live.items() if name.startswith("val/")),
        samples=published.samples,
        text_error=published.text_error,
        payload_bytes=published.payload_bytes,
        disk_bytes=target.disk_bytes(published),
        generation=published.generation,
        generations_meanwhile=max(0, published.generation - before.generation - 1),
        seconds=round(time.monotonic() - listed.started, 3),
        stage_seconds=stages,
        slowest_stage=slowest_of(stages, on_shared_cores=account.on_shared_cores),
    )


def _notes_about_encoders(config: PackConfig, before: Manifest, account: RunSummary) -> list[str]:
    """Return a note if the encoders were not compared, or captions became a last hidden state without the user's saying so."""
    if before.generation and not account.has_encoded:
        return [f"there was nothing to encode, so no weights were loaded; not compared with the store: {NOT_COMPARED}"]
    text = before.encoders.get("text_encoder")
    is_plain = isinstance(text, dict) and text.get("family") == PLAIN_FAMILY
    if not is_plain or not account.packed or config.text is not None:
        return []
    assert isinstance(text, dict)
    stored = f"the last hidden state of its {text['class']!s:.80} is stored"
    return [f"how the model's pipeline encodes captions is not known, so {stored}; --text plain confirms that"]
