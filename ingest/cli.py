"""Pack images and captions into a store, check a source beforehand, and view what was stored."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from bucketline.command_line import (
    counted,
    human_bytes,
    human_number,
    one_line,
    print_json,
    print_json_line,
    printable,
    run_one_of,
    torchrun_ranks,
)
from bucketline.ingest.commands.peek import PeekSource
from bucketline.ingest.commands.previews import PreviewsCommand
from bucketline.ingest.commands.prompts import Prompts
from bucketline.ingest.config import PackConfig, ScanConfig
from bucketline.ingest.images.crop_loss import crop_losses_as_lines
from bucketline.ingest.importers.config import ImportConfig
from bucketline.ingest.summary import LONG_CAPTIONS, WITHOUT_CAPTION
from bucketline.store.commands.place import shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bucketline.command_line import Command
    from bucketline.ingest.dry_run import DryRun
    from bucketline.ingest.packing.finish import PackResult
    from bucketline.ingest.scan import ScanReport
    from bucketline.ingest.sources.dataset_file import DatasetEntry


@dataclass(frozen=True, kw_only=True)
class Pack(PackConfig):  # noqa: D101 - its help is the configuration's
    __doc__ = PackConfig.__doc__

    def run(self) -> int:
        from bucketline.ingest.pack import pack_images
        from bucketline.ingest.parallel.signals import exit_code_of
        from bucketline.ingest.sources.dataset_file import is_dataset_file

        if self.engine is not None:
            _prepare_environment(self)
        try:
            if self.dry_run:
                return self._dry_run()
            if is_dataset_file(self.source):
                return self._run_each()
            summary = pack_images(self, **torchrun_ranks())
        except KeyboardInterrupt as stop:
            print(f"interrupted: {_what_is_kept(stop)}", file=sys.stderr)
            return exit_code_of(stop)
        if summary is None:
            return 0
        if self.json:
            print_json(asdict(summary))
        else:
            _print_summary(summary, self)
        if summary.too_many_rejects or summary.not_pruned_beyond_limit:
            _print_beyond_limits(summary, self)
            return 1
        return 0 if summary.packed + summary.unchanged else 1

    def _dry_run(self) -> int:
        """Compare the source, or those of a data set file, with the store."""
        if torchrun_ranks()["rank"]:
            return 0  # one process says it for all
        os.environ["HF_HUB_OFFLINE"] = "1"  # a download would write to the hub's cache; read when huggingface_hub is imported
        from bucketline.ingest.dataset import dry_run_dataset
        from bucketline.ingest.dry_run import dry_run
        from bucketline.ingest.sources.dataset_file import is_dataset_file

        if not is_dataset_file(self.source):
            report = dry_run(self)
            if self.json:
                print_json_line(asdict(report))
            else:
                _print_dry_run(report)
            return 0
        file, reports = dry_run_dataset(self)
        if self.json:
            print_json_line({"sources": {entry.name: asdict(report) for entry, report in reports}, "notes": file.notes})
            return 0
        for entry, report in reports:
            print(_entry_line(entry))
            _print_dry_run(report)
        _print_captions_and_notes({}, file.notes, None)
        return 0

    def _run_each(self) -> int:
        """Pack the sources of a data set file."""
        from bucketline.ingest.dataset import pack_dataset

        def on_result(entry: DatasetEntry, own: PackConfig, summary: PackResult) -> None:
            if not self.json:
                print(_entry_line(entry))
                _print_summary(summary, own)
            _print_beyond_limits(summary, own)

        result = pack_dataset(self, on_result, **torchrun_ranks())
        if result is None:
            return 0
        if self.json:
            print_json(asdict(result))
        else:
            _print_captions_and_notes({}, result.notes, None)
            if result.why_not_readable is None:
                what = ", ".join(f"{one_line(name)} x {repeats}" for name, repeats in result.repeats.items())
                print(f"{shown(self.store)}: the loader and the trainer read it as one store ({what})")
        if result.why_not_readable is not None:
            print(
                f"error: {shown(self.store)} cannot be read as one store: {printable(result.why_not_readable)}", file=sys.stderr
            )
        return 0 if result.is_good else 1


@dataclass(frozen=True, kw_only=True)
class Scan(ScanConfig):  # noqa: D101 - its help is the configuration's
    __doc__ = ScanConfig.__doc__

    def run(self) -> int:
        from bucketline.ingest.scan import scan
        from bucketline.ingest.sources.dataset_file import is_dataset_file

        if is_dataset_file(self.source):
            return self._run_each()
        report = scan(self)
        if self.json:
            print_json(asdict(report))
        else:
            _print_scan(report)
            self._print_sheet()
        return 0 if report.buckets else 1

    def _run_each(self) -> int:
        """Scan the sources of a data set file."""
        from bucketline.ingest.dataset import scan_dataset

        file, reports = scan_dataset(self)
        if self.json:
            sources = {entry.name: asdict(report) for entry, report in reports}
            print_json({"sources": sources, "repeats": {e.name: e.repeats for e, _ in reports}, "notes": file.notes})
        else:
            for entry, report in reports:
                print(_entry_line(entry))
                _print_scan(report)
            _print_captions_and_notes({}, file.notes, None)
            self._print_sheet()
        return 0 if all(report.buckets for _, report in reports) else 1

    def _print_sheet(self) -> None:
        if self.output is not None:
            print(f"{shown(self.output)}: contact sheet of the crops that lose most")


@dataclass(frozen=True, kw_only=True)
class Import(ImportConfig):  # noqa: D101 - its help is the configuration's
    __doc__ = ImportConfig.__doc__

    def run(self) -> int:
        from bucketline.ingest.importers.run import import_cache
        from bucketline.ingest.importers.summary import print_failures, print_import
        from bucketline.ingest.parallel.signals import exit_code_of

        try:
            result = import_cache(self, **torchrun_ranks())
        except KeyboardInterrupt as stop:
            print("interrupted: what was imported is committed; rerun the command to continue", file=sys.stderr)
            return exit_code_of(stop)
        if result is None:
            return 0
        if self.json:
            print_json(asdict(result))
        else:
            print_import(result, self)
        print_failures(result, self)
        return 0 if result.imported + result.unchanged and not result.too_many_rejects else 1


def _prepare_environment(config: PackConfig) -> None:
    """Set what Ray reads when it is imported: no statistics for others, and if it is started here, for this machine only."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if config.ray_address is None:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray then listens on 127.0.0.1, and nowhere else


