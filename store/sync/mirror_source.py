"""Read what a mirror only stands for: pieces of shards' files are got when they are needed, and written to their place."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bucketline.errors import CorruptError, StoreError
from bucketline.store.format.hashing import file_digest
from bucketline.store.format.layout import shard_paths
from bucketline.store.read.store import Store
from bucketline.store.transfer.download import Downloader
from bucketline.store.write.describe import sent_note

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from bucketline.store.format.layout import ShardPaths
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.manifest_entries import DroppedEntry, FileEntry, ShardEntry
    from bucketline.store.remote.objects import ObjectFolder

_PIECE_BYTES = 1 << 20


class MirroredStore(Store):
    """A generation of a mirror; what is only in the bucket is got when it is read."""

    def __init__(self, path: Path, manifest: Manifest, source: MirrorSource) -> None:
        super().__init__(path, manifest, source=source)  # type: ignore[arg-type]  # only its shards read by it
        self.source = None


class MirrorSource:
    """The source of the shards that a mirror at `path` has from the bucket (`store/shard/source.py`).

    Records are compared with the index, rows and captions with their checksums, by those who read them.
    """

    def __init__(self, objects: ObjectFolder, path: Path) -> None:
        """Request nothing yet."""
        self.url, self._objects, self._path = objects.url, objects, path
        self._lock = threading.Lock()
        self._whole: set[Path] = set()
        self._pieces = dict[str, set[int]]()

    def _is_in_the_bucket(self, name: str) -> bool:
        name = name.partition(".")[0]  # of an added column's file the shard's
        return (self._path / "shards" / f"{name}.remote").exists() or sent_note(self._path, name).exists()

    def paths(self, entry: ShardEntry) -> ShardPaths:
        """Return the places of a shard's files in the mirror; see `ShardSource`."""
        return shard_paths(self._path, entry.name)

    def fetch(self, files: Sequence[tuple[Path, FileEntry | DroppedEntry]]) -> None:
        """Make sidecars available; see `ShardSource`."""
        with self._lock:
            for path, expected in files:
                if path in self._whole or not self._is_in_the_bucket(path.name):
                    continue
                if not path.exists() or file_digest(path) != (expected.num_bytes, expected.digest):
                    Downloader(self._objects).get_one(path, expected)
                self._whole.add(path)

    def open_shard(self, entry: ShardEntry) -> None:
        """Do nothing: a mirror has every shard's file in its full length."""

    @contextmanager
    def reading(self, entry: ShardEntry, ranges: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Make byte ranges of a shard readable; see `ShardSource`."""
        if self._is_in_the_bucket(entry.name):
            with self._lock:
                self._get(entry, ranges)
        yield

    def _get(self, entry: ShardEntry, ranges: Sequence[tuple[int, int]]) -> None:
        have = self._pieces.setdefault(entry.name, set())
        wanted = {
            piece
            for begin, num_bytes in ranges
            if num_bytes
            for piece in range(begin // _PIECE_BYTES, (begin + num_bytes - 1) // _PIECE_BYTES + 1)
        }
        path, name = shard_paths(self._path, entry.name).lmdb, f"shards/{entry.name}.lmdb"
        for piece in sorted(wanted - have):
            begin, end = piece * _PIECE_BYTES, min((piece + 1) * _PIECE_BYTES, entry.lmdb.num_bytes)
            if begin >= end:
                continue  # beyond the end, which the reader notices
            data = self._objects.read_range(name, begin, end)
            if len(data) != end - begin:
                raise CorruptError(f"{self._objects.place(name)} ends at byte {begin + len(data)}, the manifest says later")
            try:
                with path.open("r+b") as file:
                    os.pwrite(file.fileno(), data, begin)
            except OSError as error:
                raise StoreError(f"{path} cannot be written: {error.strerror}; fix this and rerun the command") from error
            have.add(piece)
