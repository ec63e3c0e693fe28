"""A store's sidecars in the cache: fetched whole when they are first used, several at a time, compared with the manifest."""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.errors import CorruptError, StoreError
from bucketline.store.folder import DeniedError, MissingObjectError
from bucketline.store.format.hashing import LINE_BYTES, bytes_digest
from bucketline.store.format.layout import ShardPaths
from bucketline.store.remote.cache.cached_shard import CacheRemovedError
from bucketline.store.remote.cache.fetch_threads import LOOK_AGAIN_S
from bucketline.store.remote.retries import IN_TIME, asked_again, is_wrong
from bucketline.store.shard.row_locator import EXTENTS_FORMAT, LINE_CHECKSUM, check_shard_id
from bucketline.store.shard.sidecar import PagedFile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bucketline.store.format.manifest_entries import DroppedEntry, FileEntry, ShardEntry
    from bucketline.store.remote.cache.folder import CacheFolder, StoreFolder
    from bucketline.store.remote.objects import ObjectFolder

    Files = Sequence[tuple[Path, FileEntry | DroppedEntry]]  # with what the manifest says of each

AT_ONCE = 64
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
        absent = self._absent(files)
        if not absent:
            return
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

    def _check(self, data: bytes, path: Path, listed: FileEntry | DroppedEntry) -> None:
        if (len(data), found := bytes_digest(data)) != (listed.num_bytes, listed.digest):
            raise CorruptError(
                f"{self._objects.place(_name(path))} is not the file that the manifest lists: it has {len(data)} "
                f"bytes and the digest {found}; restore the file that belongs there, or push the store again"
            )

    def _fetch_all(self, absent: Files, end: float) -> None:
        """Fetch files, all of them at the same time."""
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
            place = self._objects.place(_name(next(iter(late.values()))))
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

    def _fetch_one(self, path: Path, listed: FileEntry | DroppedEntry, is_over: threading.Event) -> None:
        def read() -> bytes:
            data = self._objects.read(_name(path), listed.num_bytes)
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
        """Return the checksums of a shard's lines."""
        paths = self.paths(entry)
        with self._lock:
            if paths.key in self._sums:
                return self._sums[paths.key]
        self.fetch([(paths.extents, entry.extents)])
        file = PagedFile(paths.extents, entry.extents.num_bytes, EXTENTS_FORMAT, plain_reads=True)
        check_shard_id(entry, file)
        sums: list[int] = file.slice(LINE_CHECKSUM, 0, len(file.column(LINE_CHECKSUM))).tolist()
        if len(sums) != -(-entry.lmdb.num_bytes // LINE_BYTES):
            raise CorruptError(
                f"{file.path} has {len(sums)} checksums for the {entry.lmdb.num_bytes} bytes of the shard's file; push the "
                "store again"
            )
        with self._lock:
            return self._sums.setdefault(paths.key, sums)


def _name(path: Path) -> str:
    """Return the name of a file's object."""
    return f"shards/{path.name}"


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
