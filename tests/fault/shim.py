"""The disk shim (`disk_shim.c`): compiled where there is a compiler, and what a process that runs under it can ask of it.

Power loss: of a run's writes, only what was synced is kept, or that and some of the rest; then the store must be sound.

A run under the disk shim writes shards as `ingest pack` does, drops samples and compacts, and has each change to its files
written down. For an instant in that log, the folder is rebuilt as a disk may have it: a file's bytes as of its last fsync, a
name as of the last fsync of its folder, and of what came after nothing, or some: any of the writes, and any first part of the
changes to names. That store must open and verify, and have every sample whose commit had returned, once adopted.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from bucketline.store import Store
from tests.commands import ROOT, call, spawn
from tests.fault.apart import HANG_S, Ended, apart
from tests.fault.families import records_of
from tests.fault.packs import expect_kept, name_of, write_shards
from tests.fault.record import Asked, Kind, Outcome, Record
from tests.kit import FORMS

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


Failure = tuple[Operation, int, int]  # the error, and after how many operations


def built(folder: Path) -> tuple[Path | None, str]:
    """Compile the shim; return where it is, or why it is not."""
    compiler = next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), [sys.executable, "-m", "ziglang", "cc"])
    if len(compiler) > 1 and not importlib.util.find_spec("ziglang"):
        return None, "no C compiler: neither cc nor the package ziglang (run `make torture`, which installs it)"
    path = folder / "disk_shim.so"
    options = ["-O1", "-shared", "-fPIC", "-o", str(path), str(SOURCE), "-ldl"]
    done = subprocess.run([*compiler, *options], capture_output=True, text=True, check=False)
    return (path, "") if done.returncode == 0 else (None, f"the shim does not compile: {done.stderr.strip()[-200:]}")


def records_under_shim(function: str, asked: Asked, fault: str) -> Iterator[Record]:
    """Run `MODULE:FUNCTION` in a process of its own under the shim; yield its records."""
    under = replace(asked, folder=asked.folder / "shim")
    under.folder.mkdir()
    shim, reason = built(asked.folder)
    if shim is None:
        yield Record(fault, Kind.DISK, not_run=reason)
    else:
        yield from records_of(function, under, fault, {"LD_PRELOAD": str(shim)})


class Shim:
    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.fault_count.restype = ctypes.c_long
        self._library.fault_arm.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long]
        self._library.fault_clock.argtypes = [ctypes.c_long]

    def watch(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._library.fault_root(os.fsencode(folder.resolve()))

    def arm(self, operation: Operation, error: int, after: int) -> None:
        """Have an operation fail, again and again, once `after` of its kind have gone through, to the end of this process."""
        self._library.fault_arm(operation, error, after)

    def under(self, failure: Failure, work: Callable[[], object], limit_s: float = HANG_S) -> Ended:
        """Do some work in a forked process on a disk that fails; it gives what that gave, and how often each operation came."""

        def failing() -> object:
            self.arm(*failure)
            return work(), [int(self._library.fault_count(operation)) for operation in Operation]

        return apart(failing, limit_s)

    def shift_clock(self, seconds: int) -> None:
        self._library.fault_clock(seconds)


RUN, SHARDS, DROPPED = 7, 3, (1, 4, 20)
MARKS = "marks"


class Change(NamedTuple):
    what: str
    node: int
    offset: int = 0
    one: str = ""
    two: str = ""
    data: bytes = b""


def read_log(path: Path) -> list[Change]:
    log, at, changes = path.read_bytes(), 0, []
    while at < len(log):
        end = log.index(b"\n", at)
        what, node, offset, length, one, two = log[at:end].decode().split("\t")
        at = end + 1
        data = log[at : at + int(length)] if what == "write" else b""
        at += len(data)
        changes.append(Change(what, int(node), int(offset), one, two, data))
    return changes


@dataclass(slots=True)
class File:
    """A file's bytes as they are, and as the disk has them; in between, the changes that it may have or not."""

    durable: bytearray = field(default_factory=bytearray)
    waiting: list[tuple[int, bytes | None]] = field(default_factory=list)  # an offset and bytes, or a length and None

    def sync(self) -> None:
        for change in self.waiting:
            _apply(self.durable, *change)
        self.waiting = []

    def after_loss(self, draw: random.Random, share: float) -> bytes:
        left = bytearray(self.durable)
        for change in self.waiting:
            if draw.random() < share:
                _apply(left, *change)
        return bytes(left)


