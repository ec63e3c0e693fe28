"""One task of one peer, in an environment of its own: `python -m bucketline.bench.peers.process JSON`, JSON being a `Task`.

`write` writes the samples in the peer's format; `gate` holds two passes to what they must be; `time` times passes, each byte
of each batch read; `about` tells the versions. Prints JSON. What a peer prints goes to stderr.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import sys
import time
import warnings
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.bench.peers.batches import GateError, check, sums_up, touch
from bucketline.bench.peers.catalogue import BY_NAME
from bucketline.bench.peers.peer import Way
from bucketline.bench.peers.samples import Expected, SetShape
from bucketline.bench.peers.usage import cpu_s, read_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.bench.peers.peer import Opened

AROUND = "what is expected"  # the file beside the formats' folders


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a process is to do."""

    do: str  # write, gate, time
    peer: str
    folder: str  # of the set; a peer's own is in it
    shape: dict[str, Any]
    way: dict[str, Any]
    least_s: float = 0.0  # of timed passes together; one pass at the least
    is_cold: bool = False  # nothing is read before the clock starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What timed passes took."""

    wall_s: float
    cpu_s: float  # of all processes
    first_batch_s: float  # of the first timed pass
    num_bytes: int  # of the batches' tensors, less what was ready when the clock started
    read_bytes: int  # from the disk
    passes: int


def own_folder(folder: Path, peer: str) -> Path:
    """Give a peer's folder in that of a set."""
    return folder / "".join(letter if letter.isalnum() else "-" for letter in peer)


def write_expected(folder: Path, wanted: Expected) -> None:
    """Leave what a pass must give where a peer's process finds it."""
    document = {"digests": [digest.hex() for digest in wanted.digests], "words": str(wanted.words)}
    (folder / f"{AROUND}.json").write_text(json.dumps(document), encoding="ascii")


def read_expected(folder: Path) -> Expected:
    """Give what `write_expected` left."""
    document = json.loads((folder / f"{AROUND}.json").read_text(encoding="ascii"))
    return Expected(digests=[bytes.fromhex(digest) for digest in document["digests"]], words=int(document["words"]))


def gate(opened: Opened, shape: SetShape, wanted: Expected) -> dict[str, Any]:
    """Hold two passes to what they must be; say what they were.

    Raises:
        GateError: where one is not.
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

    Cold, opening is timed as well, for that may read what the pass need not read again. Hot, passes go before that are not
    timed, one or more: they start workers, map files, fill the page cache.

    Raises:
        GateError: where the words of all batches do not add up to what every sample once a pass adds up to.
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


def carry_out(task: Task) -> dict[str, Any]:
    """Do a task; give what it found."""
    shape, folder = SetShape.of_json(task.shape), Path(task.folder)
    peer, own = BY_NAME[task.peer].make(), own_folder(folder, task.peer)
    if task.do == "write":
        making = own.with_name(own.name + ".making")
        making.mkdir()
        peer.write(shape, making)
        making.rename(own)
        return {"disk_bytes": sum(path.lstat().st_blocks * 512 for path in own.rglob("*"))}
    wanted = read_expected(folder)
    way = Way(**task.way)
    if task.do == "gate":
        return gate(peer.open(shape, own, way), shape, wanted)
    if task.do == "time":
        return asdict(timed(lambda: peer.open(shape, own, way), shape, wanted, task))
    raise ValueError(f"there is no task {task.do!r}")


def versions() -> dict[str, str]:
    """Give the versions of all that is installed here."""
    return {found.metadata["Name"].lower(): found.version for found in importlib.metadata.distributions()}


def main() -> int:
    """Do the task of the command line; print what it found."""
    warnings.simplefilter("ignore")  # peers warn of their own business; what matters here is what they deliver
    logging.disable(logging.WARNING)
    with redirect_stdout(sys.stderr):
        found = versions() if sys.argv[1] == "about" else carry_out(Task(**json.loads(sys.argv[1])))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