_STAGES = {"decode": "waiting for images to be decoded", "encode": "encoding", "write": "waiting for the disk"}


def _what_is_kept(stop: KeyboardInterrupt) -> str:
    from bucketline.ingest.parallel.signals import Stopped

    if isinstance(stop, Stopped) and stop.num_encoded:
        return f"all encoded images are committed ({counted(stop.num_encoded, 'image')}); rerun the command to continue"
    return "nothing had been encoded yet; rerun the command"


def _print_summary(summary: PackResult, config: PackConfig) -> None:
    rate = summary.packed / max(summary.seconds, 1e-9)
    print(
        f"{counted(summary.found, 'image')} found = {summary.packed} packed + {summary.unchanged} unchanged "
        f"+ {summary.rejected} rejected, in {summary.seconds:.1f} s ({human_number(rate)} packed/s)"
    )
    if summary.packed and (total := sum(summary.stage_seconds.values())):
        shares = (f"{100 * summary.stage_seconds[stage] / total:.0f} % {what}" for stage, what in _STAGES.items())
        print(f"  of the time {', '.join(shares)}; slowest: {summary.slowest_stage}")
    for reason, count in summary.rejected_by_reason.items():
        print(f"  rejected: {count} {reason}")
    if summary.rejected:
        print(f"  each with its reason in {shown(config.store / 'rejects.jsonl')}")
    beyond = f" with more than {config.max_captions} captions (the others are not used in training)"
    counts = (
        (summary.latents_kept, "image", " unchanged but for a caption or mtime (its latents are kept)"),
        (summary.without_caption, "image", " without a caption (packed with the empty one)"),
        (
            summary.enlarged,
            "image",
            " enlarged to fill its bucket" if summary.enlarged == 1 else " enlarged to fill their bucket",
        ),
        (summary.captions_truncated, "caption", " longer than the text encoder accepts (truncated)"),
        (len(summary.captions_beyond), "image", beyond),
        (summary.generations_meanwhile, "generation", " published during packing"),
    )
    if summary.recaptioned:
        print(f"  captions are made by other rules: {printable(summary.recaptioned)}; only their text is encoded")
    for count, noun, what in counts:
        if count:
            print(f"  {counted(count, noun)}{what}")
    for encoder, number in summary.captions_cut.items():
        print(f"  {counted(number, 'caption')} cut by {encoder}")
    if summary.captions_cut:
        first = ", ".join(map(one_line, summary.captions_cut_ids))
        print(f"  images with cut captions: {first}; each with what was cut in {shown(config.store / LONG_CAPTIONS)}")
    ids_are_in = f"each in {shown(config.store / WITHOUT_CAPTION)}" if summary.without_caption else None
    _print_captions_and_notes(summary.captions_from, summary.notes, ids_are_in)
    for line in crop_losses_as_lines(summary.crop_loss):
        print(f"  {line}")
    for sample_id in summary.captions_beyond[:10]:
        print(f"  more captions than kept: {one_line(sample_id)}")
    print_warnings(summary.captions_without_image, summary.passed_over)
    _print_dropped_and_kept(summary)
    if summary.text_error is not None:
        print(f"  error of the quantised text: {summary.text_error}")
    print(
        f"{shown(config.place)}: generation {summary.generation}, {human_bytes(summary.disk_bytes)} on disk, "
        f"payload {human_bytes(summary.payload_bytes)}"
    )
    if not summary.packed + summary.unchanged:
        print(f"error: not one of {counted(summary.found, 'image')} could be packed", file=sys.stderr)


