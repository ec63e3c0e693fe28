"""The command `ingest`: images and captions into a store, a look at them before, and at what was stored."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from bucketline.commands import human_bytes, one_line, print_json, run_one_of
from bucketline.ingest.config import PackConfig, ScanConfig
from bucketline.ingest.crop_loss import crop_losses_as_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.ingest.pack import Summary
    from bucketline.ingest.scan import ScanReport


@dataclass(frozen=True, kw_only=True)
class Pack(PackConfig):  # noqa: D101 - its help is the configuration's
    __doc__ = PackConfig.__doc__

    def run(self) -> int:
        from bucketline.ingest.pack import as_json, pack

        ranks = {argument: int(os.environ.get(name, default)) for argument, (name, default) in _RANKS.items()}
        try:
            summary = pack(self, **ranks)
        except KeyboardInterrupt:
            print("what was encoded is committed; run the same command again to go on", file=sys.stderr)
            raise
        if summary is None:
            return 0
        if self.json:
            print_json(as_json(summary))
        else:
            _print_summary(summary, self)
        if summary.too_many_rejects:
            by_reason = ", ".join(f"{count} {reason}" for reason, count in summary.rejected_by_reason.items())
            print(
                f"error: {summary.rejected} of {summary.found} images were rejected ({by_reason}), --max-rejects allows "
                f"{self.max_rejects}; the others are packed; each reject's reason is in {self.store / 'rejects.jsonl'}",
                file=sys.stderr,
            )
            return 1
        return 0 if summary.packed + summary.unchanged else 1


@dataclass(frozen=True, kw_only=True)
class Scan(ScanConfig):  # noqa: D101 - its help is the configuration's
    __doc__ = ScanConfig.__doc__

    def run(self) -> int:
        from bucketline.ingest.scan import scan

        report = scan(self)
        if self.json:
            print_json(asdict(report))
        else:
            _print_scan(report)
        return 0 if report.buckets else 1


@dataclass(frozen=True, kw_only=True)
class Peek:
    """Decode one sample's stored latent to a picture, so that a person sees what was stored.

    The model's VAE must be the one that the store was packed with.

    Example: ingest peek photos.store coffee/whole.png --model stable-diffusion-v1-5 -o coffee.png
    """

    store: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="STORE")]
    """The store's folder."""
    id: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ID")]
    """The sample's id: its path in the source, with the extension."""
    model: str
    """A folder in diffusers' layout, of which vae/ is used, or a model's name on a hub."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="PNG")]
    """The picture to write; it must not exist yet."""
    device: str = "auto"
    """Where the VAE runs: auto (CUDA where there is one), cpu, cuda or cuda:N."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        from bucketline.ingest.device import chosen_device
        from bucketline.ingest.encoders.model_folder import open_model
        from bucketline.ingest.peek import peek
        from bucketline.store import Store

        peeked = peek(Store.open(self.store), self.id, open_model(self.model), self.output, chosen_device(self.device, 0))
        if self.json:
            print_json(asdict(peeked))
        else:
            size = f"{peeked.height_px}x{peeked.width_px}"
            print(f"{self.output}: {one_line(peeked.id)} of {peeked.bucket}, {size} px, height first")
        return 0


_RANKS = {
    "rank": ("RANK", "0"),
    "world_size": ("WORLD_SIZE", "1"),
    "local_rank": ("LOCAL_RANK", "0"),
    "local_world_size": ("LOCAL_WORLD_SIZE", "1"),
}

_STAGES = {"decode": "waiting for decoded pictures", "encode": "encoding", "write": "waiting for the disk"}


