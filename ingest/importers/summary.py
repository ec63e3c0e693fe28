"""The summary of an import, and how it is printed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.command_line import counted, human_bytes, human_number, one_line, printable
from bucketline.store.commands.place import shown

if TYPE_CHECKING:
    from bucketline.ingest.importers.config import ImportConfig
    from bucketline.ingest.summary import Reject

_TEXT = {
    "source": "text embeddings are those of the cache",
    "encode": "captions are encoded by the text encoders of --model",
    "plain": "captions are stored as the last hidden state of --model's text encoder",
    "none": "no text embeddings are stored, only the captions",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """Summary of an import, or of what it would be."""

    kind: str
    variant: str
    found: int
    imported: int
    replaced: int  # of those, samples that the store had, with other values or captions
    unchanged: int
    rejected: int
    rejected_by_reason: dict[str, int]
    rejects: list[Reject]  # the first 20
    buckets: dict[str, int]  # of what is imported
    without_caption: int  # imported samples
    text: str  # source, encode or none
    crop: str
    scaling_undone: str
    vae: str
    captions_from: str
    spread: float | None  # of the latents that were checked, over the VAE's; None: nothing new, or the check was declined
    left_out: dict[str, int]  # what samples have that a store does not take
    kept: int  # samples of the store whose cache is rejected now; their rows stay
    not_in_source: int  # samples of the store that the cache no longer has; their rows stay
    notes: list[str]
    too_many_rejects: bool
    dry_run: bool
    generation: int
    disk_bytes: int
    seconds: float


def print_import(result: ImportResult, config: ImportConfig) -> None:
    """Print the summary for people."""
    is_dry = result.dry_run
    sums = (
        f"{result.imported} {'to import' if is_dry else 'imported'} + {result.unchanged} unchanged + {result.rejected} rejected"
    )
    rate = human_number(result.imported / max(result.seconds, 1e-9))
    took = "dry run, nothing is written: " if is_dry else ""
    print(f"{took}{counted(result.found, 'sample')} found = {sums}, in {result.seconds:.1f} s ({rate} per s)")
    variant = f" of {one_line(result.variant)}" if result.variant else ""
    print(f"  format {result.kind}{variant}; VAE: {one_line(result.vae)}, as you say; scaling undone: {result.scaling_undone}")
    if result.spread is not None:
        print(f"  the latents' spread is {result.spread:.3g} times the VAE's")
    print(f"  crops: {result.crop}; {_TEXT[result.text]}; captions from {one_line(result.captions_from)}")
    for bucket, count in result.buckets.items():
        print(f"  {bucket}: {counted(count, 'sample')}")
    for what, count in (
        ("replaced, which the store had with other values or captions", result.replaced),
        ("without a caption", result.without_caption),
        ("rejected now, with the row that the store has kept", result.kept),
        ("no longer in the cache, with the row that the store has kept", result.not_in_source),
        *((f"with {one_line(what)}, which is not imported", count) for what, count in result.left_out.items()),
    ):
        if count:
            print(f"  {counted(count, 'sample')} {what}")
    for reason, count in result.rejected_by_reason.items():
        print(f"  rejected: {count} {reason}")
    for reject in result.rejects[:10]:
        print(f"    {one_line(reject.id)}: {printable(reject.detail)}")
    if result.rejected and not is_dry:
        print(f"  each with its reason in {shown(config.place)}/rejects.jsonl")
    for note in result.notes:
        print(f"  note: {one_line(note)}")
    if not is_dry:
        print(f"{shown(config.place)}: generation {result.generation}, {human_bytes(result.disk_bytes)} on disk")


def print_failures(result: ImportResult, config: ImportConfig) -> None:
    """Print on stderr why an import is not a success, whatever is printed on stdout."""
    if result.too_many_rejects:
        print(f"error: {result.rejected} samples were rejected, --max-rejects allows {config.max_rejects}", file=sys.stderr)
    if not result.imported + result.unchanged:
        print(f"error: not one of {counted(result.found, 'sample')} could be imported", file=sys.stderr)