def _apply(content: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        del content[offset:]
        content.extend(bytes(offset - len(content)))
    else:
        content.extend(bytes(max(0, offset - len(content))))
        content[offset : offset + len(data)] = data


@dataclass(slots=True)
class Disk:
    root: str
    nodes: dict[int, File] = field(default_factory=dict)  # by the number that the system gives now
    durable: dict[str, File | None] = field(default_factory=dict)  # by path; None: a folder
    names: dict[str, File | None] = field(default_factory=dict)
    waiting: list[tuple[str, File | None, bool]] = field(default_factory=list)  # a path, what it names, whether it is there

    def take(self, change: Change) -> None:
        if change.what in ("create", "folder"):
            file = File() if change.what == "create" else None
            if file is not None:
                self.nodes[change.node] = file
            self._name(change.one, file, is_there=True)
        elif change.what == "write":
            self.nodes[change.node].waiting.append((change.offset, change.data))
        elif change.what == "truncate":
            self.nodes[change.node].waiting.append((change.offset, None))
        elif change.what == "synced":  # written by a descriptor with O_DSYNC: the last write, and no other
            file = self.nodes[change.node]
            _apply(file.durable, *file.waiting.pop())
        elif change.what == "rename":
            file = self.names[change.one]
            self._name(change.one, file, is_there=False)
            self._name(change.two, file, is_there=True)
        elif change.what == "remove":
            self._name(change.one, self.names[change.one], is_there=False)
        elif change.what == "sync":
            self._sync(change)

    def _name(self, path: str, file: File | None, *, is_there: bool) -> None:
        if is_there:
            self.names[path] = file
        else:
            del self.names[path]
        self.waiting.append((path, file, is_there))

    def _sync(self, change: Change) -> None:
        if change.one == self.root or (change.one in self.names and self.names[change.one] is None):
            mine = [waits for waits in self.waiting if waits[0].rpartition("/")[0] == change.one]
            self.waiting = [waits for waits in self.waiting if waits[0].rpartition("/")[0] != change.one]
            for path, file, is_there in mine:
                _rename(self.durable, path, file, is_there=is_there)
        else:
            self.nodes[change.node].sync()

    def after_loss(self, target: Path, draw: random.Random, *, is_strict: bool) -> None:
        share = 0.0 if is_strict else draw.random()
        names = dict(self.durable)
        for path, file, is_there in self.waiting[: 0 if is_strict else draw.randint(0, len(self.waiting))]:
            _rename(names, path, file, is_there=is_there)
        target.mkdir(parents=True)
        for path, file in sorted(names.items()):
            place = target / os.path.relpath(path, self.root)
            if not place.parent.is_dir():
                continue  # in a folder that is lost
            if file is None:
                place.mkdir()
            else:
                place.write_bytes(file.after_loss(draw, share))


def _rename(names: dict[str, File | None], path: str, file: File | None, *, is_there: bool) -> None:
    if is_there:
        names[path] = file
    elif names.get(path) is file:
        del names[path]


def be_run(folder: Path, form: str) -> None:
    """Be the run: write shards, then drop, compact, and write once more; each promise is told in a file of the folder."""
    store = folder / "s"
    marks = os.open(folder / MARKS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    write_shards(store, RUN, marks, SHARDS, FORMS[form])
    os.write(marks, f"dropping {','.join(map(str, DROPPED))}\n".encode())
    for command in (["drop", store, *(name_of(RUN, number) for number in DROPPED)], ["compact", store, "--gc"]):
        call("store", *command).done()
    os.write(marks, b"compacted 0\n")
    assert Store.open(store).manifest.samples
    write_shards(store, RUN + 1, marks, 1, FORMS[form])


def promised(disk: Disk) -> dict[str, int]:
    """Return the samples that must be there, with their numbers, by what the run had told: to a person, who has no disk."""
    file = disk.names.get(f"{disk.root}/{MARKS}")
    told = b"" if file is None else file.after_loss(random.Random(), 1.0)
    run, expected = RUN, dict[str, int]()
    for line in told.decode().splitlines():
        what, _, numbers = line.partition(" ")
        if what == "dropping":
            for number in numbers.split(","):
                expected.pop(name_of(RUN, int(number)))
        elif what == "compacted":
            run += 1
        elif what == "commit":
            more = {name_of(run, number): number for number in range(int(numbers))}
            expected = more | expected
    return expected


def losses(asked: Asked) -> Iterator[Record]:
    yield from records_under_shim("shim:losses_under_shim", asked, "power loss")


def losses_under_shim(asked: Asked) -> Iterator[Record]:
    """Have the power fail at instants drawn from one run on a store of images, and one on a store of columns of any kind."""
    for form, count in (("images", asked.of(8, 150)), ("columns", asked.of(8, 75))):
        where, folder = "" if form == "images" else f", a store of {form}", asked.folder / form
        root, log, left = folder / "run", folder / "log", folder / "left"
        root.mkdir(parents=True)
        under = {"PYTHONPATH": str(ROOT), "FAULT_ROOT": str(root), "FAULT_LOG": str(log)}
        spawn([sys.executable, "-m", "tests.fault.shim", root, form], **under).done()
        changes, disk, at = read_log(log), Disk(root=str(root)), 0
        strict = Record(f"power loss{where}: what was synced is kept, nothing else", Kind.DISK)
        some = Record(f"power loss{where}: some of what was not synced is kept too", Kind.DISK)

        def trial(*, is_strict: bool, form: str = form, disk: Disk = disk, left: Path = left) -> Outcome:
            shutil.rmtree(left, ignore_errors=True)
            disk.after_loss(left, asked.draw, is_strict=is_strict)
            (left / "s").mkdir(exist_ok=True)
            expect_kept(left / "s", left.with_name("copy"), promised(disk), FORMS[form])
            return Outcome.RECOVERED

        for instant in sorted(asked.draw.sample(range(1, len(changes) + 1), min(len(changes), count))):
            for change in changes[at:instant]:
                disk.take(change)
            at = instant
            for record in (strict, some):
                record.trial(f"after change {instant} of {len(changes)}", trial, is_strict=record is strict)
        yield from (strict, some)


if __name__ == "__main__":
    be_run(Path(sys.argv[1]), sys.argv[2])
