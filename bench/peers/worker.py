"""The functions of a peer's process: write its format, check it at the gate, time passes that read each byte of each batch."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.bench.apart import cpu_s, read_bytes
from bucketline.bench.fixtures.server_process import control
from bucketline.bench.peers.registry import BY_NAME, Opened, Remote, Way
from bucketline.bench.peers.samples import Expected, GateError, SetShape, check, sums_up, touch

if TYPE_CHECKING:
    from collections.abc import Callable

EXPECTED = "what is expected.json"  # next to the formats' folders


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A peer's data and how to open it."""

    peer: str
    folder: str  # of the set; contains the peers' folders
    shape: dict[str, Any]
    way: dict[str, Any]
    remote: dict[str, Any] | None = None  # None: read the peer's folder

    @property
    def set_shape(self) -> SetShape:
        return SetShape.of_json(self.shape)

    @property
    def own_folder(self) -> Path:
        return own_folder(Path(self.folder), self.peer)

    def ready(self) -> Callable[[], Opened]:
        """Import the peer, and return a function that opens it."""
        place = self.own_folder if self.remote is None else Remote(**self.remote)
        peer, shape, way = BY_NAME[self.peer].make(), self.set_shape, Way(**self.way)
        return lambda: peer.open(shape, place, way)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Measurements of timed passes."""

    wall_s: float  # with opening, unless it was opened and warm before
    cpu_s: float  # of all processes
    first_batch_s: float
    num_bytes: int  # of the batches' tensors, less what was ready when the clock started
    read_bytes: int = 0  # from the disk
    passes: int = 1
    sent_bytes: int = 0  # by the server
    cached_bytes: int = 0  # on the disk, afterwards


def own_folder(folder: Path, peer: str) -> Path:
    """Return a peer's folder in the folder of a set."""
    return folder / "".join(letter if letter.isalnum() else "-" for letter in peer)


def write_expected(folder: Path, wanted: Expected) -> None:
    """Save the expected result of a pass where a peer's process finds it."""
    (folder / EXPECTED).write_text(json.dumps(asdict(wanted)), encoding="ascii")


def read_expected(folder: Path) -> Expected:
    """Return the result saved by `write_expected`."""
    return Expected(**json.loads((folder / EXPECTED).read_text(encoding="ascii")))


def write(asked: dict[str, Any]) -> int:
    """Write the samples in the peer's format; return the disk space that they take."""
    task = Task(**asked)
    own = task.own_folder
    making = own.with_name(own.name + ".making")
    making.mkdir()
    BY_NAME[task.peer].make().write(task.set_shape, making)
    making.rename(own)
    return disk_bytes(own)


def gate(asked: dict[str, Any]) -> dict[str, Any]:
    """Check two passes and return the observations."""
    task = Task(**asked)
    shape, wanted, opened = task.set_shape, read_expected(Path(task.folder)), task.ready()()
    first, second = (check(opened.begin(), shape, wanted) for _ in range(2))
    return {
        "batches": first.batches,
        "full_batches": shape.num_batches,
        "num_bytes": first.num_bytes,
        "buckets_in_a_row": first.buckets_in_a_row,
        "is_shuffled": first.order != sorted(first.order),
        "is_shuffled_anew": first.order != second.order,
    }


def timed(asked: dict[str, Any], least_s: float | None = None, times: int = 1) -> list[Timed]:
    """Time passes, `times` after each other.

    `least_s`: hot, passes for at least so long. One or more untimed passes come first: they start workers, map files and fill
    the page cache. None: one pass. Opening is timed too, because it may read data that the pass then does not read again;
    imports are not.
    """
    task = Task(**asked)
    shape, wanted = task.set_shape, read_expected(Path(task.folder))
    opening, opened, ready, found = task.ready(), None, 0, list[Timed]()
    if least_s is not None:
        opened, passes = opening(), 0
        while passes == 0 or passes * shape.num_batches < opened.warm_batches:
            for batch in opened.begin():
                touch(batch)
            passes += 1
        ready = opened.ready_bytes()
    remote = None if task.remote is None else Remote(**task.remote)
    if remote is not None:
        control(remote.endpoint)
    for _ in range(times):
        total, num_bytes, passes, first_s = 0, 0, 0, 0.0
        read, used, begun = read_bytes(), cpu_s(), time.perf_counter()
        opened = opened or opening()
        while passes == 0 or time.perf_counter() - begun < (least_s or 0):
            for batch in opened.begin():
                first_s = first_s or time.perf_counter() - begun
                total += touch(batch)
                num_bytes += batch.num_bytes
            passes += 1
        wall, used, read = time.perf_counter() - begun, cpu_s() - used, read_bytes() - read
        if num_bytes != passes * shape.delivered_bytes or not sums_up(total, passes, wanted):
            raise GateError(f"{num_bytes} bytes of {passes} timed passes are not every sample once a pass")
        own = Timed(
            wall_s=wall,
            cpu_s=used,
            first_batch_s=first_s,
            num_bytes=max(1, num_bytes - ready),
            read_bytes=read,
            passes=passes,
            sent_bytes=0 if remote is None else control(remote.endpoint).num_bytes,
            cached_bytes=0 if remote is None else disk_bytes(Path(remote.cache)),
        )
        found.append(own)
    return found


def disk_bytes(folder: Path) -> int:
    """Return the disk space of a folder's files, some of which may go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_blocks * 512
    return total
