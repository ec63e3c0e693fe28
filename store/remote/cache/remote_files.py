"""A store's sidecars in the cache: fetched whole when they are first used, several at a time, compared with the manifest."""

from __future__ import annotations

import os
import secrets
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING

from bucketline.errors import CorruptError, StoreError
from bucketline.store.format.hashing import LINE_BYTES, bytes_digest
from bucketline.store.format.layout import shard_paths
from bucketline.store.remote.cache.pauses import pause_after
from bucketline.store.remote.lines import decode_lines, lines_name
from bucketline.store.remote.objects import DeniedError, MissingObjectError
from bucketline.store.shard.row_locator import EXTENTS_FORMAT, LINE_CHECKSUM, check_shard_id
from bucketline.store.shard.sidecar import PagedFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bucketline.store.format.manifest_entries import DroppedEntry, FileEntry, ShardEntry
    from bucketline.store.remote.cache.folder import CacheFolder
    from bucketline.store.remote.objects import ObjectFolder

AT_ONCE = 32
MAX_WRONG = 3  # times that a file may differ from what the manifest lists
DOWN_S = 2.0  # after a deadline has passed, a reader's other files fail at once: it would wait for one after the other


class RemoteFiles:
    """The whole files of a store, and the checksums of its shards' lines. Safe for several threads."""

    def __init__(self, objects: ObjectFolder, cache: CacheFolder, path: Path, *, deadline_s: float) -> None:
        """`path` is the store's folder in the cache."""
        self._objects, self._cache, self._path, self._deadline_s = objects, cache, path, deadline_s
        self._known: set[Path] = set()  # compared by this process
        self._sums: dict[str, list[int]] = {}  # by shard
        self._lock = threading.Lock()
        self._failure: tuple[float, StoreError] | None = None  # the last deadline that has passed

    def fetch(self, files: Sequence[tuple[Path, FileEntry | DroppedEntry]]) -> None:
        """Make files available at their paths.

        Raises:
            StoreError: if one does not arrive within the deadline, or the disk is full.
            CorruptError: if one is not what the manifest lists.
        """
        self._each([(self._name(path), path, self._checked(listed)) for path, listed in files])

    def try_again(self) -> None:
        """Request files again, although a deadline has just passed: a new iteration begins."""
        self._failure = None

    def _checked(self, listed: FileEntry | DroppedEntry) -> Callable[[bytes, Path], None]:
        def check(data: bytes, path: Path) -> None:
            if (len(data), found := bytes_digest(data)) != (listed.num_bytes, listed.digest):
                raise CorruptError(
                    f"{self._objects.place(self._name(path))} is not the file that the manifest lists: it has {len(data)} "
                    f"bytes and the digest {found}; restore the file that belongs there, or push the store again"
                )

        return check

    def _each(self, wanted: Sequence[tuple[str, Path, Callable[[bytes, Path], None]]]) -> None:
        """Make files available that are (object, path, check); the check raises an error if the bytes are wrong."""
        absent = []
        for name, path, check in wanted:
            if path in self._known:
                continue
            with suppress(OSError, StoreError):  # of an earlier run, unless it is damaged
                check(path.read_bytes(), path)
                self._known.add(path)
                continue
            absent.append((name, path, check))
        if not absent:
            return
        if self._failure is not None and time.monotonic() - self._failure[0] < DOWN_S:
            raise self._failure[1]
        # in threads, so that a request which stalls ends no later than the deadline for whoever waits here
        is_over = threading.Event()
        pool = ThreadPoolExecutor(min(AT_ONCE, len(absent)), thread_name_prefix="bucketline-sidecar")
        try:
            late = {pool.submit(self._fetch_one, *own, is_over): own[0] for own in absent}
            while late:
                done, _ = wait(late, self._deadline_s, return_when=FIRST_COMPLETED)
                if not done:
                    break
                for future in done:
                    del late[future]
                    future.result()
        except (MissingObjectError, DeniedError, CorruptError):
            raise
        except StoreError as error:
            self._failure = time.monotonic(), error
            raise
        finally:
            is_over.set()
            pool.shutdown(wait=False, cancel_futures=True)
        if late:
            place = self._objects.place(next(iter(late.values())))
            failure = StoreError(f"{place} has not arrived within {self._deadline_s:g} s; iterate again when the store answers")
            self._failure = time.monotonic(), failure
            raise failure

    def _fetch_one(self, name: str, path: Path, check: Callable[[bytes, Path], None], is_over: threading.Event) -> None:
        tries = wrong = 0
        end = time.monotonic() + self._deadline_s
        while True:
            try:
                data = self._objects.read(name)
                check(data, path)
            except (MissingObjectError, DeniedError):
                raise
            except StoreError as error:
                tries, wrong = tries + 1, wrong + isinstance(error, CorruptError)
                pause = pause_after(tries)
                if is_over.is_set() or wrong == MAX_WRONG or time.monotonic() + pause > end:
                    raise
                is_over.wait(pause)
            else:
                self._write(path, data)
                self._known.add(path)
                return

    def _name(self, path: Path) -> str:
        return path.relative_to(self._path).as_posix()

    def _write(self, path: Path, data: bytes) -> None:
        """Write a file, complete from its first moment under this name. It is not synced: it is compared before it is used."""
        aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            with open(fd, "wb") as file:  # noqa: PTH123 - opens a descriptor
                file.write(data)
            aside.replace(path)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise StoreError(
                f"{path} cannot be written: {error.strerror}; make room on the disk, or name another folder with --cache"
            ) from error
        self._cache.count_sidecar(len(data))

    def keep(self, name: str, data: bytes) -> None:
        """Keep a copy of a document, such as a manifest, in the store's folder of the cache."""
        path = self._path / name
        if not path.exists():
            self._write(path, data)

    def sums_of(self, entry: ShardEntry) -> list[int]:
        """Return the checksums of a shard's lines.

        Raises:
            StoreError: if the shard has none: of an earlier version of the format, and not pushed by `store push`.
        """
        with self._lock:
            if entry.name in self._sums:
                return self._sums[entry.name]
        paths = shard_paths(self._path, entry.name)
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
            return self._sums.setdefault(entry.name, sums)

    def _pushed_sums(self, entry: ShardEntry) -> list[int]:
        """Return the checksums that `store push` writes for shards of an earlier version."""
        name = lines_name(entry.name)
        path = self._path / name

        def check(data: bytes, path: Path) -> None:
            decode_lines(data, entry, path)

        try:
            self._each([(name, path, check)])
        except MissingObjectError as error:
            raise StoreError(
                f"{self._objects.place(name)} is missing, and the shard's extents have no checksums of its lines: it is of an "
                "earlier version of the format; push the store with `store push`, which writes them"
            ) from error
        found: list[int] = decode_lines(path.read_bytes(), entry, path).tolist()
        return found
