"""Run one task of one peer in its environment: `python -m bucketline.bench.peers.worker JSON`, with a `Task` as JSON.

`write` writes the samples in the peer's format; `gate` checks two passes; `time` times passes and reads each byte of each
batch; `about` returns the versions. Prints JSON. A peer's own output goes to stderr.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import sys
import time
import warnings
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bucketline.bench.fixtures.server_process import control
from bucketline.bench.peers.gate import GateError, check, sums_up, touch
from bucketline.bench.peers.peer import Remote, Way
from bucketline.bench.peers.process_usage import cpu_s, read_bytes
from bucketline.bench.peers.registry import BY_NAME
from bucketline.bench.peers.samples import Expected, SetShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.bench.peers.peer import Opened, RemotePeer

AROUND = "what is expected"  # name of the file next to the formats' folders


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task for a process."""

    do: str  # write, gate, time, stream
    peer: str
    folder: str  # of the set; contains the peers' folders
    shape: dict[str, Any]
    way: dict[str, Any]
    least_s: float = 0.0  # minimum total time of the timed passes; at least one pass is timed
    is_cold: bool = False  # read nothing before the clock starts
    remote: dict[str, Any] | None = None  # gate or stream from a server
    passes: int = 1  # of a task to stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Measurements of the timed passes."""

    wall_s: float
    cpu_s: float  # of all processes
    first_batch_s: float  # of the first timed pass
    num_bytes: int  # of the batches' tensors, less what was ready when the clock started
    read_bytes: int  # from the disk
    passes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """Measurements of a pass over samples on a server, and of what the server sent during it."""

    wall_s: float  # of the first pass with opening
    cpu_s: float  # of all processes
    first_batch_s: float
    num_bytes: int  # of the batches' tensors
    sent_bytes: int
    gets: int
    cached_bytes: int  # on the disk, after the pass


def own_folder(folder: Path, peer: str) -> Path:
    """Return a peer's folder in the folder of a set."""
    return folder / "".join(letter if letter.isalnum() else "-" for letter in peer)


def write_expected(folder: Path, wanted: Expected) -> None:
    """Save the expected result of a pass where a peer's process finds it."""
    document = {"digests": [digest.hex() for digest in wanted.digests], "words": str(wanted.words)}
    (folder / f"{AROUND}.json").write_text(json.dumps(document), encoding="ascii")


def read_expected(folder: Path) -> Expected:
    """Return the result saved by `write_expected`."""
    document = json.loads((folder / f"{AROUND}.json").read_text(encoding="ascii"))
    return Expected(digests=[bytes.fromhex(digest) for digest in document["digests"]], words=int(document["words"]))


def gate(opened: Opened, shape: SetShape, wanted: Expected) -> dict[str, Any]:
    """Check two passes and return the observations.

    Raises:
        GateError: if a pass is wrong.
    """
    first, second = (check(opened.begin(), shape, wanted) for _ in range(2))
    return {
        "batches": first.batches,
        "full_batches": shape.num_batches,
        "num_bytes": first.num_bytes,
        "buckets_in_a_row": first.buckets_in_a_row,
        "is_shuffled": first.order != sorted(first.order),
        "is_shuffled_anew": first.order != second.order,
    }


def timed(opening: Callable[[], Opened], shape: SetShape, wanted: Expected, task: Task) -> Timed:
    """Time passes.

    When cold, opening is timed too, because it may read data that the pass then does not read again. When hot, one or more
    untimed passes come first: they start workers, map files and fill the page cache.

    Raises:
        GateError: if the sum of all batches' words is not that of every sample once per pass.
    """
    total = passes = num_bytes = ready = 0
    opened = None if task.is_cold else opening()
    if opened is not None:
        while passes == 0 or passes * shape.num_batches < opened.warm_batches:
            total, passes = total + sum(touch(batch) for batch in opened.begin()), passes + 1
        ready = opened.ready_bytes()
    read, used, begun = read_bytes(), cpu_s(), time.perf_counter()
    opened = opened or opening()
    first_s = 0.0
    warm_ups = passes
    while passes == warm_ups or time.perf_counter() - begun < task.least_s:
        for batch in opened.begin():
            total += touch(batch)
            num_bytes += batch.num_bytes
            first_s = first_s or time.perf_counter() - begun
        passes += 1
    wall, used, read = time.perf_counter() - begun, cpu_s() - used, read_bytes() - read
    if num_bytes != (passes - warm_ups) * shape.delivered_bytes or not sums_up(total, passes, wanted):
        raise GateError(f"{num_bytes} bytes of {passes - warm_ups} timed passes are not every sample once a pass")
    return Timed(
        wall_s=wall,
        cpu_s=used,
        first_batch_s=first_s,
        num_bytes=max(1, num_bytes - ready),
        read_bytes=read,
        passes=passes - warm_ups,
    )


def streamed(opening: Callable[[], Opened], shape: SetShape, wanted: Expected, task: Task) -> list[Streamed]:
    """Time passes over samples on a server, each by itself; the first one includes opening.

    Raises:
        GateError: if the sum of a pass's words is not that of every sample once.
    """
    remote = Remote(**task.remote or {})
    found: list[Streamed] = []
    opened: Opened | None = None
    control(remote.endpoint)
    for _ in range(task.passes):
        total, num_bytes, first_s = 0, 0, 0.0
        used, begun = cpu_s(), time.perf_counter()
        opened = opened or opening()
        for batch in opened.begin():
            first_s = first_s or time.perf_counter() - begun
            total += touch(batch)
            num_bytes += batch.num_bytes
        wall, used = time.perf_counter() - begun, cpu_s() - used
        sent = control(remote.endpoint)
        if num_bytes != shape.delivered_bytes or not sums_up(total, 1, wanted):
            raise GateError(f"{num_bytes} bytes of pass {len(found) + 1} are not every sample once")
        own = Streamed(
            wall_s=wall,
            cpu_s=used,
            first_batch_s=first_s,
            num_bytes=num_bytes,
            sent_bytes=sent.num_bytes,
            gets=sent.num_gets,
            cached_bytes=disk_bytes(Path(remote.cache)),
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


def carry_out(task: Task) -> dict[str, Any]:
    """Execute a task and return its result."""
    shape, folder = SetShape.of_json(task.shape), Path(task.folder)
    peer, own = BY_NAME[task.peer].make(), own_folder(folder, task.peer)
    if task.do == "write":
        making = own.with_name(own.name + ".making")
        making.mkdir()
        peer.write(shape, making)
        making.rename(own)
        return {"disk_bytes": disk_bytes(own)}
    wanted = read_expected(folder)
    way = Way(**task.way)

    def opening() -> Opened:
        if task.remote is None:
            return peer.open(shape, own, way)
        return cast("RemotePeer", peer).stream(shape, Remote(**task.remote), way)

    if task.do == "gate":
        return gate(opening(), shape, wanted)
    if task.do == "time":
        return asdict(timed(opening, shape, wanted, task))
    if task.do == "stream":
        return {"passes": [asdict(one) for one in streamed(opening, shape, wanted, task)]}
    raise ValueError(f"there is no task {task.do!r}")


def versions() -> dict[str, str]:
    """Return the versions of all installed distributions."""
    return {found.metadata["Name"].lower(): found.version for found in importlib.metadata.distributions()}


def main() -> int:
    """Execute the task of the command line and print its result."""
    warnings.simplefilter("ignore")  # the peers' warnings do not matter here, only what they deliver
    logging.disable(logging.WARNING)
    with redirect_stdout(sys.stderr):
        found = versions() if sys.argv[1] == "about" else carry_out(Task(**json.loads(sys.argv[1])))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
