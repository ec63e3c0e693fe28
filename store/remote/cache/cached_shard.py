"""A shard's file in the cache: a sparse file of the shard's length, and a list with one byte for each of its lines.

The list's file is mapped by every process that reads the shard. A line's byte is set after its bytes are written and their
checksum was compared; a hole reads as zeros, so only lines whose byte is set are read. Whoever fetches a line locks its number
exclusively, whoever reads one that may be freed shares the lock (`RangeLocks`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import stat
import struct
import threading
import weakref
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import StoreError
from bucketline.store.format.block import LINE_BYTES
from bucketline.store.shard.mapped import map_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

_FLOCK = struct.Struct("@hhqqi0q")  # type, whence, start, length, process id (0 for these locks)
_OPEN: weakref.WeakSet[RangeLocks] = weakref.WeakSet()


class RangeLocks:
    """The locks of one file that this process holds, each on a number from 0 to 2^62."""

    def __init__(self, path: Path) -> None:
        """Open the file, creating it if it is missing; never through a link."""
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        _OPEN.add(self)

    @property
    def is_there(self) -> bool:
        """True if the file is still at its path; neither it nor the folder that it is in has been removed."""
        try:
            return os.path.samestat(os.fstat(self.fd), self.path.stat())
        except OSError:
            return False

    def duplicate(self) -> RangeLocks:
        """Return another object for the same locks: those that are held stay so until both are closed."""
        try:
            fd = os.dup(self.fd)
        except OSError as error:
            raise StoreError(f"{self.path}: the store was closed") from error
        found = RangeLocks.__new__(RangeLocks)
        found.path, found.fd = self.path, fd
        _OPEN.add(found)
        return found

    def exclusive(self, number: int) -> None:
        """Acquire a number for this process only; wait until no other holds it."""
        self._set(fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, number)

    def try_exclusive(self, number: int) -> bool:
        """Acquire a number for this process only; return False if another process holds it. A shared lock becomes exclusive."""
        return self._set(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, number)

    def try_shared(self, number: int) -> bool:
        """Acquire a number together with others; return False if one holds it exclusively. An exclusive lock becomes shared."""
        return self._set(fcntl.F_OFD_SETLK, fcntl.F_RDLCK, number)

    def unlock(self, number: int) -> None:
        """Release a number."""
        self._set(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, number)

    def _set(self, command: int, kind: int, number: int) -> bool:
        try:
            fcntl.fcntl(self.fd, command, _FLOCK.pack(kind, os.SEEK_SET, number, 1, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise StoreError(
                f"{self.path}: this file system has no byte-range locks ({error.strerror}); put the cache on a local disk"
            ) from error
        return True

    def close(self) -> None:
        """Release everything; idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        if "fd" in self.__dict__:
            self.close()


def _close_in_child() -> None:
    """Close what a forked child shares with its parent: it would keep the locks after the parent's end, or release them."""
    for locks in list(_OPEN):
        locks.close()


os.register_at_fork(after_in_child=_close_in_child)


ABSENT, PINNED, RING, OLD_PINNED, OLD_RING = range(5)  # a line's byte; OLD: written before the machine started, unchecked
PRESENT_SUFFIX = ".lines-present"
MAGIC = b"bucketline.lines"
HEADER_BYTES = 64  # magic, key, boot id (16 bytes each), length of the shard's file (U64), zeros
_LINE_BITS = 21  # a shard's file has at most 16 TiB
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_SWEEP_ABOVE = 4 << 20  # allocated bytes beyond those of the present lines, before a file is searched for left ones
FULL = (errno.ENOSPC, errno.EDQUOT)  # what is said of a full disk
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class CacheRemovedError(StoreError):
    """A cache, or a part of it, that was removed while a store in it was open."""

    @classmethod
    def of(cls, path: Path) -> CacheRemovedError:
        """Return the error of a folder or file of a store in the cache."""
        return cls(f"{path} was removed while it was in use; iterate or open the store again, which makes the cache again")


@cache
def boot_id() -> bytes:
    """Return 16 bytes that differ after a restart of the machine."""
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", ""))


