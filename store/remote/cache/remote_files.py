"""A store's sidecars in the cache: fetched whole when they are first used, several at a time, and compared with the manifest."""

from __future__ import annotations

import os
import random
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from bucketline.errors import CorruptError, StoreError
from bucketline.store.format.hashing import LINE_BYTES, bytes_digest
from bucketline.store.format.layout import shard_paths
from bucketline.store.remote.objects import DeniedError, MissingObjectError
from bucketline.store.shard.row_locator import EXTENTS_FORMAT, LINE_CHECKSUM, check_shard_id
from bucketline.store.shard.sidecar import PagedFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import TypeVar

    from bucketline.store.format.manifest import DroppedEntry, FileEntry, ShardEntry
    from bucketline.store.remote.cache.folder import CacheFolder
    from bucketline.store.remote.objects import ObjectFolder

    T = TypeVar("T")

AT_ONCE = 32
LINES_FORMAT = "bucketline.lines/1"
LINES_SUFFIX = ".lines"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class RemoteFiles:
    """The whole files of a store, and the checksums of its shards' lines."""

    def __init__(self, objects: ObjectFolder, cache: CacheFolder, path: Path, *, deadline_s: float) -> None:
        """`path` is the store's folder in the cache."""
        self._objects, self._cache, self._path, self._deadline_s = objects, cache, path, deadline_s
        self._known: set[Path] = set()  # compared by this process
        self._sums: dict[str, list[int]] = {}  # by shard
        self._lock = threading.Lock()

    def fetch(self, files: Sequence[tuple[Path, FileEntry | DroppedEntry]]) -> None:
        """Make files available at their paths.

        Raises:
            StoreError: if one does not arrive within the deadline, or the disk is full.
            CorruptError: if one is not what the manifest lists.
        """
        new = [(path, listed) for path, listed in files if path not in self._known]
        if len(new) <= 1:
            for path, listed in new:
                self._fetch_one(path, listed)
            return
        with ThreadPoolExecutor(min(AT_ONCE, len(new)), thread_name_prefix="bucketline-sidecar") as pool:
            for _ in pool.map(lambda own: self._fetch_one(*own), new):
                pass  # raises an exception of a thread

    def _fetch_one(self, path: Path, listed: FileEntry | DroppedEntry) -> None:
        with suppress(OSError):
            data = path.read_bytes()
            if (len(data), bytes_digest(data)) == (listed.num_bytes, listed.digest):
                self._known.add(path)
                return

        def read() -> bytes:
            data = self._objects.read(self._name(path))
            if (len(data), bytes_digest(data)) != (listed.num_bytes, listed.digest):
                raise CorruptError(
                    f"{self._objects.place(self._name(path))} is not the file that the manifest lists: it has {len(data)} bytes and "
                    f"the digest {bytes_digest(data)}; restore the file that belongs there, or push the store again"
                )
            return data

        self._write(path, self.persist(read))
        self._known.add(path)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._path).as_posix()

    def persist(self, read: Callable[[], T]) -> T:
        """Return what `read` returns; call it again after an error that may pass, until the deadline.

        Raises:
            StoreError: the last error.
        """
        begun, tries = time.monotonic(), 0
        while True:
            try:
                return read()
            except (MissingObjectError, DeniedError):
                raise
            except StoreError as error:
                tries += 1
                pause = random.uniform(0.0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**tries))
                if time.monotonic() + pause - begun > self._deadline_s or (isinstance(error, CorruptError) and tries > 2):
                    raise
                time.sleep(pause)

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
            StoreError: if the shard has none: an older version of the format, not pushed by `store push`.
        """
        with self._lock:
            if entry.name in self._sums:
                return self._sums[entry.name]
        paths = shard_paths(self._path, entry.name)
        self.fetch([(paths.extents, entry.extents)])
        file = PagedFile(paths.extents, entry.extents.num_bytes, EXTENTS_FORMAT, plain_reads=True)
        if not file.has(LINE_CHECKSUM):
            file = self._lines_file(entry, paths.folder / f"{entry.name}{LINES_SUFFIX}")
        check_shard_id(entry, file)
        sums = file.slice(LINE_CHECKSUM, 0, len(file.column(LINE_CHECKSUM))).tolist()
        if len(sums) != -(-entry.lmdb.num_bytes // LINE_BYTES):
            raise CorruptError(
                f"{file.path} has {len(sums)} checksums for the {entry.lmdb.num_bytes} bytes of the shard's file; push the store again"
            )
        with self._lock:
            return self._sums.setdefault(entry.name, sums)

    def _lines_file(self, entry: ShardEntry, path: Path) -> PagedFile:
        """Return the file of line checksums that `store push` writes for shards of an earlier version."""
        with suppress(StoreError, OSError):  # of an earlier run, unless it is damaged
            file = PagedFile(path, path.stat().st_size, LINES_FORMAT, plain_reads=True)
            check_shard_id(entry, file)
            file.check_all()
            return file
        try:
            data = self.persist(lambda: self._objects.read(self._name(path)))
        except MissingObjectError as error:
            raise StoreError(
                f"{self._objects.place(self._name(path))} is missing, and the shard's extents have no checksums of its lines (it is of "
                "format version 1 or 2); push the store with `store push`, which writes them"
            ) from error
        self._write(path, data)
        return PagedFile(path, len(data), LINES_FORMAT, plain_reads=True)
