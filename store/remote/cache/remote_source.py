"""A store in object storage as its reader sees it: a folder in the cache whose files arrive when they are needed."""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
import weakref
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.files.paths import read_regular
from bucketline.forks import ForkSafeLock, OwnerProcess
from bucketline.store.folder import DeniedError, MissingObjectError
from bucketline.store.format.block import LINE_BYTES, bytes_digest
from bucketline.store.format.manifest import ShardPaths, object_name
from bucketline.store.remote.cache.cached_shard import PINNED, PRESENT_SUFFIX, CachedShard, CacheRemovedError
from bucketline.store.remote.cache.fetch import LOOK_AGAIN_S, LineFetcher
from bucketline.store.remote.cache.folder import cache_folder
from bucketline.store.remote.generations import newest_generation, read_generation
from bucketline.store.remote.objects import IN_TIME, ObjectFolder, asked_again, is_wrong, within
from bucketline.store.shard.meta import LINE_CHECKSUM, META_FORMAT
from bucketline.store.shard.row_locator import check_shard_id
from bucketline.store.shard.sidecar import Sidecar, read_listed

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
    from pathlib import Path

    from bucketline.store.format.manifest import FileEntry, Manifest, ShardEntry
    from bucketline.store.remote.cache.fetch import FetchStats
    from bucketline.store.remote.cache.folder import CacheFolder, StoreFolder
    from bucketline.store.remote.urls import RemoteOptions

    Files = Sequence[tuple[Path, FileEntry]]  # with what the manifest says of each

AT_ONCE = 64
REQUESTED_BYTES = 32 << 20  # of all shards' sidecars, if they are requested before it is known whose rows come first
ROOM_PART = 2  # of the deadline: how long a file waits for room in the cache
PATIENCE_PART = 8  # of the deadline: the longest pause between two files once it has passed
DOWN_S = 2.0  # after a deadline has passed, a reader's other files fail at once: it would wait for one after the other


