"""Lines that several commands of `ingest` print."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.command_line import one_line
from bucketline.files.redact import redacted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bucketline.ingest.sources.dataset_file import DatasetEntry


def print_entry(entry: DatasetEntry | None) -> None:
    """Print the line that comes before a source's own, if it is one of a data set file."""
    if entry is not None:
        print(f"{one_line(str(entry.name))} x {entry.repeats}: {one_line(str(redacted(entry.path)))}")


def print_captions_and_notes(captions_from: Mapping[str, int], notes: Sequence[str], without: str | None) -> None:
    """Print where captions came from, which images have none, and notes about the source."""
    if without is not None:
        print(f"  images without a caption: {without}")
    if captions_from:
        print(f"  captions from {'; '.join(f'{one_line(place)} ({count})' for place, count in captions_from.items())}")
    for note in notes:
        print(f"  note: {one_line(note)}")


def print_warnings(captions_without_image: list[str], passed_over: list[str]) -> None:
    """Print the first ten captions without an image and the first ten skipped images."""
    for what, names in (("caption without an image", captions_without_image), ("image skipped", passed_over)):
        for name in names[:10]:
            print(f"  warning: {what}: {one_line(name)}")
        if (more := len(names) - 10) > 0:
            print(f"  warning: and {more} more: {what}")
