"""A store's sidecars in the cache: fetched whole when they are first used, several at a time, compared with the manifest."""

from __future__ import annotations

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
from bucketline.store.remote.cache.cached_paths import cached_paths
from bucketline.store.remote.cache.cached_shard import CacheRemovedError
from bucketline.store.remote.cache.fetch_threads import LOOK_AGAIN_S
from bucketline.store.remote.deadlines import IN_TIME
from bucketline.store.remote.lines import decode_lines, lines_bytes, lines_name
from bucketline.store.remote.retries import asked_again, is_wrong
from bucketline.store.shard.row_locator import EXTENTS_FORMAT, LINE_CHECKSUM, check_shard_id
from bucketline.store.shard.sidecar import PagedFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from bucketline.store.format.manifest_entries import DroppedEntry, FileEntry, ShardEntry
    from bucketline.store.remote.cache.cached_paths import CachedPaths
    from bucketline.store.remote.cache.folder import CacheFolder, StoreFolder
    from bucketline.store.remote.objects import ObjectFolder

AT_ONCE = 64
EXTENTS = ".extents"
ROOM_PART = 2  # of the deadline: how long a file waits for room in the cache
PATIENCE_PART = 8  # of the deadline: the longest pause between two files once it has passed
DOWN_S = 2.0  # after a deadline has passed, a reader's other files fail at once: it would wait for one after the other


@dataclass(frozen=True, slots=True)
class _CachedFile:
    """A file that is wanted: its object, its place in the cache, and what raises an error if its bytes are wrong."""

    name: str
    path: Path
    check: Callable[[bytes, Path], None]
    most_bytes: int  # what the manifest says, or what it implies
    is_optional: bool = False  # it may be missing: whoever needs it finds that out