def _print_dry_run(report: DryRun) -> None:
    print(
        f"dry run, nothing is written: {counted(report.found, 'image')} found = {report.new} new + {report.changed} changed "
        f"+ {report.moved} moved to the other split + {report.recaptioned} with other captions or mtime "
        f"+ {report.unchanged} unchanged + {report.rejected} rejected"
    )
    for bucket, count in report.buckets.items():
        print(f"  to encode, in {bucket}: {counted(count, 'image')}")
    if report.recaptioned:
        print(f"  to encode only the text, with the stored latents: {counted(report.recaptioned, 'image')}")
    for reason, count in report.rejected_by_reason.items():
        print(f"  rejected: {count} {reason}")
    if report.too_many_rejects:
        print("  more rejects than --max-rejects allows: nothing would be dropped, and the exit code would be 1")
    if report.not_pruned:
        print(f"  not pruned: {printable(report.not_pruned)}")
    _print_ids(
        ("would be dropped, because rejected now", report.dropped, report.dropped_ids),
        ("would be dropped, because no longer in the source", report.pruned, report.pruned_ids),
        ("cannot be read now, but kept in the store", report.kept_unreadable, report.kept_unreadable_ids),
        ("no longer in the source, but kept in the store", report.not_in_source, []),
    )
    if report.pending_shards:
        shards = counted(report.pending_shards, "shard")
        print(f"  an interrupted run left {shards}, which a pack adopts first; their images are counted as new")
    _print_captions_and_notes({}, report.notes, None)
    print(f"from the file headers only, so damage after them is not seen; not compared: {report.not_compared}")


def _print_beyond_limits(summary: PackResult, config: PackConfig) -> None:
    if summary.too_many_rejects:
        by_reason = ", ".join(f"{count} {reason}" for reason, count in summary.rejected_by_reason.items())
        print(
            f"error: {summary.rejected} of {counted(summary.found, 'image')} were rejected ({by_reason}), "
            f"--max-rejects allows {config.max_rejects}; the other images are packed, and no sample was dropped; "
            f"each reject's reason is in {shown(config.store / 'rejects.jsonl')}",
            file=sys.stderr,
        )
    if summary.not_pruned_beyond_limit:
        print(
            f"error: nothing was pruned: {printable(str(summary.not_pruned))}. If a disk or a folder of the source is "
            "missing, bring it back; "
            f"if these images were deleted, add --max-prune {summary.not_pruned_beyond_limit}",
            file=sys.stderr,
        )


def _entry_line(entry: DatasetEntry) -> str:
    from bucketline.files.redact import redacted

    return f"{one_line(str(entry.name))} x {entry.repeats}: {one_line(str(redacted(entry.path)))}"


def _print_dropped_and_kept(summary: PackResult) -> None:
    """Print what happened to rows whose images were rejected, unreadable or missing."""
    if summary.not_pruned:
        print(f"  not pruned: {printable(summary.not_pruned)}")
    _print_ids(
        ("dropped, because rejected now", summary.dropped, summary.dropped_ids),
        ("dropped, because no longer in the source", summary.pruned, summary.pruned_ids),
        ("cannot be read now, but kept in the store", summary.kept_unreadable, summary.kept_unreadable_ids),
        ("rejected now, but kept because there are too many rejects", summary.kept_beyond_limit, []),
        ("no longer in the source, but kept in the store", summary.not_in_source, summary.not_in_source_ids),
        ("of these, with the captions of the rules before", summary.captions_as_before, []),
    )


