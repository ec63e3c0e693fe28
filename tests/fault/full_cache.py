"""Reads a store on a server through a cache on a disk that is too small, by less and less, then makes room and continues.

Also on a disk that others fill while it is read: what is pinned stays, and the rest passes through the ring's own space.
The disk is a file system in memory. No batch may have other bytes than the local store's, nor one be missing that there is
room for.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from bucketline.bench.fixtures.server_process import ServerProcess, control
from bucketline.errors import BucketlineError
from bucketline.loader import Loader
from bucketline.store.remote.cache.folder import cache_folder
from bucketline.store.remote.urls import RemoteOptions
from tests.constrained import SmallDisk
from tests.fault.apart import How, apart
from tests.fault.record import Asked, Kind, Outcome, Record, outcome_of
from tests.fault.served import LARGE, check_batch, check_cache, in_lines, reaching, served

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


def trial(url: str, local: Path, cache: Path, expected: list[str], disk: SmallDisk, num_bytes: int) -> tuple[str, str | None]:
    """Read while the disk has so many bytes, make room, and continue in the same process.

    Returns what was said while it was full, and what was wrong then.
    """
    disk.resize(num_bytes)
    step, said = read(url, cache, expected, step=0, cache_bytes=CACHE_BYTES)
    disk.resize(ROOM_BYTES)
    again, then = read(url, cache, expected, step=step, cache_bytes=CACHE_BYTES) if said else (step, "")
    check_cache(cache, local)
    return said, None if again == len(expected) else f"after room was made: missing, {again} of {len(expected)}: {then}"


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
                    disk.leave(1 << 20)
    except BucketlineError as error:
        return step, pinned, str(error).replace("\n", " ")
    return step, pinned, ""


def full_caches(asked: Asked) -> Iterator[Record]:
    """Try every size, each with an empty cache, then a disk that others fill."""
    record = Record(fault="the disk of the cache of a store on a server full, then room", kind=Kind.DISK)
    folder = asked.folder / "disk"
    folder.mkdir()
    disk = SmallDisk(folder, ROOM_BYTES)  # before anything begins threads or a server
    if not disk.is_disk:
        record.not_run = "nobody may mount here"
        yield record
        return
    store = served(asked.folder, LARGE)
    expected = store.digests(CONFIG)
    with ServerProcess(asked.folder / "served") as server:
        url = f"{server.url}/{store.name}"
        for number, size in enumerate(SIZES_MIB):
            cache = folder / f"{number}"
            # a process for each: one that has the files open keeps their bytes
            ended = apart(partial(trial, url, store.local, cache, expected, disk, int(size * (1 << 20))), LONGEST_S)
            if ended.how is How.DONE:
                said, then = ended.gave
                names_it = not said or (("room" in said or "No space left" in said) and str(folder) in said)
                good = Outcome.RECOVERED if said else Outcome.COMPLETED
                is_good = then is None and names_it and not (said and size >= ENOUGH_MIB)
                record.add(good if is_good else outcome_of(then or said), f"{size:g} MiB: {said}; then {then}")
            else:
                record.add(ended.outcome, f"{size:g} MiB: {ended.said}")
            shutil.rmtree(cache, ignore_errors=True)
        ended = apart(partial(filled, url, folder / "filled", expected, disk), LONGEST_S)
        step, pinned, said = ended.gave or (0, 0, f"{ended.how}: {ended.said}")
        is_good = step == len(expected) and pinned < 2 * PINNED_BYTES
        said = f"others fill the disk: {step} of {len(expected)} batches, {pinned >> 20} MiB pinned: {said}"
        record.add(Outcome.COMPLETED if is_good else outcome_of(said), said)
    yield record
