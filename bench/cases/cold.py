"""Cost of delivering complete batches from the disk, compared with O_DIRECT random reads of a row's or a caption's size."""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.bench.apart import apart
from bucketline.bench.harness import (
    FROM_DISK,
    TRIES,
    Mark,
    Result,
    StoreCase,
    Subject,
    alternate,
    counted_threads,
    drop_pages,
    read_bytes,
    summarise,
)
from bucketline.errors import BucketlineError, CorruptError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from bucketline.bench.harness import Figures
    from bucketline.store import Bucket, Store

    Plan = Mapping[str, NDArray[Any]]
    Prepared = tuple[Callable[[], int], Callable[[], None]]  # read and return the payload's bytes; verify the last batch

MARK = Mark(bound=0.9)
DIRECT = "O_DIRECT"
SECTOR_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Cold(StoreCase):
    """Measure a loader's batches end to end, each repeat in a fresh process after the store's pages were dropped.

    Bytes are those of the payload, without padding. A repeat counts only if the process's `read_bytes` grew by at least 0.95 of
    them. Otherwise it is retried, and then the case fails. The limit is O_DIRECT random reads of a row's size, with the fastest
    number of threads on this machine; with `--text`, of the captions' sizes: 60 to 512 tokens of 4,096 x F16, next to tiny
    latents.

    Example: python -m bucketline.bench cold --text --num-shards 32 --threads 1 2 --json
    """

    text: bool = False
    """Read large captions and tiny latents instead."""
    batches: int = 96
    """Batches per repeat, of distinct rows; at most as many as the store has."""
    threads: tuple[int, ...] = (1, 2)
    """Numbers of prefetch threads; each is measured."""
    depths: tuple[int, ...] = (4, 8, 16, 32)
    """Thread counts of the O_DIRECT reads; the fastest is the limit."""

    def measure(self, folder: Path) -> list[Result]:
        if self.one_pass < 1:
            rows = self.num_shards * self.rows_per_shard
            raise UsageError(f"the store has {rows} rows, a batch is {self.batch_size}; make the store larger")
        text = {"latent_shape": (4, 8, 8), "tokens": (60, 512), "token_width": 4096} if self.text else {}
        run = ColdRun(
            reader=DIRECT,
            store=str(self.kept_store(folder, **text)),
            plan="",
            batch_size=self.batch_size,
            batches=min(self.batches, self.one_pass),
        )
        with tempfile.TemporaryDirectory() as plans:
            subjects = [
                self._subject(f"{reader}, {counted_threads(n)}", replace(run, reader=reader, threads=n), Path(plans))
                for reader, counts in ((DIRECT, self.depths), ("loader", self.threads))
                for n in counts
            ]
            return with_best_depth("cold, text" if self.text else "cold", subjects, alternate(subjects, self.repeats))

    def _subject(self, name: str, run: ColdRun, plans: Path) -> Subject:
        """Return a subject whose runs of a round read what that round's plan file lists, as all others' do."""
        store = Path(run.store)

        def measure(number: int) -> float:
            plan = plans / f"{number}.npz"
            if not plan.exists():
                (plan_captions if self.text else plan_rows)(store, run.batch_size, run.batches, number, plan)
            return cold_rate(replace(run, plan=str(plan)), store)

        return Subject(name=name, measure=measure, mark=MARK if run.reader == "loader" else None)


def with_best_depth(case: str, subjects: Sequence[Subject], figures: Figures) -> list[Result]:
    """Summarise figures. The limit is the `O_DIRECT` subject with the highest median."""
    best = max((name for name in figures if name.startswith(DIRECT)), key=lambda name: statistics.median(figures[name]))
    return summarise(case, "GB/s", [replace(one, limit=best) for one in subjects], figures)


