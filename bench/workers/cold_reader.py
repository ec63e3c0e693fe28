"""The fresh process of a cold run: `python -m bucketline.bench.workers.cold_reader JSON`, with a `ColdRun` as JSON.

The preparation before the clock starts reads nothing of the payload, and writes to the buffers. The clock covers the reading,
locating included. Prints a `Read` as JSON.
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

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    Plan = Mapping[str, NDArray[Any]]
    Prepared = tuple[Callable[[], int], Callable[[], None]]  # read and return the payload's bytes; verify the last batch

SECTOR_BYTES = 4096


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


def loader(run: ColdRun, plan: Plan) -> Prepared:
    """Take complete batches from the loader: the plan's rows, and the captions that it draws for them."""
    from bucketline.loader import Batch, Loader, LoaderConfig

    store = Store.open(run.store)
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


READERS: dict[str, Callable[[ColdRun, Plan], Prepared]] = {
    "direct": direct,
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