class CachedShard:
    """One shard's file and list, open in this process."""

    def __init__(self, path: Path, num_bytes: int, key: str, locks: RangeLocks) -> None:
        """Open both files; make them if they are missing or damaged.

        `path` is that of the shard's file, `num_bytes` its length, `key` the digest of what it holds (`CachedPaths`), `locks`
        those of all shards of the store.
        """
        self.path, self.num_bytes, self.locks = path, num_bytes, locks
        self._writing = threading.Lock()  # the file system has one too, at which threads spin
        self.num_lines = -(-num_bytes // LINE_BYTES)
        self._key = bytes.fromhex(key)
        self._first_lock = first_lock(self._key)
        setup = self._first_lock | (1 << _LINE_BITS) - 1  # beyond every line
        locks.exclusive(setup)
        try:
            view = self._open()
        finally:
            locks.unlock(setup)
        self.present: NDArray[np.uint8] = view[HEADER_BYTES : HEADER_BYTES + self.num_lines]
        self.last_use: NDArray[np.int64] = view[uses_at(self.num_lines) :].view("<i8")
        self._sweep()

    def _open(self) -> NDArray[np.uint8]:
        view = self._list() if self._has_length() else None
        if view is None:
            # New files take the places of what is missing or damaged: another process may have mapped those that are there.
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._make_list()
            self._make_hole()
            view = self._list()
            assert view is not None
        self._inode = self.path.lstat().st_ino
        if (now := boot_id()) != view[32:48].tobytes():
            lines = view[HEADER_BYTES : HEADER_BYTES + self.num_lines]
            lines[lines == PINNED] = OLD_PINNED
            lines[lines == RING] = OLD_RING
            view[32:48] = np.frombuffer(now, dtype=np.uint8)
        return view

    @property
    def is_there(self) -> bool:
        """True if the file that was opened is still at its path."""
        with suppress(OSError):
            return self.path.lstat().st_ino == self._inode
        return False

    @property
    def _list_path(self) -> Path:
        return self.path.with_suffix(PRESENT_SUFFIX)

    def _has_length(self) -> bool:
        try:
            status = self.path.lstat()
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == self.num_bytes

    def _list(self) -> NDArray[np.uint8] | None:
        """Return the list's file, mapped; None if there is none of these contents."""
        expected = uses_at(self.num_lines) + 8 * self.num_lines
        try:
            fd = os.open(self._list_path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            if os.fstat(fd).st_size != expected:
                return None
            view = np.frombuffer(map_file(fd, expected, writable=True), dtype=np.uint8)
        finally:
            os.close(fd)
        is_own = view[:32].tobytes() == MAGIC + self._key and int(view[48:56].view("<u8")[0]) == self.num_bytes
        return view if is_own else None

    def _make_hole(self) -> None:
        aside = self.path.with_name(f"{secrets.token_hex(4)}.tmp{self.path.suffix}")
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(fd, self.num_bytes)
            aside.replace(self.path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def _make_list(self) -> None:
        header = MAGIC + self._key + boot_id() + self.num_bytes.to_bytes(8, "little")
        data = header.ljust(uses_at(self.num_lines) + 8 * self.num_lines, b"\0")
        aside = self._list_path.with_name(f"{self._list_path.name}.{secrets.token_hex(4)}.tmp")
        try:
            aside.write_bytes(data)  # all of it: a page without room on the disk would end a process that writes to the map
            aside.replace(self._list_path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def place(self, line: int) -> tuple[int, int]:
        """Return the first byte of a line and the one after its last."""
        return line * LINE_BYTES, min((line + 1) * LINE_BYTES, self.num_bytes)

    def lock_of(self, line: int) -> int:
        return self._first_lock | line

    @contextmanager
    def writing(self, line: int) -> Iterator[Callable[[memoryview], None]]:
        """Allocate a line's bytes, and yield a function that writes its next ones; its byte is not set yet.

        The line stays locked meanwhile, also if the locks are closed: nobody else writes there, or reads what is half written.
        """
        at, end = self.place(line)
        locks = self.locks.duplicate()
        try:
            fd = self._open_own()
            try:
                with self._writing:
                    # allocated at once, writing takes the processor half as long or less
                    if fallocate(fd, at, end) and (number := ctypes.get_errno()) in FULL:
                        raise OSError(number, os.strerror(number), str(self.path))

                def write(data: memoryview) -> None:
                    nonlocal at
                    with self._writing:
                        while data:
                            count = os.pwrite(fd, data, at)
                            at, data = at + count, data[count:]

                yield write
            finally:
                os.close(fd)
        finally:
            locks.close()

    def _open_own(self) -> int:
        """Return a descriptor of the shard's file, to write; raises a CacheRemovedError if it is another one, or gone."""
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise CacheRemovedError.of(self.path) from error
        if os.fstat(fd).st_ino != self._inode:
            os.close(fd)
            raise CacheRemovedError.of(self.path)
        return fd

    def read(self, line: int) -> bytearray:
        begin, end = self.place(line)
        data = bytearray(end - begin)
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            done = 0
            while done < len(data) and (count := os.preadv(fd, [memoryview(data)[done:]], begin + done)):
                done += count
        finally:
            os.close(fd)
        return data

    def punch(self, line: int) -> None:
        """Free a line's bytes on the disk. Its byte is not set any more, or not yet."""
        punch(self.path, *self.place(line))

    def _sweep(self) -> None:
        """Free what killed processes wrote without setting a line's byte."""
        status = self.path.stat()
        known = int(np.count_nonzero(self.present)) * LINE_BYTES
        if status.st_blocks * 512 <= known + _SWEEP_ABOVE:
            return
        for line in np.flatnonzero(self.present == ABSENT).tolist():
            if self.locks.try_exclusive(self.lock_of(line)):
                if self.present[line] == ABSENT:
                    self.punch(line)
                self.locks.unlock(self.lock_of(line))


def fallocate(fd: int, begin: int, end: int) -> int:
    """Allocate the bytes of a file from `begin` to `end`, and have it as long; return 0, or -1 with C's errno set."""
    return int(_libc.fallocate(fd, 0, begin, end - begin))


def uses_at(num_lines: int) -> int:
    """Return where a list's second part begins: a number for each line, larger the later it was used (I64)."""
    return -(-(HEADER_BYTES + num_lines) // 8) * 8


def first_lock(key: bytes) -> int:
    """Return the number of the lock of a shard's first line. Those of other shards differ, but for one in 2^40."""
    return int.from_bytes(key[:5], "big") << _LINE_BITS


def punch(path: Path, begin: int, end: int) -> None:
    """Free a line's bytes on the disk; they read as zeros then."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        num_bytes = -(-(end - begin) // 4096) * 4096  # the last page goes too, and the length stays
        if _libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, begin, num_bytes):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(fd)


def read_list(path: Path) -> tuple[NDArray[np.uint8], int] | None:
    """Return the contents of a shard's list, and the length of the shard's file; None if it is not there, or no list."""
    with suppress(OSError):
        data = np.fromfile(path, dtype=np.uint8)
        if len(data) >= HEADER_BYTES and data[:16].tobytes() == MAGIC:
            return data, int(data[48:56].view("<u8")[0])
    return None


def count_lines(path: Path) -> tuple[int, int]:
    """Return how many bytes of a shard's lines are pinned, and how many are in the ring, by the file of its list."""
    if (found := read_list(path)) is None:
        return 0, 0
    data, num_bytes = found
    lines = data[HEADER_BYTES : HEADER_BYTES - (-num_bytes // LINE_BYTES)]
    sizes = np.full(len(lines), LINE_BYTES, dtype=np.int64)
    sizes[-1:] = num_bytes - (len(lines) - 1) * LINE_BYTES
    pinned, ring = (np.isin(lines, kinds) for kinds in ((PINNED, OLD_PINNED), (RING, OLD_RING)))
    return int(sizes[pinned].sum()), int(sizes[ring].sum())


def unpin_lines(path: Path, num_bytes: int) -> int:
    """Move pinned lines of a shard to the ring, the last ones first, until they have `num_bytes`; return how many bytes.

    `path` is the file of the shard's list, which no process has mapped.
    """
    moved = 0
    with suppress(OSError), path.open("r+b") as file:
        data = bytearray(file.read())
        if len(data) < HEADER_BYTES or data[:16] != MAGIC:
            return 0
        num_lines = -(-int.from_bytes(data[48:56], "little") // LINE_BYTES)
        for at in range(HEADER_BYTES + num_lines - 1, HEADER_BYTES - 1, -1):
            if moved >= num_bytes:
                break
            if data[at] in (PINNED, OLD_PINNED):
                data[at] += RING - PINNED
                moved += LINE_BYTES
        file.seek(HEADER_BYTES)
        file.write(data[HEADER_BYTES : HEADER_BYTES + num_lines])
    return moved
