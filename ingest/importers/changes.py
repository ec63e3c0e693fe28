"""Find out which entries of a cache a store does not have as they are now."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.ingest.importers.cache import odd_files_rejected
from bucketline.ingest.importers.rows import kept_captions
from bucketline.ingest.pipeline.packed_index import PackedIndex
from bucketline.ingest.sources.local_files import LEADS_OUT, LinkedOutError, file_stamp
from bucketline.store.format.sample_record import captions_checksum, storable_mtime_ns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from bucketline.ingest.importers.cache import Cached, CacheEntry, CacheListing, Importer
    from bucketline.store import Store


def unique(listing: CacheListing) -> None:
    """Mark a second entry of an id, and entries whose values are the same part of a file, as such that cannot be imported."""
    seen: dict[str, CacheEntry] = {}
    sharing: dict[tuple[object, ...], list[str]] = {}  # ids by part of a file
    for entry in listing.entries:
        sharing.setdefault((entry.path, entry.at), []).append(entry.id)
    entries = []
    for entry in listing.entries:
        if entry.problem is None and len(ids := sharing[entry.path, entry.at]) > 1:
            problem = f"{' and '.join(ids[:5])} share it, which is of one of them; rename the others, and cache them again"
            entry = replace(entry, problem=problem)  # noqa: PLW2901 - its only form
        if (other := seen.setdefault(entry.id, entry)) is not entry:
            problem = f"{entry.path} and {other.path} are caches of one image; keep one"
            entry = replace(entry, id=f"{entry.id} ({entry.path})", problem=problem)  # noqa: PLW2901 - its only form
        entries.append(entry)
    listing.entries = entries


def not_stored(entries: Sequence[CacheEntry], store: Store | None, source: Path, max_captions: int) -> list[CacheEntry]:
    """Return the entries that the store does not have as they are now: values and captions."""
    if store is None:
        return list(entries)
    index, changed = PackedIndex(store), []
    for entry, stored in zip(entries, index.find_all([entry.id for entry in entries]), strict=True):
        try:
            same = (
                entry.problem is entry.caption_problem is None
                and stored is not None
                and (stored.source_bytes, stored.source_mtime_ns) == cache_stamp(source, entry)
                and (
                    entry.captions is None or stored.captions == captions_checksum(kept_captions(entry.captions, max_captions))
                )
            )
        except RejectedError:
            same = False  # read again, and rejected with its reason
        if not same:
            changed.append(entry)
    return changed


def cache_stamp(source: Path, entry: CacheEntry) -> tuple[int, int]:
    """Return the length and the mtime of a sample's values: of its files together, and of the newest of them.

    Raises:
        RejectedError: if one of them is not there.
    """
    if entry.stamp is not None:
        return entry.stamp[0], storable_mtime_ns(entry.stamp[1])
    stamps = [file_stamp(f"{source}/{path}", source) for path in (entry.path, entry.text_path) if path is not None]
    return sum(stamp.num_bytes for stamp in stamps), max(storable_mtime_ns(stamp.mtime_ns) for stamp in stamps)


@contextmanager
def rejects_named(entry: CacheEntry) -> Iterator[None]:
    """Name an entry's file in what it is rejected for in this block, whatever that is.

    Raises:
        RejectedError: if the block raises one, or an error that the file causes.
    """
    try:
        with odd_files_rejected(entry.path):
            yield
    except LinkedOutError as error:
        why = f"{entry.path}: {LEADS_OUT}, which an import never follows; put the file itself there"
        raise RejectedError(error.reason, why) from error
    except RejectedError as error:
        if entry.path in error.detail:
            raise
        raise RejectedError(error.reason, f"{entry.path}: {error.detail}") from error


def read_entry(importer: Importer, source: Path, entry: CacheEntry, variant: str) -> Cached:
    """Read an entry's values.

    Raises:
        RejectedError: if it cannot be imported, or the listing has shown that.
    """
    with rejects_named(entry):
        if entry.problem is not None:
            raise RejectedError(Reason.CACHE, entry.problem)
        if entry.caption_problem is not None:
            raise RejectedError(Reason.CAPTION, entry.caption_problem)
        return importer.read(source, entry, variant)
