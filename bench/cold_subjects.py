"""The cold subjects of `cold_gather` and `ragged_text`: plans of what to read, and the runs that read it."""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import lmdb
import numpy as np

from bucketline.bench.cold_run import ColdRun, cold_rate
from bucketline.bench.harness import Figures, Mark, Result, Subject, summarise
from bucketline.bench.synthetic_store import all_captions
from bucketline.errors import UsageError
from bucketline.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bucketline.bench.cold_gather import ColdGather
    from bucketline.bench.delivery import Delivery
    from bucketline.bench.ragged_text import RaggedText

DIRECT = "O_DIRECT"
GET, GET_ROW = "py-lmdb get of its block", "py-lmdb get, a row a value"
MARK = Mark(bound=0.9)
ROWS_AT_ONCE = 256


def with_best_depth(case: str, subjects: Sequence[Subject], figures: Figures) -> list[Result]:
    """Summarise. The limit is the `O_DIRECT` subject with the highest median; of py-lmdb's too the fastest counts."""

    def best(begin: str) -> str:
        return max((name for name in figures if name.startswith(begin)), key=lambda name: statistics.median(figures[name]))

    chosen = [replace(one, limit=best(DIRECT), beside=tuple(best(name) for name in one.beside)) for one in subjects]
    return summarise(case, "GB/s", chosen, figures)


def kept_rows_file(store: Path) -> Path:
    """Give an LMDB file beside a store that has each of its rows' latents as a value of its own; made unless it is there."""
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


def plan_rows(store: Path, rows_file: Path, count: int, seed: int, plan: Path) -> None:
    """Write what one round reads: distinct random rows, and where they lie. Nothing stays mapped in this process."""
    opened = Store.open(store)
    bucket = opened.buckets("train")[0]
    column = bucket.spec.column("latent")
    rows = np.random.default_rng(seed).permutation(bucket.num_rows)[:count]
    located = bucket.locate(rows)
    blocks = np.empty_like(rows)
    for ordinal, shard in enumerate(opened.shards):
        here, group = located.shard == ordinal, shard.entry.groups[bucket.name]
        first_rows = shard.extents.column("first_row")[group.first_block : group.first_block + group.blocks].astype(np.int64)
        blocks[here] = np.searchsorted(first_rows, located.row[here], side="right") - 1
    offset = located.offsets(bucket.spec, column.name)
    np.savez(
        plan,
        row=rows,
        shard=located.shard,
        block=blocks,
        offset=offset,
        offset_in_block=offset - located.data + bucket.spec.header_bytes,
        length=np.full(len(rows), column.row_bytes),
        rows_file=np.array(str(rows_file)),
    )


def plan_captions(store: Path, count: int, seed: int, plan: Path) -> None:
    """Write what one round reads: distinct random captions, and where their tokens lie."""
    opened = Store.open(store)
    shard, caption = all_captions(opened)
    order = np.random.default_rng(seed).permutation(len(shard))[:count]
    shard, caption = shard[order], caption[order]
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
    np.savez(plan, shard=shard, caption=caption, offset=offset, length=length)


def _per_round(make: Callable[[int, Path], None], folder: Path) -> Callable[[int], Path]:
    """Give the plan's file of a round, made when it is first asked for: every subject of a round reads the same."""

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
    """Give the batches of a round: as many as wanted, or as there are.

    Raises:
        UsageError: where there is not one.
    """
    if available < batch_size:
        raise UsageError(f"the store has {available} {what}, a batch is {batch_size}; make the store larger")
    return min(wanted, available // batch_size)


def cold_rows(config: ColdGather, store: Path, rows_file: Path, plans: Path) -> list[Subject]:
    """Prepare the subjects of `cold_gather`."""
    num_rows = Store.open(store).buckets("train")[0].num_rows
    batches = _count(config.batches, config.batch_size, num_rows, "rows")
    of_get = min(config.batches_of_get, batches)
    count = batches * config.batch_size
    plan = _per_round(lambda number, path: plan_rows(store, rows_file, count, number, path), plans)
    run = ColdRun(reader="", store=str(store), plan="", batch_size=config.batch_size, batches=batches)
    ours, get = replace(run, reader="gather_rows"), replace(run, batches=of_get)
    asked, threads = f"asked for {config.ahead} batches ahead", config.reading_threads
    named = [
        *((f"{DIRECT}, {n} threads", replace(run, reader="direct", threads=n), store, None) for n in config.depths),
        (f"gather, latents, {asked}", replace(ours, ahead=config.ahead), store, MARK),
        (f"gather, all columns, {asked}", replace(ours, ahead=config.ahead, columns="all"), store, MARK),
        ("gather, latents, not asked for", ours, store, None),
        (f"plain reads, latents, {threads} threads", replace(run, reader="plain_reads", threads=threads), store, None),
        *(
            (f"{GET}, readahead {s}", replace(get, reader="lmdb_blocks", readahead=s == "on"), store, None)
            for s in ("on", "off")
        ),
        *(
            (f"{GET_ROW}, readahead {s}", replace(get, reader="lmdb_rows", readahead=s == "on"), rows_file, None)
            for s in ("on", "off")
        ),
    ]
    return [
        _subject(name, own, cold, plan, mark, *(() if own.reader in ("direct", "lmdb_blocks", "lmdb_rows") else (GET, GET_ROW)))
        for name, own, cold, mark in named
    ]


def cold_delivery(config: Delivery, store: Path, plans: Path) -> list[Subject]:
    """Prepare the cold subjects of `delivery`."""
    num_rows = Store.open(store).buckets("train")[0].num_rows
    batches = _count(config.batches, config.batch_size, num_rows, "rows")
    plan = _per_round(lambda number, path: plan_rows(store, store, batches * config.batch_size, number, path), plans)
    run = ColdRun(reader="direct", store=str(store), plan="", batch_size=config.batch_size, batches=batches)
    return [
        *(_subject(f"{DIRECT}, {n} threads", replace(run, threads=n), store, plan) for n in config.depths),
        *(
            _subject(f"loader, cold, threads that fill: {n}", replace(run, reader="loader", threads=n), store, plan, MARK)
            for n in config.threads
        ),
    ]


def cold_captions(config: RaggedText, store: Path, plans: Path) -> list[Subject]:
    """Prepare the cold subjects of `ragged_text`."""
    available = len(all_captions(Store.open(store))[0])
    batches = _count(config.batches, config.batch_size, available, "captions")
    count = batches * config.batch_size
    plan = _per_round(lambda number, path: plan_captions(store, count, number, path), plans)
    run = ColdRun(reader="direct", store=str(store), plan="", batch_size=config.batch_size, batches=batches)
    ours = replace(run, reader="gather_captions")
    return [
        *(_subject(f"{DIRECT}, {n} threads", replace(run, threads=n), store, plan) for n in config.depths),
        _subject(f"gather, asked for {config.ahead} batches ahead", replace(ours, ahead=config.ahead), store, plan, MARK),
        _subject("gather, not asked for", ours, store, plan),
    ]
