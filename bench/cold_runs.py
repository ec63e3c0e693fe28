"""Cold runs: drop a store's pages, read in a fresh process, and count the run only if it read from the disk."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import lmdb
import numpy as np

from bucketline.bench.harness import Figures, Mark, Result, Subject, summarise
from bucketline.errors import BucketlineError, UsageError
from bucketline.loader import LoaderConfig
from bucketline.loader.plan.make_plan import plan_of
from bucketline.store import Store
from bucketline.store.format.block import CAPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
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
    ahead_mib: int = 0  # of batches, between two stages of readahead; 0: none
    threads: int = 1
    readahead: bool = False  # of py-lmdb
    text: str = "dequantised"  # how the loader delivers quantised tokens


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
GET, GET_ROW = "py-lmdb get of its block", "py-lmdb get, one row per value"
MARK = Mark(bound=0.9)
ROWS_AT_ONCE = 256


def with_best_depth(case: str, subjects: Sequence[Subject], figures: Figures) -> list[Result]:
    """Summarise figures. The limit is the `O_DIRECT` subject with the highest median; py-lmdb also counts at its fastest."""

    def best(begin: str) -> str:
        return max((name for name in figures if name.startswith(begin)), key=lambda name: statistics.median(figures[name]))

    chosen = [replace(one, limit=best(DIRECT), beside=tuple(best(name) for name in one.beside)) for one in subjects]
    return summarise(case, "GB/s", chosen, figures)


def kept_rows_file(store: Path) -> Path:
    """Return an LMDB file next to a store with one row's latent per value; create it if missing."""
    path, making = store.with_suffix(".rows.lmdb"), store.with_suffix(".rows.making")
    if path.exists():
        return path
    print(f"making {path.name}", file=sys.stderr)
    making.unlink(missing_ok=True)
    bucket = Store.open(store).buckets("train")[0]
    column = bucket.spec.column("latent")
    map_size = 2 * bucket.num_rows * column.row_bytes + (64 << 20)
    with lmdb.open(str(making), subdir=False, lock=False, map_size=map_size) as env:
        for first in range(0, bucket.num_rows, ROWS_AT_ONCE):
            rows = np.arange(first, min(first + ROWS_AT_ONCE, bucket.num_rows))
            with env.begin(write=True) as txn:
                for row, value in zip(rows, bucket.read(rows, column.name), strict=True):
                    txn.put(int(row).to_bytes(8, "big"), value.tobytes(), append=True)
    making.rename(path)
    return path


def plan_rows(store: Path, rows_file: Path, batch_size: int, batches: int, seed: int, plan: Path) -> None:
    """Write the plan of one round: the rows that a loader with this seed delivers first, and their locations.

    Nothing stays mapped in this process. The rows are distinct as long as the store has as many.
    """
    opened = Store.open(store)
    bucket, rows = _first_rows(opened, batch_size, batches, seed)
    column = bucket.spec.column("latent")
    located = bucket.locate(rows)
    blocks = np.empty_like(rows)
    for ordinal, shard in enumerate(opened.shards):
        here, group = located.shard == ordinal, shard.entry.groups[bucket.name]
        first_rows = shard.extents.column("first_row")[group.first_block : group.first_block + group.blocks].astype(np.int64)
        blocks[here] = np.searchsorted(first_rows, located.row[here], side="right") - 1
    offset = located.offsets(bucket.spec, column.name)
    np.savez(
        plan,
        seed=seed,
        row=rows,
        shard=located.shard,
        block=blocks,
        offset=offset,
        offset_in_block=offset - located.data + bucket.spec.header_bytes,
        length=np.full(len(rows), column.row_bytes),
        rows_file=np.array(str(rows_file)),
    )


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


def _per_round(make: Callable[[int, Path], None], folder: Path) -> Callable[[int], Path]:
    """Return a function from a round to its plan file, created on first use, so that all subjects of a round read the same."""

    def plan(number: int) -> Path:
        path = folder / f"{number}.npz"
        if not path.exists():
            make(number, path)
        return path

    return plan


def _subject(name: str, run: ColdRun, cold: Path, plan: Callable[[int], Path], mark: Mark | None = None, *gets: str) -> Subject:
    def measure(number: int) -> float:
        return cold_rate(replace(run, plan=str(plan(number))), cold)

    return Subject(name=name, measure=measure, beside=gets, mark=mark)


def _count(wanted: int, batch_size: int, available: int, what: str) -> int:
    """Return the number of batches per round: as many as wanted, but at most those available.

    Raises:
        UsageError: if the store has less than one batch.
    """
    if available < batch_size:
        raise UsageError(f"the store has {available} {what}, a batch is {batch_size}; make the store larger")
    return min(wanted, available // batch_size)
