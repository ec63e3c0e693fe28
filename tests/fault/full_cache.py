"""Reads a store on a server through a cache on a disk that is too small, by less and less, then makes room and continues.

Also on a disk that others fill while it is read: what is pinned stays, and the rest passes through the ring's own space.

Arguments: the store's URL, its local folder, and an empty folder, which becomes a file system in memory. Prints, for each size,
how many batches came, and what was said. Exit 1 where a batch has other bytes than the local store's, or one is missing that
there is room for.
"""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.bench.fixtures.server_process import ServerProcess, control
from bucketline.errors import BucketlineError
from bucketline.loader import Loader
from bucketline.store.remote.cache.folder import cache_folder
from bucketline.store.remote.urls import RemoteOptions
from tests.commands import spawn
from tests.constrained import SmallDisk
from tests.fault.apart import Apart, How
from tests.fault.known import outcome_of
from tests.fault.record import Kind, Outcome, Record
from tests.fault.served import LARGE, Served, check_batch, check_cache, in_lines, reaching, served

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fault.record import Asked

DEADLINE_S = 5.0
CACHE_BYTES = 1 << 30  # more than the disk has: the cache does not know that others fill it
ROOM_BYTES = 1 << 30
LONGEST_S = 120.0  # of one size
SIZES_MIB = (0.5, 12, 100, 220, 400)
ENOUGH_MIB = 220  # for the lines of a window and of what is fetched ahead
CONFIG = replace(in_lines(batch_size=16, seed=2), window=256)
PINNED_BYTES, SLOW_BYTES_PER_S = 64 << 20, 60e6  # until the disk is full, and so that not all lines are pinned by then


def read(url: str, cache: Path, expected: list[str], *, step: int, cache_bytes: int | None) -> tuple[int, str]:
    """Read until the end or an error, from a step on; return the step that comes next, and the error."""
    try:
        options = RemoteOptions(cache=cache, cache_bytes=cache_bytes, deadline_s=DEADLINE_S)
        with Loader(url, reaching(CONFIG, options)) as loader:
            loader.load_state_dict({**loader.state_dict(), "step": step})
            for batch in loader.forever():
                check_batch(batch, step, expected)
                step += 1
    except BucketlineError as error:
        return step, str(error).replace("\n", " ")
    return step, ""


def trial(
    url: str, local: Path, cache: Path, expected: list[str], disk: SmallDisk, num_bytes: int
) -> tuple[int, float, int, str, int, str]:
    """Read while the disk has so many bytes, make room, and continue in the same process."""
    disk.resize(num_bytes)
    begun = time.monotonic()
    step, said = read(url, cache, expected, step=0, cache_bytes=CACHE_BYTES)
    seconds = time.monotonic() - begun
    disk.resize(ROOM_BYTES)
    again, then = read(url, cache, expected, step=step, cache_bytes=CACHE_BYTES) if said else (step, "")
    return step, seconds, check_cache(cache, local), said, again, then


def filled(url: str, cache: Path, expected: list[str], disk: SmallDisk) -> tuple[int, int, str]:
    """Read from a disk that is full after a while; return the step that comes next, the bytes pinned by then, and the error."""
    disk.resize(ROOM_BYTES)
    options = RemoteOptions(cache=cache, cache_bytes=CACHE_BYTES, deadline_s=DEADLINE_S)
    step, pinned = 0, 0
    control(url.rpartition("/")[0], f"bytes_per_s={SLOW_BYTES_PER_S}")
    try:
        with Loader(url, reaching(CONFIG, options)) as loader:
            for batch in loader.forever():
                check_batch(batch, step, expected)
                step += 1
                if pinned == 0 and (found := cache_folder(cache).room.pinned()) > PINNED_BYTES:
                    pinned = found
                    disk.resize(shutil.disk_usage(cache).used + (1 << 20))
    except BucketlineError as error:
        return step, pinned, str(error).replace("\n", " ")
    return step, pinned, ""


def full_caches(asked: Asked) -> Iterator[Record]:
    """Be the family of torture: the sizes, in a process that mounts them."""
    store = served(asked.folder, LARGE)
    (asked.folder / "disk").mkdir()
    with ServerProcess(asked.folder / "served") as server:
        url = f"{server.url}/{store.name}"
        ran = spawn([sys.executable, "-m", "tests.fault.full_cache", url, store.local, asked.folder / "disk"])
    record = Record(fault="the disk of the cache of a store on a server full, then room", kind=Kind.DISK)
    if ran.out.startswith("limit"):
        record.not_run = "nobody may mount here"
        yield record
        return
    for line in ran.out.splitlines():
        if line.count("\t") == 4:
            record.add(Outcome.RECOVERED if line.rpartition("\t")[2] else Outcome.COMPLETED)
    if ran.code != 0:
        record.add(outcome_of(ran.out), ran.out[-300:] + ran.err[-300:])
    yield record


def main() -> int:
    """Try every size, each with an empty cache."""
    url, local, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    expected = Served(local=local, name="").digests(CONFIG)
    disk = SmallDisk(folder, ROOM_BYTES)
    if not disk.is_disk:
        print("limit")
        return 0
    print("disk")
    for number, size in enumerate(SIZES_MIB):
        cache = folder / f"{number}"
        # a process for each: one that has the files open keeps their bytes
        ended = Apart(partial(trial, url, local, cache, expected, disk, int(size * (1 << 20)))).ended(LONGEST_S)
        if ended.how is not How.DONE:
            print(f"{size:g} MiB: {ended.how}: {ended.said}")
            return 1
        step, seconds, lines, said, again, then = ended.gave
        print(f"{size:g} MiB\t{step} of {len(expected)}\t{seconds:.1f} s\t{lines} lines\t{said}", flush=True)
        if again != len(expected):
            print(f"after room was made: {again} of {len(expected)}: {then}")
            return 1
        if said and size >= ENOUGH_MIB:
            return 1
        shutil.rmtree(cache)
    ended = Apart(partial(filled, url, folder / "filled", expected, disk)).ended(LONGEST_S)
    if ended.how is not How.DONE:
        print(f"others fill the disk: {ended.how}: {ended.said}")
        return 1
    step, pinned, said = ended.gave
    print(f"others fill the disk\t{step} of {len(expected)}\t{pinned >> 20} MiB pinned\t\t{said}")
    return 0 if step == len(expected) and pinned < 2 * PINNED_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
