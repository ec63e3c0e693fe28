"""`ingest scan`."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from bucketline.command_line import counted, human_bytes, one_line, print_json, printable, say
from bucketline.ingest.commands.pack import print_captions_and_notes, print_entry, print_held_out, print_warnings
from bucketline.ingest.config import FILE_TABLES, ScanConfig
from bucketline.ingest.images.crop import crop_loss_line
from bucketline.store.commands.look import shown

if TYPE_CHECKING:
    from bucketline.ingest.scan import ScanReport


@dataclass(frozen=True, kw_only=True)
class Scan(ScanConfig):  # noqa: D101 - its help is the configuration's
    __doc__ = ScanConfig.__doc__

    @classmethod
    def complete(cls, options: Scan, given: frozenset[str]) -> Scan:
        """Return the options of a command line that gave these fields, with those of a data set file."""
        from bucketline.ingest.sources.dataset_file import with_dataset_file

        return with_dataset_file(options, options.source, given, FILE_TABLES)[0]

    def run(self) -> int:
        from bucketline.ingest.scan import scan

        file, reports = scan(self)
        if self.json:
            each = [(entry, asdict(report)) for entry, report in reports if entry is not None]
            sources, repeats = {entry.name: one for entry, one in each}, {entry.name: entry.repeats for entry, _ in each}
            found = asdict(reports[0][1]) if file is None else {"sources": sources, "repeats": repeats, "notes": file.notes}
            print_json(found)
        else:
            for entry, report in reports:
                print_entry(entry)
                _print_scan(report, self)
            print_captions_and_notes({}, [] if file is None else file.notes)
            if self.output is not None:
                print(f"{shown(self.output)}: contact sheet of the crops that lose most")
        return 0 if all(report.buckets for _, report in reports) else 1


def _print_scan(report: ScanReport, options: ScanConfig) -> None:
    print(f"{counted(report.found, 'image')}, {human_bytes(report.source_bytes)}; {report.rejected} would be rejected")
    for reason, count in report.rejected_by_reason.items():
        print(f"  rejected: {count} {reason}")
    for reject in report.rejects[:10]:
        say(f"    {one_line(reject.id)}: {reject.reason} ({printable(reject.detail)})")
    if (more := len(report.rejects) - 10) > 0:
        print(f"    and {more} more; --json names all")
    if report.smallest and report.median and report.largest:
        sizes = zip(("smallest", "median", "largest"), (report.smallest, report.median, report.largest), strict=True)
        print("  " + ", ".join(f"{what} {height}x{width} px" for what, (height, width) in sizes) + " (height x width)")
    print(f"grid {report.grid}, {counted(len(report.buckets), 'bucket')}:")
    if report.buckets:
        print(f"  {'bucket':<22}{'images':>10}{'crop loss':>13}{'at most':>11}")
    for bucket, number in report.buckets.items():
        loss, most = (f"{100 * report.crop_loss[bucket][name]:.1f} %" for name in ("mean", "max"))
        print(f"  {bucket:<22}{number:>10}{loss:>13}{most:>11}")
    if report.crop_loss:
        print(f"  {crop_loss_line(report.crop_loss)}")
    if report.bytes_per_sample:
        parts = ", ".join(f"{what} {human_bytes(number)}" for what, number in report.bytes_per_sample.items())
        print(f"  stored per sample, about: {human_bytes(sum(report.bytes_per_sample.values()))} ({parts})")
    num_held_out = sum(number for name, number in report.buckets.items() if name.startswith("val/"))
    print_held_out(num_held_out, report.found - report.rejected, options.held_out)
    enlarged = "would be enlarged to fill its bucket" if report.enlarged == 1 else "would be enlarged to fill their bucket"
    first = ", ".join(one_line(sample_id) for sample_id in report.without_caption_ids[:10])
    counts = (
        (report.without_caption, "image", f"without a caption: {first}; --json names all"),
        (report.enlarged, "image", enlarged),
        (len(report.captions_beyond), "image", "with more captions than are kept"),
    )
    for count, noun, what in counts:
        if count:
            print(f"  {counted(count, noun)} {what}")
    print_captions_and_notes(report.captions_from, report.notes)
    print_warnings(report.captions_without_image, report.passed_over)
    if not report.is_full:
        print("from the file headers only; --full decodes every image and finds damage after the header")
    if not report.buckets:
        print(f"error: not one of {counted(report.found, 'image')} could be packed", file=sys.stderr)
