"""A store in object storage as its reader sees it: a folder in the cache whose files arrive when they are needed."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import StoreError
from bucketline.forks import ForkSafeLock, OwnerProcess
from bucketline.store.format.hashing import LINE_BYTES
from bucketline.store.remote.cache.cached_shard import PINNED, PRESENT_SUFFIX, CachedShard
from bucketline.store.remote.cache.folder import cache_folder
from bucketline.store.remote.cache.line_fetcher import LineFetcher
from bucketline.store.remote.cache.remote_files import AT_ONCE, RemoteFiles, store_key
from bucketline.store.remote.generations import newest_generation, read_generation
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.retries import within

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence
    from pathlib import Path

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.manifest_entries import DroppedEntry, FileEntry, ShardEntry
    from bucketline.store.remote.cache.held_line import FetchStats
    from bucketline.store.remote.cache.remote_files import CachedPaths
    from bucketline.store.remote.urls import RemoteOptions

_FIRST = -1  # the priority of what a caller waits for at once; batches are numbered from 0


class RemoteSource:
    """The source of a store's shards (`store/shard/reader.py`), shared by all who open the store in this process."""

    def __init__(self, objects: ObjectFolder, cache: Path, store_id: str) -> None:
        """Open the store's folder in the cache, and keep it there while this object lives."""
        self.url, self.options = objects.url, objects.options
        self.num_bytes = 0  # of the shards' files, in the generation that was opened last
        self.objects = objects
        self._cache = cache_folder(cache, objects.options.cache_bytes)
        self._folder = self._cache.open_store(store_key(objects.identity, store_id), objects.url)
        self.path = self._folder.path
        deadline_s = objects.options.deadline_s
        self.files = files = RemoteFiles(objects, self._cache, self._folder, deadline_s=deadline_s)
        self._entries: dict[int, ShardEntry] = {}
        self._shards: dict[Path, CachedShard] = {}  # by file
        self._opening = threading.Lock()
        self.readers: weakref.WeakSet[object] = weakref.WeakSet()  # that hold lines ahead
        entries = self._entries

        def sums_of(shard: CachedShard) -> list[int]:
            return files.sums_of(entries[id(shard)])

        self.lines = LineFetcher(objects, self._cache, sums_of, deadline_s=deadline_s)
        self._owner = OwnerProcess()
        self._finalizer = weakref.finalize(self, _close, self.lines, self.files, self._folder, self._owner)
        self._finalizer.atexit = False

    @property
    def is_inherited(self) -> bool:
        """True in a process that was forked from the one that opened the store: only what is there can be read."""
        return not self._owner.is_current

    @property
    def is_removed(self) -> bool:
        """True if its folder in the cache, or a shard's file, was removed since: what is absent cannot be fetched any more."""
        if self.is_inherited:
            return False
        return not (self._folder.locks.is_there and all(shard.is_there for shard in tuple(self._shards.values())))

    @property
    def limit(self) -> int:
        """Bytes that the cache may hold, if its disk has room for them."""
        return self._cache.asked_limit

    @property
    def ring_bytes(self) -> int:
        return self._cache.ring_bytes

    @property
    def is_cache_shared(self) -> bool:
        """True if another process uses the cache."""
        return self._cache.room.is_shared()

    def reserve_ring(self, reader: object, needed: Mapping[Hashable, int], *, holds_all: bool) -> None:
        """Leave so many bytes of the cache to lines that are not pinned; see `CacheFolder.reserve_ring`."""
        self._cache.reserve_ring(reader, needed, holds_all=holds_all)
        with self._opening:
            if not self._shards:
                self._cache.unpin(self._folder)

    def paths(self, entry: ShardEntry) -> CachedPaths:
        """Return the places of a shard's files in the cache; see `ShardSource`."""
        return self.files.paths(entry)

    def fetch(self, files: Sequence[tuple[Path, FileEntry | DroppedEntry]]) -> None:
        """Make sidecars available; see `ShardSource`."""
        self.files.fetch(files)

    def open_shard(self, entry: ShardEntry) -> None:
        """Make a shard's sparse file available; see `ShardSource`."""
        if not (self.is_inherited and self.paths(entry).lmdb in self._shards):
            self.cached(entry)

    def cached(self, entry: ShardEntry) -> CachedShard:
        """Return a shard's file in the cache, made if it is missing."""
        paths = self.paths(entry)
        path = paths.lmdb
        found = self._shards.get(path)
        if found is not None:
            return found
        self._refuse_inherited()
        with self._opening:
            if path not in self._shards:
                self._folder.refuse_removed()
                try:
                    shard = CachedShard(path, entry.lmdb.num_bytes, paths.key, self._folder.locks)
                except OSError as error:
                    raise StoreError(
                        f"{path} cannot be made: {error.strerror}; make room on the disk, or name another folder with --cache"
                    ) from error
                self._entries[id(shard)] = entry
                self._shards[path] = shard
            return self._shards[path]

    @contextmanager
    def reading(self, entry: ShardEntry, ranges: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Make byte ranges of a shard readable; see `ShardSource`."""
        shard = self.cached(entry)
        wanted = {
            line
            for begin, num_bytes in ranges
            if num_bytes
            for line in range(begin // LINE_BYTES, (begin + num_bytes - 1) // LINE_BYTES + 1)
        }
        if all(shard.present[line] == PINNED for line in wanted):
            yield
            return
        self._refuse_inherited()
        held = self.lines.hold([(shard, line) for line in sorted(wanted)], _FIRST)
        try:
            self.lines.wait(held)
            yield
        finally:
            self.lines.release(held)

    def _refuse_inherited(self) -> None:
        if self.is_inherited:
            raise StoreError(
                f"process {os.getpid()} was forked from {self._owner.pid}, which had opened {self.url}; open the store in a "
                "process that is started by spawn or forkserver, or read through a loader, which starts a service for itself"
            )

    def has_list(self, entry: ShardEntry) -> bool:
        """Return whether a shard has been read from before, by any process."""
        return self.paths(entry).lmdb.with_suffix(PRESENT_SUFFIX).exists()

    def pinned(self, entry: ShardEntry) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return which lines of a shard are pinned now, `[lines]`; they stay while the store is open."""
        return np.equal(self.cached(entry).present, PINNED)

    def stats(self) -> FetchStats:
        """Return what this process has fetched of the store."""
        return self.lines.stats()


def _close(lines: LineFetcher, files: RemoteFiles, folder: object, owner: OwnerProcess) -> None:
    """End the threads. The folder's locks end with it, in the process that opened it."""
    if owner.is_current:
        lines.close()
        files.close()
        folder.close()  # type: ignore[attr-defined]


_sources: weakref.WeakValueDictionary[tuple[object, ...], RemoteSource] = weakref.WeakValueDictionary()
_lock = ForkSafeLock()


def source_at(objects: ObjectFolder, cache: Path, manifest: Manifest) -> RemoteSource:
    """Return the source of a generation's shards, which all who open the store in this process share."""
    with _lock:
        key = os.getpid(), objects.identity, objects.options, cache, manifest.store_id
        source = _sources.get(key)
        if source is None or source.is_removed:
            source = _sources[key] = RemoteSource(objects, cache, manifest.store_id)
    return source


def open_remote(
    url: str, options: RemoteOptions, cache: Path, generation: int | None, *, reads_rows: bool = False
) -> tuple[Manifest, RemoteSource]:
    """Return a store's newest generation, or the one that is given, and the source of its shards.

    `reads_rows`: request the extents of all shards, if they are not many, while newer generations are looked for: a round trip
    less until the first row.
    """
    objects = ObjectFolder.open(url, options)

    opened: list[RemoteSource] = []  # keeps it while its files are requested

    def expect(manifest: Manifest) -> None:
        if len(manifest.shards) <= AT_ONCE:
            opened.append(source_at(objects, cache, manifest))
            paths = (opened[0].paths(entry).extents for entry in manifest.shards)
            opened[0].files.request([(path, entry.extents) for path, entry in zip(paths, manifest.shards, strict=True)])

    def find() -> Manifest:
        newest = newest_generation(objects, expect if reads_rows and generation is None else None)
        return newest if generation is None else read_generation(objects, generation, newest)

    manifest = within(options.deadline_s, objects.url, find)
    source = source_at(objects, cache, manifest)
    source.num_bytes = sum(shard.data_bytes for shard in manifest.shards)
    return manifest, source