def _print_summary(summary: Summary, config: PackConfig) -> None:
    rate = summary.packed / max(summary.seconds, 1e-9)
    print(
        f"{summary.found} images found = {summary.packed} packed + {summary.unchanged} unchanged "
        f"+ {summary.rejected} rejected, in {summary.seconds:.1f} s ({rate:.1f} packed/s)"
    )
    if summary.packed and (total := sum(summary.stage_seconds.values())):
        shares = (f"{100 * summary.stage_seconds[stage] / total:.0f} % {what}" for stage, what in _STAGES.items())
        print(f"  of the time {', '.join(shares)}; slowest: {summary.slowest_stage}")
    for reason, count in summary.rejected_by_reason.items():
        print(f"  rejected: {count} {reason}")
    if summary.rejected:
        print(f"  each with its reason in {config.store / 'rejects.jsonl'}")
    counts = {
        "without a caption (packed with the empty one)": summary.without_caption,
        "enlarged to fill their bucket": summary.enlarged,
        "captions longer than the text encoder takes (cut)": summary.captions_truncated,
        f"images with more than {config.max_captions} captions (the rest is not trained on)": len(summary.captions_beyond),
    }
    for what, count in counts.items():
        if count:
            print(f"  {count} {what}")
    for line in crop_losses_as_lines(summary.crop_loss):
        print(f"  {line}")
    for sample_id in summary.captions_beyond[:10]:
        print(f"  more captions than kept: {sample_id}")
    print_warnings(summary.captions_without_image, summary.passed_over)
    if summary.pruned:
        print(f"  {summary.pruned} samples whose images are no longer in the source were dropped")
    for sample_id in summary.pruned_ids:
        print(f"    {sample_id}")
    if summary.not_in_source:
        print(f"  {summary.not_in_source} samples of the store are no longer in the source; they stay in the store")
    for sample_id in summary.not_in_source_ids:
        print(f"    {sample_id}")
    print(
        f"{config.store}: generation {summary.generation}, {human_bytes(summary.disk_bytes)} on disk, "
        f"payload {human_bytes(summary.payload_bytes)}"
    )
    if not summary.packed + summary.unchanged:
        print(f"error: none of the {summary.found} images could be packed", file=sys.stderr)


def _print_scan(report: ScanReport) -> None:
    print(f"{report.found} images, {human_bytes(report.source_bytes)}; {report.rejected} would be rejected")
    for reason, count in report.rejected_by_reason.items():
        print(f"  rejected: {count} {reason}")
    for reject in report.rejects[:10]:
        print(f"    {reject.id}: {reject.reason} ({reject.detail})")
    if (more := len(report.rejects) - 10) > 0:
        print(f"    and {more} more; --json names all")
    if report.smallest and report.median and report.largest:
        sizes = zip(("smallest", "median", "largest"), (report.smallest, report.median, report.largest), strict=True)
        print("  " + ", ".join(f"{what} {height}x{width} px" for what, (height, width) in sizes) + " (height x width)")
    print(f"grid {report.grid}:")
    for bucket in report.buckets:
        print(f"  {bucket.name:<24}{bucket.samples:>9}")
    counts = {
        "images without a caption": report.without_caption,
        "images to be enlarged to fill their bucket": report.enlarged,
        "captions longer than the text encoder takes (to be cut)": report.captions_too_long or 0,
        "images with more captions than are kept": len(report.captions_beyond),
    }
    for what, count in counts.items():
        if count:
            print(f"  {count} {what}")
    for line in crop_losses_as_lines(report.crop_loss):
        print(f"  {line}")
    print_warnings(report.captions_without_image, report.passed_over)
    basis = ""
    if report.text_family is None:
        basis = " (latents of 4 channels at an eighth, no text: give --model)"
    elif report.captions_too_long is None:
        basis = f" without its text: what {report.text_family} makes of captions, and how long they may be, only packing tells"
    print(f"the store would hold about {human_bytes(report.payload_bytes)}{basis}")
    if not report.is_full:
        print("by headers alone; --full decodes every picture and finds damage behind them")
    if not report.buckets:
        print(f"error: none of the {report.found} images could be packed", file=sys.stderr)


def print_warnings(captions_without_image: list[str], passed_over: list[str]) -> None:
    """Print the first ten of what a source has and nobody packs."""
    for what, names in (("caption without an image", captions_without_image), ("image passed over", passed_over)):
        for name in names[:10]:
            print(f"  warning: {what}: {name}")
        if (more := len(names) - 10) > 0:
            print(f"  warning: and {more} more: {what}")


def main(args: Sequence[str] | None = None, prog: str = "ingest") -> int:
    """Run the command `ingest`."""
    return run_one_of(prog, __doc__ or "", {"pack": Pack, "scan": Scan, "peek": Peek}, args)


if __name__ == "__main__":
    sys.exit(main())