class RemoteFiles:
    """The whole files of a store, and the checksums of its shards' lines. Safe for several threads."""

    def __init__(self, objects: ObjectFolder, cache: CacheFolder, folder: StoreFolder, *, deadline_s: float) -> None:
        """`folder` is the store's in the cache."""
        self._objects, self._cache, self._folder, self._deadline_s = objects, cache, folder, deadline_s
        self._paths: dict[int, tuple[ShardEntry, CachedPaths]] = {}  # by id of the entry
        self._known: set[Path] = set()  # compared by this process
        self._sums: dict[str, list[int]] = {}  # by key
        self._with_lines: dict[Path, ShardEntry] = {}  # by extents
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

    def fetch(self, files: Sequence[tuple[Path, FileEntry | DroppedEntry]]) -> None:
        """Make files available at their paths, and with a shard's extents the checksums of its lines, which come next."""
        self._each(self._with_own_lines(files))

    def request(self, files: Sequence[tuple[Path, FileEntry | DroppedEntry]]) -> None:
        """Request files that are going to be fetched, and do not wait. What fails is requested again by `fetch`."""
        absent = [file for file in self._with_own_lines(files) if file.path not in self._known and not file.path.exists()]
        if absent:
            pool = ThreadPoolExecutor(min(AT_ONCE, len(absent)), thread_name_prefix="bucketline-sidecar")
            self._requested.update({file.path: pool.submit(self._fetch_one, file, self._is_closed) for file in absent})
            pool.shutdown(wait=False)

    def close(self) -> None:
        """Let no request that nobody waits for be repeated."""
        self._is_closed.set()

    def _with_own_lines(self, files: Sequence[tuple[Path, FileEntry | DroppedEntry]]) -> list[_CachedFile]:
        wanted = [_CachedFile(_name(path), path, self._checked(listed), listed.num_bytes) for path, listed in files]
        for path, _ in files:
            if path.suffix == EXTENTS and (entry := self._with_lines.get(path)) is not None:
                wanted.append(self._lines_file(entry, is_optional=True))
        return wanted

    def expect_lines(self, entries: Iterable[ShardEntry]) -> None:
        """Note shards whose lines' checksums are objects of their own, not in the extents."""
        self._with_lines.update({self.paths(entry).extents: entry for entry in entries})

    def try_again(self) -> None:
        """Request files again, although a deadline has just passed or they were wrong: a new iteration begins."""
        self._failure = None
        self._verdicts.clear()

    def _checked(self, listed: FileEntry | DroppedEntry) -> Callable[[bytes, Path], None]:
        def check(data: bytes, path: Path) -> None:
            if (len(data), found := bytes_digest(data)) != (listed.num_bytes, listed.digest):
                raise CorruptError(
                    f"{self._objects.place(_name(path))} is not the file that the manifest lists: it has {len(data)} "
                    f"bytes and the digest {found}; restore the file that belongs there, or push the store again"
                )

        return check

    def _each(self, wanted: Sequence[_CachedFile]) -> None:
        """Make files available, all of them at the same time."""
        end = time.monotonic() + IN_TIME * self._deadline_s
        absent = self._absent(wanted)
        if not absent:
            return
        self._refuse_known(absent)
        # in threads, so that a request which stalls ends no later than the deadline for whoever waits here
        is_over = threading.Event()
        pool = ThreadPoolExecutor(min(AT_ONCE, len(absent)), thread_name_prefix="bucketline-sidecar")
        try:
            late = {pool.submit(self._fetch_one, own, is_over): own for own in absent}
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
            place = self._objects.place(next(iter(late.values())).name)
            failure = StoreError(f"{place} has not arrived within {self._deadline_s:g} s; iterate again when the store answers")
            self._failure = time.monotonic(), failure
            raise failure

    def _absent(self, wanted: Sequence[_CachedFile]) -> list[_CachedFile]:
        """Return the files that are not in the cache, or damaged there, once those that were requested have come."""
        if self._requested:
            arriving = [own for file in wanted if (own := self._requested.pop(file.path, None)) is not None]
            wait(arriving, IN_TIME * self._deadline_s)
        absent = []
        for file in wanted:
            if file.path in self._known and file.path.exists():
                continue
            with suppress(OSError, StoreError):  # of an earlier run, unless it is damaged
                file.check(file.path.read_bytes(), file.path)
                self._known.add(file.path)
                continue
            if not (file.is_optional and file.path in self._verdicts):
                absent.append(file)
        return absent

    def _refuse_known(self, absent: Sequence[_CachedFile]) -> None:
        """Raise what is known of a file, or of the store: each batch that needs it would have it requested again."""
        for file in absent:
            if (verdict := self._verdicts.get(file.path)) is not None:
                raise type(verdict)(str(verdict))
        if self._failure is not None and time.monotonic() - self._failure[0] < DOWN_S:
            raise self._failure[1]

    def _settle(self, file: _CachedFile, future: Future[None]) -> StoreError | None:
        """Remember and return what a request has failed by if the next one would find the same; raise what may pass."""
        error = future.exception()
        if isinstance(error, DeniedError) or (error is not None and is_wrong(error)):
            assert isinstance(error, StoreError)
            self._verdicts[file.path] = error
            return error
        future.result()
        return None

    def _fetch_one(self, file: _CachedFile, is_over: threading.Event) -> None:
        def read() -> bytes | None:
            try:
                data = self._objects.read(file.name, file.most_bytes)
            except MissingObjectError:
                if file.is_optional:
                    return None
                raise
            file.check(data, file.path)
            return data

        data = asked_again(read, self._deadline_s, is_over=is_over)
        if data is None:
            return
        self._reserve(len(data), is_over)
        self._write(file.path, data)
        self._known.add(file.path)

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
        if file.has(LINE_CHECKSUM):
            sums: list[int] = file.slice(LINE_CHECKSUM, 0, len(file.column(LINE_CHECKSUM))).tolist()
        else:
            sums = self._pushed_sums(entry)
        if len(sums) != -(-entry.lmdb.num_bytes // LINE_BYTES):
            raise CorruptError(
                f"{file.path} has {len(sums)} checksums for the {entry.lmdb.num_bytes} bytes of the shard's file; push the "
                "store again"
            )
        with self._lock:
            return self._sums.setdefault(paths.key, sums)

    def _pushed_sums(self, entry: ShardEntry) -> list[int]:
        """Return the checksums that `store push` writes for shards of an earlier version."""
        file = self._lines_file(entry)
        try:
            self._each([file])
        except MissingObjectError as error:
            raise MissingObjectError(
                f"{self._objects.url} was not written by `store push`: {file.name} is missing, the checksums of a shard's "
                "lines, without which it cannot be read from far away. Push the store there; `store push STORE file:///FOLDER` "
                "writes a web server's folder"
            ) from error
        found: list[int] = decode_lines(file.path.read_bytes(), entry, file.path).tolist()
        return found

    def _lines_file(self, entry: ShardEntry, *, is_optional: bool = False) -> _CachedFile:
        name = lines_name(entry.name)

        def check(data: bytes, _: Path) -> None:
            decode_lines(data, entry, self._objects.place(name))

        paths = self.paths(entry)
        return _CachedFile(name, paths.folder / f"{entry.name}.lines", check, lines_bytes(entry), is_optional=is_optional)


def _name(path: Path) -> str:
    """Return the name of a file's object."""
    return f"shards/{path.name}"