class NotColdError(BucketlineError):
    """A cold run read too little from the disk to count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdRun:
    """The task of a fresh process: what to read, and how."""

    reader: str  # a key of `READERS`
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


def cold_rate(run: ColdRun, path: Path) -> float:
    """Drop the pages of `path`, execute the run in a fresh process, and return GB/s of the payload."""
    read = None
    for _ in range(TRIES):
        drop_pages(path)
        read = Read(**apart(read_cold, run))
        if read.counts:
            return read.gb_s
    assert read is not None
    raise NotColdError(
        f"`{run.reader}` read {read.read_bytes} bytes from the disk for a payload of {read.payload_bytes}, expected "
        f"at least {FROM_DISK} of it, {TRIES} times; give --stores a folder on a disk (not tmpfs) that nobody else reads"
    )


def plan_rows(store: Path, batch_size: int, batches: int, seed: int, plan: Path) -> None:
    """Write the plan of one round: the rows that a loader with this seed delivers first, and where their latents are.

    Nothing stays mapped in this process. The rows are distinct as long as the store has as many.
    """
    bucket, rows = _first_rows(_opened(store), batch_size, batches, seed)
    column, located = bucket.spec.column("latent"), bucket.locate(rows)
    offset = located.offsets(bucket.spec, column.name)
    np.savez(plan, seed=seed, row=rows, shard=located.shard, offset=offset, length=np.full(len(rows), column.row_bytes))


def plan_captions(store: Path, batch_size: int, batches: int, seed: int, plan: Path) -> None:
    """Write the plan of one round: the rows that a loader with this seed delivers first, and their captions' tokens."""
    from bucketline.store.format.block import CAPTIONS

    opened = _opened(store)
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
    from bucketline.loader import LoaderConfig
    from bucketline.loader.plan.plan import plan_of

    plan = plan_of(store, LoaderConfig(batch_size=batch_size, seed=seed), 1)
    return store.buckets("train")[0], np.concatenate([plan.at(step).rows for step in range(batches)])


def _opened(store: Path | str) -> Store:
    from bucketline.store import Store

    return Store.open(store)


def read_cold(asked: dict[str, Any]) -> Read:
    """Execute a run in a fresh process.

    The preparation before the clock starts reads nothing of the payload, and writes to the buffers. The clock covers the
    reading, locating included.
    """
    run = ColdRun(**asked)
    with np.load(run.plan) as file:
        plan = {name: file[name] for name in file}
    count = run.batch_size * run.batches
    plan = {name: values[:count] if values.ndim else values for name, values in plan.items()}
    reading, compare = READERS[run.reader](run, plan)
    before, begin = read_bytes(), time.perf_counter()
    payload_bytes = reading()
    seconds, after = time.perf_counter() - begin, read_bytes()
    compare()
    return Read(seconds=seconds, payload_bytes=payload_bytes, read_bytes=after - before)


def direct(run: ColdRun, plan: Plan) -> Prepared:
    """Read the plan's ranges with O_DIRECT in threads, each from the start of its first sector."""
    from bucketline.bench.harness import in_threads

    store = _opened(run.store)
    fds = [os.open(shard.paths.lmdb, os.O_RDONLY | os.O_DIRECT) for shard in store.shards]
    offsets = plan["offset"] // SECTOR_BYTES * SECTOR_BYTES
    lengths = -(-plan["length"] // SECTOR_BYTES) * SECTOR_BYTES
    wanted = [(fds[s], int(o), int(n)) for s, o, n in zip(plan["shard"], offsets, lengths, strict=True)]
    views = [memoryview(mmap.mmap(-1, int(lengths.max()))) for _ in range(run.threads)]
    for view in views:
        view[:] = bytes(len(view))

    def work(thread: int) -> None:
        for fd, offset, length in wanted[thread :: run.threads]:
            if os.preadv(fd, [views[thread][:length]], offset) != length:
                raise CorruptError(f"a shard of {run.store} ends before byte {offset + length}")

    def read() -> int:
        in_threads(run.threads, work)
        return int(plan["length"].sum())

    return read, lambda: None  # it reads complete sectors around a row, so its bytes do not match a row


def loader(run: ColdRun, plan: Plan) -> Prepared:
    """Take complete batches from the loader: the plan's rows, and the captions that it draws for them."""
    from bucketline.loader import Batch, Loader, LoaderConfig

    store = _opened(run.store)
    config = LoaderConfig(batch_size=run.batch_size, threads=run.threads, rewind=True, seed=int(plan["seed"]))
    ours = Loader(store, config)
    last: list[Batch] = []

    def read() -> int:
        num_bytes = 0
        for batch in ours:
            tokens = int(batch.token_mask.sum()) * store.text.token_bytes  # as stored; padding is not read
            num_bytes += batch.latents.nbytes + batch.original_size.nbytes + batch.crop.nbytes + batch.ids.nbytes + tokens
            last[:] = [batch]
            if batch.step + 1 == run.batches:
                break
        return num_bytes

    def compare() -> None:
        (batch,) = last
        ours.close()
        expected = store.bucket(batch.bucket).read(ours.plan.at(batch.step).rows, "latent")
        if batch.latents.numpy().tobytes() != expected.tobytes():
            raise CorruptError("the loader did not deliver the rows as stored")

    return read, compare


READERS: dict[str, Callable[[ColdRun, Plan], Prepared]] = {DIRECT: direct, "loader": loader}
