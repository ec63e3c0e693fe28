"""The generation that a change starts from: its manifest, its shards' indexes, and where new lists of dropped rows go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.store.shard.reader import SealedShard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bucketline.store.folder import Folder
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.manifest_entries import DroppedEntry, FileEntry, ShardEntry
    from bucketline.store.shard.source import ShardSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeBase:
    """A generation of a store, on a disk or in object storage."""

    folder: Folder
    manifest: Manifest
    number: int  # in the names of the lists of dropped rows that are written; no other generation's lists have it
    path: Path  # of the shards' files on this machine
    source: ShardSource | None = None  # that makes them available there; None on a disk

    def shard(self, entry: ShardEntry) -> SealedShard:
        """Return a shard's reader; nothing is opened yet."""
        return SealedShard(self.path, entry, source=self.source)

    def expect_indexes(self) -> None:
        """Have the indexes of all shards, which are going to be read, and their lists arrive at the same time."""
        if self.source is not None:
            self.source.fetch([file for entry in self.manifest.shards for file in _index_and_list(self.shard(entry))])

    def write_list(self, shard: SealedShard, data: bytes) -> None:
        """Write a shard's list of dropped rows, which the generation that is being made is going to list."""
        self.folder.write(f"shards/{shard.paths.dropped(self.number).name}", data)


def _index_and_list(shard: SealedShard) -> Iterator[tuple[Path, FileEntry | DroppedEntry]]:
    yield shard.paths.index, shard.entry.index
    if (dropped := shard.entry.dropped) is not None:
        yield shard.paths.dropped(dropped.generation), dropped
