"""The generation that a change starts from: its manifest, its shards, and where new shards and lists of dropped rows go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.forks import cached_property
from bucketline.store.folder import LocalFolder
from bucketline.store.format.layout import shard_paths
from bucketline.store.read.store import Store
from bucketline.store.shard.reader import SealedShard

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.store.folder import Folder
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.manifest_entries import ShardEntry


class ChangeBase:
    """A generation of a store, on a disk or in object storage."""

    def __init__(self, folder: Folder, manifest: Manifest, number: int, made: Path, cache: Path | None = None) -> None:
        """Read nothing yet.

        `number` is in the names of the lists of dropped rows that are written; no other generation's lists have it. `made` is
        the folder in which new shards are made, laid out as a store: on a disk the store's. `cache`: of object storage.
        """
        self.folder, self.manifest, self.number, self.made = folder, manifest, number, made
        self._cache = cache

    @cached_property
    def store(self) -> Store:
        """Return the generation, open."""
        return Store.at(self.folder, self.manifest, self._cache)

    def shard(self, entry: ShardEntry) -> SealedShard:
        """Return the reader of a shard of the generation, or of one that was made; nothing is opened yet."""
        if isinstance(self.folder, LocalFolder) or shard_paths(self.made, entry.name).index.exists():
            return SealedShard(self.made, entry)
        return SealedShard(self.store.path, entry, source=self.store.source)

    def fetch_indexes(self) -> None:
        """Get the indexes of all shards, and their lists of dropped rows, before shards are read one after the other."""
        if not isinstance(self.folder, LocalFolder):
            self.store.fetch_indexes()

    def write_list(self, shard: SealedShard, data: bytes) -> None:
        """Write a shard's list of dropped rows, which the generation that is being made is going to list."""
        self.folder.write(f"shards/{shard_paths(self.made, shard.name).dropped(self.number).name}", data)
