"""The source of a shard's files if the store is not on this machine: asked before a file is opened or read.

`store/remote/cache` has the only source. A local store has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from bucketline.store.format.layout import ShardPaths
    from bucketline.store.format.manifest_entries import DroppedEntry, FileEntry, ShardEntry


class ShardSource(Protocol):
    """The source of the files of a store's shards. Each method raises a StoreError if it cannot do it."""

    def paths(self, entry: ShardEntry) -> ShardPaths:
        """Return the places of a shard's files on this machine."""

    def fetch(self, files: Sequence[tuple[Path, FileEntry | DroppedEntry]]) -> None:
        """Make sidecars available at their paths, with the contents that the manifest lists."""

    def open_shard(self, entry: ShardEntry) -> None:
        """Make a shard's file available at its path, of its full length; its bytes only while they are `reading`."""

    def reading(self, entry: ShardEntry, ranges: Sequence[tuple[int, int]]) -> AbstractContextManager[None]:
        """Make byte ranges (offset, length) of a shard's file readable, until the context ends."""
