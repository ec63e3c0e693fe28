"""The files of a shard in the cache, named by the digests that the manifest lists: other contents are other files.

A store's folder has one folder for each form of a shard, and one for each of its lists of dropped rows, so that the lines of an
unchanged shard serve every generation, and nothing that a process has mapped is ever written with other contents.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.store.format.layout import ShardPaths

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.store.format.manifest_entries import ShardEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPaths(ShardPaths):
    """The files of one form of a shard."""

    key: str  # 32 hexadecimal digits, of the digests of the shard's files
    lists: Path  # folder of the list of dropped rows

    def dropped(self, generation: int) -> Path:
        return ShardPaths(folder=self.lists, name=self.name).dropped(generation)


def cached_paths(store: Path, entry: ShardEntry) -> CachedPaths:
    """Return the paths of a shard's files in a store's folder of the cache."""
    key = _digest(
        entry.name, entry.shard_id, *(f"{one.num_bytes}:{one.digest}" for one in (entry.lmdb, entry.extents, entry.index))
    )
    dropped = entry.dropped
    of_list = key if dropped is None else _digest(key, f"{dropped.generation}:{dropped.num_bytes}:{dropped.digest}")
    return CachedPaths(folder=store / key, name=entry.name, key=key, lists=store / of_list)


def store_key(place: str, store_id: str) -> str:
    """Return the name of a store's folder in the cache: `place` is its URL, and all else that decides what answers there."""
    return _digest(place, store_id)


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
