"""The disk shim (`disk_shim.c`): compiled where there is a compiler, and what a process that runs under it can ask of it."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum
from pathlib import Path

from tests.fault.families import records_of
from tests.fault.record import Asked, Kind, Record

SOURCE = Path(__file__).with_name("disk_shim.c")
NEVER = 1 << 40  # so many operations go through first


class Operation(IntEnum):
    """The operations that can be made to fail, as the shim numbers it."""

    READ = 0
    WRITE = 1
    SYNC = 2
    CHANGE = 3  # whatever a file system that became read-only refuses


FAILURES = (
    ("EIO on fsync", Operation.SYNC, errno.EIO),
    ("a disk that is full from some write on", Operation.WRITE, errno.ENOSPC),
    ("EIO on write", Operation.WRITE, errno.EIO),
    ("a disk that turns read-only", Operation.CHANGE, errno.EROFS),
)


class NoCompilerError(Exception):
    """The shim cannot be compiled here."""


def built(folder: Path) -> Path:
    """Compile the shim.

    Raises:
        NoCompilerError: if that is not possible.
    """
    compiler = next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), [sys.executable, "-m", "ziglang", "cc"])
    if len(compiler) > 1 and not importlib.util.find_spec("ziglang"):
        raise NoCompilerError("no C compiler: neither cc nor the package ziglang (run `make torture`, which installs it)")
    path = folder / "disk_shim.so"
    options = ["-O1", "-shared", "-fPIC", "-o", str(path), str(SOURCE), "-ldl"]
    done = subprocess.run([*compiler, *options], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoCompilerError(f"the shim does not compile: {done.stderr.strip()[-200:]}")
    return path


def records_under_shim(function: str, asked: Asked, fault: str) -> Iterator[Record]:
    """Run `MODULE:FUNCTION` in a process of its own under the shim; yield its records."""
    under = replace(asked, folder=asked.folder / "shim")
    under.folder.mkdir()
    try:
        shim = built(asked.folder)
    except NoCompilerError as error:
        yield Record(fault, Kind.DISK, not_run=str(error))
        return
    yield from records_of(function, under, fault, {"LD_PRELOAD": str(shim)})


class Shim:
    """The shim that this process runs under."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.fault_count.restype = ctypes.c_long
        self._library.fault_arm.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long]
        self._library.fault_clock.argtypes = [ctypes.c_long]

    def watch(self, folder: Path) -> None:
        """Have it look at the files below one folder."""
        self._library.fault_root(os.fsencode(folder.resolve()))

    @contextmanager
    def failing(self, operation: Operation, error: int, after: int) -> Iterator[None]:
        """Have an operation fail, again and again, once `after` of its kind have gone through."""
        self.arm(operation, error, after)
        try:
            yield
        finally:
            self._library.fault_disarm()

    def arm(self, operation: Operation, error: int, after: int) -> None:
        """Have an operation fail as `failing` does, and to the end of this process."""
        self._library.fault_arm(operation, error, after)

    def count(self, operation: Operation) -> int:
        """Return how many operations of a kind there were since the last `failing` began."""
        return int(self._library.fault_count(operation))

    def shift_clock(self, seconds: int) -> None:
        """Set the clock of this process."""
        self._library.fault_clock(seconds)
