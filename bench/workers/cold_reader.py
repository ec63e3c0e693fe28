"""The fresh process of a cold run: `python -m bucketline.bench.workers.cold_reader JSON`, with a `ColdRun` as JSON.

The preparation before the clock starts reads nothing of the payload, and writes to the buffers. The clock covers the reading,
locating included. Prints a `Read` as JSON. Imports torch only if the reader needs it.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.bench.cold_runs import ColdRun
from bucketline.bench.memcpy import in_threads
from bucketline.command_line import guarded
from bucketline.errors import CorruptError
from bucketline.store import Store
from bucketline.store.format.block import CAPTIONS
from bucketline.store.format.text_block import EMPTY_CAPTION_ROW

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from bucketline.loader.collate.buffer_pool import FilledBuffer

    Plan = Mapping[str, NDArray[Any]]
    Prepared = tuple[Callable[[], int], Callable[[], None]]  # read and return the payload's bytes; verify the last batch

SECTOR_BYTES = 4096


def _parts(run: ColdRun) -> list[tuple[int, int]]:
    return [(run.batch_size * n, run.batch_size * (n + 1)) for n in range(run.batches)]


def _nothing_to_compare() -> None:
    """Compare nothing: O_DIRECT reads complete sectors around a row, so its bytes do not match a row."""


def direct(run: ColdRun, plan: Plan) -> Prepared:
    """Read the plan's ranges with O_DIRECT in threads, each from the start of its first sector."""
    store = Store.open(run.store)
    fds = [os.open(shard.paths.lmdb, os.O_RDONLY | os.O_DIRECT) for shard in store.shards]
    offsets = plan["offset"] // SECTOR_BYTES * SECTOR_BYTES
    lengths = -(-plan["length"] // SECTOR_BYTES) * SECTOR_BYTES
    wanted = [(fds[s], int(o), int(n)) for s, o, n in zip(plan["shard"], offsets, lengths, strict=True)]
    buffers = [mmap.mmap(-1, int(lengths.max())) for _ in range(run.threads)]
    views = [memoryview(buffer) for buffer in buffers]
    for view in views:
        view[:] = bytes(len(view))

    def work(thread: int) -> None:
        for fd, offset, length in wanted[thread :: run.threads]:
            if os.preadv(fd, [views[thread][:length]], offset) != length:
                raise CorruptError(f"a shard of {run.store} ends before byte {offset + length}")

    def read() -> int:
        in_threads(run.threads, work)
        return int(plan["length"].sum())

    return read, _nothing_to_compare


def _transaction(path: Path, run: ColdRun) -> Any:  # noqa: ANN401 - lmdb has no types
    """Begin a transaction that stays open until this process ends."""
    import lmdb

    env = lmdb.open(str(path), subdir=False, lock=False, readonly=True, create=False, readahead=run.readahead)
    return env.begin(buffers=True)


def lmdb_blocks(run: ColdRun, plan: Plan) -> Prepared:
    """Get each row's block through py-lmdb and copy the row from it."""
    from bucketline.store.format.layout import block_key

    store = Store.open(run.store)
    bucket = store.buckets("train")[0]
    column = bucket.spec.column("latent")
    transactions = [_transaction(shard.paths.lmdb, run) for shard in store.shards]
    keys = [block_key(bucket.name, int(block)) for block in plan["block"]]
    places = list(zip(plan["shard"].tolist(), keys, plan["offset_in_block"].tolist(), strict=True))
    out = np.full((run.batch_size, column.row_bytes), 0, dtype=np.uint8)

    def read() -> int:
        for begin, end in _parts(run):
            for at, (shard, key, offset) in enumerate(places[begin:end]):
                value = transactions[shard].get(key)
                out[at] = np.frombuffer(value, dtype=np.uint8, count=column.row_bytes, offset=offset)
        return run.batches * out.nbytes

    return read, lambda: _compare(run, plan, out)


def lmdb_rows(run: ColdRun, plan: Plan) -> Prepared:
    """Get each row through py-lmdb from a file with one row per value, and copy it."""
    store = Store.open(run.store)
    column = store.buckets("train")[0].spec.column("latent")
    transaction = _transaction(Path(str(plan["rows_file"])), run)
    keys = [int(row).to_bytes(8, "big") for row in plan["row"]]
    out = np.full((run.batch_size, column.row_bytes), 0, dtype=np.uint8)

    def read() -> int:
        for begin, end in _parts(run):
            for at, key in enumerate(keys[begin:end]):
                out[at] = np.frombuffer(transaction.get(key), dtype=np.uint8)
        return run.batches * out.nbytes

    return read, lambda: _compare(run, plan, out)


def plain_reads(run: ColdRun, plan: Plan) -> Prepared:
    """Read rows batch by batch with `FileGather`, in its threads."""
    from bucketline.store.read.preadv import FileGather

    store = Store.open(run.store)
    bucket = store.buckets("train")[0]
    column = bucket.spec.column("latent")
    gather = FileGather(store, run.threads)
    out = np.full((run.batch_size, *column.shape), 0, dtype=column.numpy_dtype)

    def read() -> int:
        located = bucket.locate(plan["row"])
        for begin, end in _parts(run):
            gather.rows(located.part(begin, end), column, out)
        return len(plan["row"]) * column.row_bytes

    return read, lambda: _compare(run, plan, out)


def batches(run: ColdRun, plan: Plan) -> Prepared:
    """Make batches as the loader does: through its readahead and then with plain reads, or without readahead from the map."""
    from bucketline.bench.batches import Batches
    from bucketline.loader import LoaderConfig
    from bucketline.loader.collate.buffer_pool import carve
    from bucketline.loader.prefetch import readahead

    if run.ahead_mib:
        readahead.AHEAD_BYTES = run.ahead_mib << 20
    store = Store.open(run.store)
    made = Batches(store, LoaderConfig(batch_size=run.batch_size, seed=int(plan["seed"])))
    last: list[FilledBuffer] = []

    def read() -> int:
        copy_plans = made.read_ahead(run.batches) if run.ahead_mib else made.planned(run.batches, readahead.WINDOW)
        last[:] = made.fill(copy_plans)[-1:]
        return int(plan["length"].sum())

    def compare() -> None:
        (filled,) = last
        tensors = carve(filled.buffer, filled.fields)
        _compare(run, plan, tensors["latents"].numpy())
        bucket = store.buckets("train")[0]
        rows, column = plan["row"][-run.batch_size :], store.text.tokens[0]
        captions = np.maximum(bucket.read(rows, CAPTIONS)[:, 0], EMPTY_CAPTION_ROW)
        for n, (shard, caption) in enumerate(zip(bucket.locate(rows).shard.tolist(), captions.tolist(), strict=True)):
            expected, length = store.read_caption(shard, caption)[column.name], int(tensors["token_mask"][n].sum())
            if tensors["tokens"][n, :length].numpy().tobytes() != expected.tobytes():
                raise CorruptError(f"caption {caption} of shard {shard} was not delivered as stored")

    return read, compare


def loader(run: ColdRun, plan: Plan) -> Prepared:
    """Take complete batches from the loader: the plan's rows, and the captions that it draws for them."""
    from bucketline.loader import Batch, Loader, LoaderConfig, TextForm

    store = Store.open(run.store)
    config = LoaderConfig(
        batch_size=run.batch_size, threads=run.threads, rewind=True, seed=int(plan["seed"]), text=TextForm(run.text)
    )
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


def _compare(run: ColdRun, plan: Plan, out: NDArray[Any]) -> None:
    """Compare the last batch with plain reads: the figures of a reader that returns wrong bytes are worthless."""
    begin, end = _parts(run)[-1]
    expected = Store.open(run.store).buckets("train")[0].read(plan["row"][begin:end], "latent")
    if out.tobytes() != expected.tobytes():
        raise CorruptError(f"`{run.reader}` did not deliver the rows as stored")


READERS: dict[str, Callable[[ColdRun, Plan], Prepared]] = {
    "direct": direct,
    "lmdb_blocks": lmdb_blocks,
    "lmdb_rows": lmdb_rows,
    "plain_reads": plain_reads,
    "batches": batches,
    "loader": loader,
}


def _read_bytes() -> int:
    """Return the bytes that this process has read from disks so far."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes:")).partition(":")[2])


def read() -> int:
    """Execute the run that the first argument describes."""
    run = ColdRun(**json.loads(sys.argv[1]))
    with np.load(run.plan) as file:
        plan = {name: file[name] for name in file}
    count = run.batch_size * run.batches
    plan = {name: values[:count] if values.ndim else values for name, values in plan.items()}
    reading, compare = READERS[run.reader](run, plan)
    before, begin = _read_bytes(), time.perf_counter()
    payload_bytes = reading()
    seconds, after = time.perf_counter() - begin, _read_bytes()
    compare()
    print(json.dumps({"seconds": seconds, "payload_bytes": payload_bytes, "read_bytes": after - before}))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(read))
