"""The origin of a store's rows: ids that stay as a data set grows, and rows of another folder with the same names.

A row's `source` is the path of its file, or of its image where the cache records that one.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.errors import SourceError
from bucketline.ingest.pipeline.packed_index import PackedIndex

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from bucketline.ingest.importers.cache import CacheEntry
    from bucketline.store import Store


def origin_of(entry: CacheEntry, source: Path) -> str:
    """Return what a row says of its origin: the image that the cache records, else the file in the cache."""
    return entry.image or f"{os.path.abspath(source)}/{entry.path}"  # noqa: PTH100 - called per row


def named_as_stored(entries: Sequence[CacheEntry], store: Store, prefix: str) -> list[CacheEntry]:
    """Return entries with the ids under which the store has their images.

    An id is the image's path from the folder that all images are in. If a folder next to that one is added, this is another
    folder, and the rows of the images that were there before are found by the end of their path and by their `source`.
    """
    index, found = PackedIndex(store), list(entries)
    stored = index.find_all([entry.id for entry in entries])
    missing = [n for n, entry in enumerate(entries) if stored[n] is None and entry.image is not None]
    named = [(n, name) for n in missing for name in _other_names(entries[n], prefix)]
    for (n, name), row in zip(named, index.find_all([name for _, name in named]), strict=True):
        if row is not None and store.sample(name)[1].source == entries[n].image:
            found[n] = replace(entries[n], id=name)
    times = Counter(entry.id for entry in found)
    return [
        replace(entry, id=prefix + (entry.image or "").replace("\\", "/").lstrip("/"))
        if entry.id == before.id and entry.image is not None and times[entry.id] > 1
        else entry
        for entry, before in zip(found, entries, strict=True)
    ]


def _other_names(entry: CacheEntry, prefix: str) -> Iterator[str]:
    """Yield the ids that an entry would have from other folders above its image."""
    path = (entry.image or "").replace("\\", "/").lstrip("/")
    own = entry.id.removeprefix(prefix)
    parts = path.split("/")
    ends = ["/".join(parts[at:]) for at in range(len(parts))]
    end = next((end for end in ends if own == end or own.startswith((f"{end}/", f"{end} ("))), None)
    if end is not None:  # what follows says which of an image's latents it is
        yield from (prefix + other + own[len(end) :] for other in ends if other != end)


def refuse_other_origin(changed: Sequence[CacheEntry], store: Store, source: Path) -> None:
    """Check that rows that would be replaced came from where the entries are.

    Raises:
        SourceError: if some are of another folder, or of other images.
    """
    stored = PackedIndex(store).find_all([entry.id for entry in changed])
    other = [
        (entry, own)
        for entry, row in zip(changed, stored, strict=True)
        if row is not None and entry.problem is None and not _is_of(entry, own := store.sample(entry.id)[1].source, source)
    ]
    if other:
        entry, own = min(other, key=lambda one: one[0].id)
        raise SourceError(
            f"{counted(len(other), 'row')} of the store would be replaced by other files of the same names: "
            f"{entry.id!r:.200} came from {own!r:.300}, here it is {origin_of(entry, source)!r:.300}. --prefix NAME imports "
            "this cache next to it, as NAME/ID; --replace replaces the rows"
        )


def _is_of(entry: CacheEntry, own: str, source: Path) -> bool:
    if own in (entry.image, entry.path):
        return True
    is_of_here = not os.path.isabs(own) or own.startswith(f"{os.path.abspath(source)}/")  # noqa: PTH117, PTH100 - of any machine
    return entry.image is None and is_of_here
