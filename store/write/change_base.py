"""The generation that a change starts from: its manifest, its shards' indexes, and where new lists of dropped rows go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.store.shard.reader import SealedShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from bucketline.store.folder import Folder
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.manifest_entries import DroppedEntry, FileEntry, ShardEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeBase:
    """A generation of a store, on a disk or in object storage."""

    folder: Folder
    manifest: Manifest
    number: int  # in the names of the lists of dropped rows that are written; no other generation's lists have it
    path: Path  # of the shards' files on this machine
    fetch: Callable[[Iterable[tuple[Path, FileEntry | DroppedEntry]]], None] | None = None  # gets some; None on a disk

    def shard(self, entry: ShardEntry) -> SealedShard:
        """Return a shard's reader; nothing is opened yet."""
        return SealedShard(self.path, entry)

    def fetch_indexes(self) -> None:
        """Get the indexes of all shards, and their lists of dropped rows, before shards are read."""
        if self.fetch is not None:
            self.fetch(file for entry in self.manifest.shards for file in _index_and_list(self.shard(entry)))

    def write_list(self, shard: SealedShard, data: bytes) -> None:
        """Write a shard's list of dropped rows, which the generation that is being made is going to list."""
        self.folder.write(f"shards/{shard.paths.dropped(self.number).name}", data)


def _index_and_list(shard: SealedShard) -> Iterator[tuple[Path, FileEntry | DroppedEntry]]:
    yield shard.paths.index, shard.entry.index
    if (dropped := shard.entry.dropped) is not None:
        yield shard.paths.dropped(dropped.generation), dropped
