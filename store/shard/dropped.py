"""The dropped rows of a generation: one file for all of its shards, `generations/G-DIGEST.dropped`, checked whole when read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import CorruptError
from bucketline.forks import cached_property
from bucketline.store.format.block import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    bytes_digest,
    header_bytes_for,
    lay_out,
    read_header,
    write_header,
)
from bucketline.store.format.manifest import dropped_path
from bucketline.store.shard.sidecar import read_listed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import TypeAlias

    from numpy.typing import NDArray

    from bucketline.store.format.manifest import FileEntry, Manifest, ShardEntry

    Read: TypeAlias = Callable[[Path, FileEntry], bytes]

DROPPED_FORMAT = "bucketline.dropped/1"
_NONE = np.empty(0, dtype="<u4")


def encode_dropped(rows: Sequence[NDArray[np.uint32]]) -> bytes:
    """Return the file's bytes, given the sorted rows of each shard's buckets: shards in the manifest's order, then buckets."""
    joined, about = np.concatenate(rows).astype("<u4"), {"format": DROPPED_FORMAT}
    placed = lay_out([("rows", "U32", joined.shape)])
    return write_header(placed, about, header_bytes_for(placed, about)) + joined.tobytes()


class DroppedRows:
    """The dropped rows of one generation. The file is read at the first request; in object storage, by one GET."""

    def __init__(self, store: Path, manifest: Manifest, read: Read | None = None) -> None:
        """Open nothing yet. `store`: the folder of the store's files on this machine; `read`: from object storage."""
        self._listed, self._read, self._shards = manifest.dropped, read or read_listed, manifest.shards
        self.path = None if self._listed is None else dropped_path(store, self._listed)

    def of(self, shard: str, group: str) -> NDArray[np.uint32]:
        """Return the sorted row numbers of a bucket's dropped rows in a shard, by its name.

        Raises:
            StoreError: if the file is missing or cannot be read.
            CorruptError: if it is not the file that the manifest lists.
        """
        first, count = self._places.get(shard, {}).get(group, (0, 0))
        return self._rows[first : first + count] if count else _NONE

    @cached_property
    def _places(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Return the first position and the count of each bucket's rows in the file, by shard."""
        places: dict[str, dict[str, tuple[int, int]]] = {}
        at = 0
        for entry in self._shards:
            for group, count in dropped_counts(entry):
                places.setdefault(entry.name, {})[group] = at, count
                at += count
        return places

    @cached_property
    def _rows(self) -> NDArray[np.uint32]:
        """Return all rows, checked: sorted and existing in each bucket of each shard."""
        assert self._listed is not None
        assert self.path is not None
        data = self._read(self.path, self._listed)
        if (found := bytes_digest(memoryview(data))) != self._listed.digest:
            raise CorruptError(
                f"{self.path} is not the file that the manifest lists: its digest is {found}; restore it from a copy of the "
                "store, or `store restore` an earlier generation: `store repair` drops every shard with dropped rows"
            )
        head = memoryview(data)[: LENGTH_BYTES + MAX_HEADER_BYTES]
        tensors, about, begin = read_header(head, len(data), str(self.path))
        places = [(entry.groups[group].rows, count) for entry in self._shards for group, count in dropped_counts(entry)]
        limits, counts = np.array(places, dtype=np.int64).T
        form = [(own.name, own.dtype, tuple(own.shape)) for own in tensors]
        if about.get("format") != DROPPED_FORMAT or form != [("rows", "U32", (int(counts.sum()),))]:
            raise CorruptError(f"{self.path} does not have the {int(counts.sum())} rows that the manifest says are dropped")
        rows = np.frombuffer(data, dtype="<u4", offset=begin)
        ends = np.cumsum(counts)
        is_next = np.ones(len(rows), dtype=bool)
        is_next[1:] = rows[1:] > rows[:-1]
        is_next[(ends - counts)] = True
        if not is_next.all() or (rows[ends - 1] >= limits).any():
            raise CorruptError(f"{self.path}: its rows are not in order, or do not exist")
        return rows


def dropped_counts(entry: ShardEntry) -> list[tuple[str, int]]:
    """Return a shard's buckets with dropped rows and how many these are, in the file's order."""
    return [(name, group.dropped) for name, group in sorted(entry.groups.items()) if group.dropped]