class RemoteFiles:
    """The whole files of a store, and the checksums of its shards' lines. Safe for several threads."""

    def __init__(self, objects: ObjectFolder, cache: CacheFolder, folder: StoreFolder, *, deadline_s: float) -> None:
        """`folder` is the store's in the cache."""
        self._objects, self._cache, self._folder, self._deadline_s = objects, cache, folder, deadline_s
        self._paths: dict[int, tuple[ShardEntry, CachedPaths]] = {}  # by id of the entry
        self._known: set[Path] = set()  # compared by this process
        self._sums: dict[str, list[int]] = {}  # by key
        self._lock = threading.Lock()
        self._failure: tuple[float, StoreError] | None = None  # the last deadline that has passed
        self._verdicts: dict[Path, StoreError] = {}  # on files that are damaged, missing or denied, in this iteration
        self._requested: dict[Path, Future[None]] = {}  # by `request`
        self._is_closed = threading.Event()

    def paths(self, entry: ShardEntry) -> CachedPaths:
        """Return the places of a shard's files in the cache."""
        found = self._paths.get(id(entry))
        if found is None:
            found = self._paths[id(entry)] = entry, cached_paths(self._folder.path, entry)
        return found[1]

    def fetch(self, files: Files) -> None:
        """Make files available at their paths."""
        end = time.monotonic() + IN_TIME * self._deadline_s
        if absent := self._absent(files):
            self._refuse_known(absent)
            self._fetch_all(absent, end)

    def request(self, files: Files) -> None:
        """Request files that are going to be fetched, and do not wait. What fails is requested again by `fetch`."""
        absent = [(path, listed) for path, listed in files if path not in self._known and not path.exists()]
        if absent:
            pool = ThreadPoolExecutor(min(AT_ONCE, len(absent)), thread_name_prefix="bucketline-sidecar")
            self._requested.update({file[0]: pool.submit(self._fetch_one, *file, self._is_closed) for file in absent})
            pool.shutdown(wait=False)

    def close(self) -> None:
        """Let no request that nobody waits for be repeated."""
        self._is_closed.set()

    def try_again(self) -> None:
        """Request files again, although a deadline has just passed or they were wrong: a new iteration begins."""
        self._failure = None
        self._verdicts.clear()

    def _check(self, data: bytes, path: Path, listed: FileEntry) -> None:
        if (len(data), found := bytes_digest(data)) != (listed.num_bytes, listed.digest):
            raise CorruptError(
                f"{self._objects.place(object_name(path))} is not the file that the manifest lists: it has {len(data)} "
                f"bytes and the digest {found}; restore the file that belongs there, or push the store again"
            )

    def _fetch_all(self, absent: Files, end: float) -> None:
        # in threads, so that a request which stalls ends no later than the deadline for whoever waits here
        is_over = threading.Event()
        pool = ThreadPoolExecutor(min(AT_ONCE, len(absent)), thread_name_prefix="bucketline-sidecar")
        try:
            late = {pool.submit(self._fetch_one, *own, is_over): own[0] for own in absent}
            least_s = 0.0  # until one has arrived
            verdict: StoreError | None = None  # the others' are awaited: a batch after the other would meet the next
            while late:
                # after the deadline only as long as others arrive: a slow link is not a store that stalls
                done, _ = wait(late, max(end - time.monotonic(), least_s), return_when=FIRST_COMPLETED)
                least_s = self._deadline_s / PATIENCE_PART
                if not done:
                    break
                for future in done:
                    verdict = self._settle(late.pop(future), future) or verdict
            if verdict is not None:
                raise verdict
        except (MissingObjectError, DeniedError, CorruptError):
            raise
        except StoreError as error:
            self._failure = time.monotonic(), error
            raise
        finally:
            is_over.set()
            pool.shutdown(wait=False, cancel_futures=True)
        if late:
            place = self._objects.place(object_name(next(iter(late.values()))))
            failure = StoreError(f"{place} has not arrived within {self._deadline_s:g} s; iterate again when the store answers")
            self._failure = time.monotonic(), failure
            raise failure

    def _absent(self, wanted: Files) -> Files:
        """Return the files that are not in the cache, or damaged there, once those that were requested have come."""
        if self._requested:
            arriving = [own for path, _ in wanted if (own := self._requested.pop(path, None)) is not None]
            wait(arriving, IN_TIME * self._deadline_s)
        absent = []
        for path, listed in wanted:
            if path in self._known and path.exists():
                continue
            with suppress(OSError, StoreError):  # of an earlier run, unless it is damaged
                self._check(path.read_bytes(), path, listed)
                self._known.add(path)
                continue
            absent.append((path, listed))
        return absent

    def _refuse_known(self, absent: Files) -> None:
        """Raise what is known of a file, or of the store: each batch that needs it would have it requested again."""
        for path, _ in absent:
            if (verdict := self._verdicts.get(path)) is not None:
                raise type(verdict)(str(verdict))
        if self._failure is not None and time.monotonic() - self._failure[0] < DOWN_S:
            raise self._failure[1]

    def _settle(self, path: Path, future: Future[None]) -> StoreError | None:
        """Remember and return what a request has failed by if the next one would find the same; raise what may pass."""
        error = future.exception()
        if isinstance(error, DeniedError) or (error is not None and is_wrong(error)):
            assert isinstance(error, StoreError)
            self._verdicts[path] = error
            return error
        future.result()
        return None

    def _fetch_one(self, path: Path, listed: FileEntry, is_over: threading.Event) -> None:
        def read() -> bytes:
            data = self._objects.read(object_name(path), listed.num_bytes)
            self._check(data, path, listed)
            return data

        data = asked_again(read, self._deadline_s, is_over=is_over)
        self._reserve(len(data), is_over)
        self._write(path, data)
        self._known.add(path)

    def _reserve(self, num_bytes: int, is_over: threading.Event) -> None:
        """Reserve bytes in the cache; wait while others use all that it may hold."""
        end = time.monotonic() + self._deadline_s / ROOM_PART
        while not self._cache.reserve(num_bytes):
            if is_over.wait(LOOK_AGAIN_S) or time.monotonic() > end:
                raise self._cache.full()

    def _write(self, path: Path, data: bytes) -> None:
        """Write a file, complete from its first moment under this name. It is not synced: it is compared before it is used."""
        aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            self._folder.refuse_removed()
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            with open(fd, "wb") as file:  # noqa: PTH123 - opens a descriptor
                file.write(data)
            self._cache.put_sidecar(aside, path)
        except (OSError, CacheRemovedError) as error:
            aside.unlink(missing_ok=True)
            self._cache.room.give_back(len(data))
            if isinstance(error, CacheRemovedError):
                raise
            raise StoreError(
                f"{path} cannot be written: {error.strerror}; make room on the disk, or name another folder with --cache"
            ) from error

    def sums_of(self, entry: ShardEntry) -> list[int]:
        paths = self.paths(entry)
        with self._lock:
            if paths.key in self._sums:
                return self._sums[paths.key]
        self.fetch([(paths.meta, entry.meta)])
        file = Sidecar(paths.meta, read_regular(paths.meta, entry.meta.num_bytes), META_FORMAT, entry.meta)
        check_shard_id(entry, file)
        sums: list[int] = file.column(LINE_CHECKSUM).tolist()
        if len(sums) != -(-entry.lmdb.num_bytes // LINE_BYTES):
            raise CorruptError(
                f"{file.path} has {len(sums)} checksums for the {entry.lmdb.num_bytes} bytes of the shard's file; push the "
                "store again"
            )
        with self._lock:
            return self._sums.setdefault(paths.key, sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPaths(ShardPaths):
    """The files of one form of a shard."""

    key: str  # 32 hexadecimal digits, of the digests of the shard's files


def cached_paths(store: Path, entry: ShardEntry) -> CachedPaths:
    """Return the paths of a shard's files in a store's folder of the cache."""
    key = _digest(entry.name, entry.shard_id, *(f"{one.num_bytes}:{one.digest}" for one in (entry.lmdb, entry.meta)))
    return CachedPaths(folder=store / key, name=entry.name, key=key)


def store_key(place: str, store_id: str) -> str:
    """Return the name of a store's folder in the cache: `place` is its URL and endpoint."""
    return _digest(place, store_id)


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


_FIRST = -1  # the priority of what a caller waits for at once; batches are numbered from 0


class RemoteSource:
    """The source of a store's shards (`store/shard/reader.py`), shared by all who open the store in this process."""

    def __init__(self, objects: ObjectFolder, cache: Path, store_id: str) -> None:
        """Open the store's folder in the cache, and keep it there while this object lives."""
        self.url, self.options = objects.url, objects.options
        self.objects, self.num_bytes = objects, 0  # of the shards' files, in the generation that was opened last
        self._cache = cache_folder(cache, objects.options.cache_bytes)
        self._folder = self._cache.open_store(store_key(objects.identity, store_id), objects.url)
        self.path = self._folder.path
        self.files = files = RemoteFiles(objects, self._cache, self._folder, deadline_s=objects.options.deadline_s)
        self._entries: dict[int, ShardEntry] = {}
        self._shards: dict[Path, CachedShard] = {}  # by file
        self._opening = threading.Lock()
        self.readers: weakref.WeakSet[object] = weakref.WeakSet()  # that hold lines ahead
        entries = self._entries

        def sums_of(shard: CachedShard) -> list[int]:
            return files.sums_of(entries[id(shard)])

        self.lines = LineFetcher(objects, self._cache, sums_of, deadline_s=objects.options.deadline_s)
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

    def reserve_ring(self, reader: object, needed: Mapping[Hashable, int], is_held: Callable[[int], bool]) -> None:
        """Leave so many bytes of the cache to lines that are not pinned; see `CacheFolder.reserve_ring`."""
        self._cache.reserve_ring(reader, needed, is_held)
        with self._opening:
            if not self._shards:
                self._cache.unpin(self._folder)

    def leave_room(self, manifest: Manifest) -> None:
        """Let pinned lines leave room in the cache for all sidecars of a generation, which come when they are first needed."""
        self.num_bytes = sum(shard.data_bytes for shard in manifest.shards)
        added = [own.meta.num_bytes for shard in manifest.shards for own in shard.added.values()]
        self._folder.sidecar_bytes = sum(shard.meta.num_bytes for shard in manifest.shards) + sum(added)

    def paths(self, entry: ShardEntry) -> CachedPaths:
        return self.files.paths(entry)

    def fetch(self, files: Sequence[tuple[Path, FileEntry]]) -> None:
        self.files.fetch(files)

    def read(self, path: Path, listed: FileEntry) -> bytes:
        """Return a list of dropped rows."""
        self.fetch([(path, listed)])
        return read_listed(path, listed)

    def open_shard(self, entry: ShardEntry) -> None:
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
    source.leave_room(manifest)
    return source


def open_remote(
    url: str, options: RemoteOptions, cache: Path, generation: int | None, *, reads_rows: bool = False
) -> tuple[Manifest, RemoteSource]:
    """Return a store's newest generation, or the one that is given, and the source of its shards.

    `reads_rows`: request the sidecars of all shards, if they are few and small, while newer generations are looked for: a round
    trip less until the first row.
    """
    objects = ObjectFolder.open(url, options)

    opened: list[RemoteSource] = []  # keeps it while its files are requested

    def expect(manifest: Manifest) -> None:
        if len(manifest.shards) <= AT_ONCE and sum(entry.meta.num_bytes for entry in manifest.shards) <= REQUESTED_BYTES:
            opened.append(source_at(objects, cache, manifest))
            opened[0].files.request([(opened[0].paths(entry).meta, entry.meta) for entry in manifest.shards])

    def find() -> Manifest:
        newest = newest_generation(objects, expect if reads_rows and generation is None else None)
        return newest if generation is None else read_generation(objects, generation, newest)

    manifest = within(options.deadline_s, objects.url, find)
    return manifest, source_at(objects, cache, manifest)
