"""Cold runs: drop a store's pages, read in a fresh process, and count the run only if it read from the disk."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from bucketline.bench.harness import Figures, Result, Subject, summarise
from bucketline.errors import BucketlineError
from bucketline.loader import LoaderConfig
from bucketline.loader.plan.make_plan import plan_of
from bucketline.store import Store
from bucketline.store.format.block import CAPTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store import Bucket

FROM_DISK = 0.95  # minimum fraction of the payload
TRIES = 3


class NotColdError(BucketlineError):
    """A cold run read too little from the disk to count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdRun:
    """The task of a fresh process: what to read, and how."""

    reader: str  # a key of `cold_reader.READERS`
    store: str
    plan: str  # file that lists what to read, written before the pages are dropped
    batch_size: int
    batches: int
    threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Measurements of a fresh process."""

    seconds: float
    payload_bytes: int
    read_bytes: int  # from the disk, by /proc/self/io

    @property
    def counts(self) -> bool:
        return self.read_bytes >= FROM_DISK * self.payload_bytes

    @property
    def gb_s(self) -> float:
        return self.payload_bytes / self.seconds / 1e9


def drop_pages(path: Path) -> None:
    """Write the pages of a file, or of all files in a folder, to the disk and drop them from the page cache.

    Pages that a process has mapped stay, so call this before mapping them.
    """
    for file in [path] if path.is_file() else path.rglob("*"):
        if not file.is_file():
            continue
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_apart(run: ColdRun) -> Read:
    """Execute a run in a separate process.

    Raises:
        BucketlineError: if the process fails; includes its last line of output.
    """
    command = [sys.executable, "-P", "-m", "bucketline.bench.workers.cold_reader", json.dumps(asdict(run))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise BucketlineError(f"the cold run `{run.reader}` failed: {reason}")
    return Read(**json.loads(done.stdout))


def cold_rate(run: ColdRun, path: Path) -> float:
    """Drop the pages of `path`, execute the run, and return GB/s of the payload.

    Raises:
        NotColdError: if no attempt read enough from the disk.
    """
    read = None
    for _ in range(TRIES):
        drop_pages(path)
        read = read_apart(run)
        if read.counts:
            return read.gb_s
    assert read is not None
    raise NotColdError(
        f"`{run.reader}` read {read.read_bytes} bytes from the disk for a payload of {read.payload_bytes}, expected "
        f"at least {FROM_DISK} of it, {TRIES} times; give --stores a folder on a disk (not tmpfs) that nobody else reads"
    )


DIRECT = "O_DIRECT"


def with_best_depth(case: str, subjects: Sequence[Subject], figures: Figures) -> list[Result]:
    """Summarise figures. The limit is the `O_DIRECT` subject with the highest median."""
    best = max((name for name in figures if name.startswith(DIRECT)), key=lambda name: statistics.median(figures[name]))
    return summarise(case, "GB/s", [replace(one, limit=best) for one in subjects], figures)


def plan_rows(store: Path, batch_size: int, batches: int, seed: int, plan: Path) -> None:
    """Write the plan of one round: the rows that a loader with this seed delivers first, and where their latents are.

    Nothing stays mapped in this process. The rows are distinct as long as the store has as many.
    """
    bucket, rows = _first_rows(Store.open(store), batch_size, batches, seed)
    column, located = bucket.spec.column("latent"), bucket.locate(rows)
    offset = located.offsets(bucket.spec, column.name)
    np.savez(plan, seed=seed, row=rows, shard=located.shard, offset=offset, length=np.full(len(rows), column.row_bytes))


def plan_captions(store: Path, batch_size: int, batches: int, seed: int, plan: Path) -> None:
    """Write the plan of one round: the rows that a loader with this seed delivers first, and their captions' tokens."""
    opened = Store.open(store)
    bucket, rows = _first_rows(opened, batch_size, batches, seed)
    shard, caption = bucket.locate(rows).shard, bucket.read(rows, CAPTIONS)[:, 0].astype(np.int64)
    located = opened.locate_captions(shard, caption)
    column = opened.text.tokens[0]
    starts = np.array(
        [
            np.frombuffer(opened.shards[own].read(int(at), 16), dtype="<i8")
            for own, at in zip(shard, located.starts_offsets(), strict=True)
        ]
    )
    offset = opened.token_offsets(located, column.name, starts[:, 0])
    length = (starts[:, 1] - starts[:, 0]) * column.row_bytes
    np.savez(plan, seed=seed, row=rows, shard=shard, offset=offset, length=length)


def _first_rows(store: Store, batch_size: int, batches: int, seed: int) -> tuple[Bucket, NDArray[np.int64]]:
    plan = plan_of(store, LoaderConfig(batch_size=batch_size, seed=seed), 1)
    return store.buckets("train")[0], np.concatenate([plan.at(step).rows for step in range(batches)])