def _print_ids(*counts: tuple[str, int, list[str]]) -> None:
    """Print each description with its count and its first ids, if there are any."""
    for what, count, named in counts:
        if count:
            print(f"  {what}: {counted(count, 'sample')}")
        for sample_id in named:
            print(f"    {one_line(sample_id)}")


def _print_scan(report: ScanReport) -> None:
    from bucketline.ingest.text_cost import text_cost_as_lines  # imports numpy

    print(f"{counted(report.found, 'image')}, {human_bytes(report.source_bytes)}; {report.rejected} would be rejected")
    for reason, count in report.rejected_by_reason.items():
        print(f"  rejected: {count} {reason}")
    for reject in report.rejects[:10]:
        print(f"    {one_line(reject.id)}: {reject.reason} ({printable(reject.detail)})")
    if (more := len(report.rejects) - 10) > 0:
        print(f"    and {more} more; --json names all")
    if report.smallest and report.median and report.largest:
        sizes = zip(("smallest", "median", "largest"), (report.smallest, report.median, report.largest), strict=True)
        print("  " + ", ".join(f"{what} {height}x{width} px" for what, (height, width) in sizes) + " (height x width)")
    print(f"grid {report.grid}:")
    for bucket in report.buckets:
        print(f"  {bucket.name:<24}{bucket.samples:>9}")
    enlarged = "to be enlarged to fill its bucket" if report.enlarged == 1 else "to be enlarged to fill their bucket"
    counts = (
        (report.without_caption, "image", "without a caption"),
        (report.enlarged, "image", enlarged),
        (report.captions_too_long or 0, "caption", "longer than the text encoder accepts (to be truncated)"),
        (len(report.captions_beyond), "image", "with more captions than are kept"),
    )
    for count, noun, what in counts:
        if count:
            print(f"  {counted(count, noun)} {what}")
    first = ", ".join(one_line(sample_id) for sample_id in report.without_caption_ids[:10])
    _print_captions_and_notes(report.captions_from, report.notes, f"{first}; --json names all" if first else None)
    _print_listed({f"captions as stored, of {one_line(of)}": texts for of, texts in report.example_captions.items()})
    for line in crop_losses_as_lines(report.crop_loss):
        print(f"  {line}")
    print_warnings(report.captions_without_image, report.passed_over)
    basis = ""
    if report.text_family is None:
        basis = " (assuming latents of 4 channels at 1/8 size and no text; use --model for exact figures)"
    else:
        each = "of" if report.text_padding == "max_length" else "of at most"
        what = f"{counted(report.captions, 'caption')} {each} {counted(report.max_tokens or 0, 'token')}"
        print(f"text, {report.text_family}: {what}, {human_bytes(report.text_bytes or 0)}")
        print("".join(f"  {line}\n" for line in text_cost_as_lines(report.text_cost, report.text_padding)), end="")
    print(f"the store would hold about {human_bytes(report.payload_bytes)}{basis}")
    if not report.is_full:
        print("from the file headers only; --full decodes every image and finds damage after the header")
    if not report.buckets:
        print(f"error: not one of {counted(report.found, 'image')} could be packed", file=sys.stderr)


def _print_captions_and_notes(captions_from: Mapping[str, int], notes: Sequence[str], without: str | None) -> None:
    """Print where captions came from, which images have none, and notes about the source."""
    if without is not None:
        print(f"  images without a caption: {without}")
    if captions_from:
        print(f"  captions from {'; '.join(f'{one_line(place)} ({count})' for place, count in captions_from.items())}")
    for note in notes:
        print(f"  note: {one_line(note)}")


def _print_listed(found: Mapping[str, Sequence[str]]) -> None:
    """Print each title, and its lines below it."""
    for title, lines in found.items():
        print("\n    ".join((f"  {title}:", *map(one_line, lines))))


def print_warnings(captions_without_image: list[str], passed_over: list[str]) -> None:
    """Print the first ten captions without an image and the first ten skipped images."""
    for what, names in (("caption without an image", captions_without_image), ("image skipped", passed_over)):
        for name in names[:10]:
            print(f"  warning: {what}: {one_line(name)}")
        if (more := len(names) - 10) > 0:
            print(f"  warning: and {more} more: {what}")


COMMANDS: dict[str, type[Command]] = {
    "pack": Pack,
    "import": Import,
    "scan": Scan,
    "prompts": Prompts,
    "peek": PeekSource,
    "previews": PreviewsCommand,
}


def main(args: Sequence[str] | None = None, prog: str = "ingest") -> int:
    """Run the command `ingest`."""
    return run_one_of(prog, __doc__ or "", COMMANDS, args)


if __name__ == "__main__":
    sys.exit(main())
