"""The process that `first_pass` measures.

`python -m bucketline.bench.workers.first_pass STORE BATCH_SIZE STEP_MS` creates a loader, takes batches, adds up their words
and waits STEP_MS after each. It prints CPU-seconds per GB (1e9 bytes): of the first 512 MB, including the creation of the
loader, and of twice as much once every row was delivered twice. Batches that are filled but not taken count as done.
Everything is imported in advance.
"""

from __future__ import annotations

import gc
import json
import mmap
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.ma  # numpy imports it at the first `unique`

from bucketline.loader.config import LoaderConfig
from bucketline.loader.loader import Loader
from bucketline.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bucketline.loader import Batch

FIRST_BYTES = 512_000_000


class _Taker:
    """Takes batches, and counts what was filled for them."""

    def __init__(self, loader: Loader, step_s: float) -> None:
        self._step_s = step_s
        self._loader, self._batches = loader, loader.forever()
        self._ready = 0
        self.buffers = 0

    def take(self, least: int) -> int:
        """Take batches until at least `least` bytes were filled; return how many were."""
        filled = 0
        while filled < least:
            num_bytes = _read(self._batches)
            time.sleep(self._step_s)  # in place of a GPU's computation
            stats = self._loader.stats()
            filled += num_bytes * (1 + stats.ready - self._ready)
            self._ready, self.buffers = stats.ready, stats.buffers
        return filled


def _read(batches: Iterator[Batch]) -> int:
    tensors = list(next(batches).tensors())
    for tensor in tensors:
        flat = tensor.numpy().reshape(-1).view(np.uint8)
        np.add.reduce(flat[: len(flat) // 8 * 8].view(np.uint64))
    return sum(tensor.nbytes for tensor in tensors)


def _back_memory() -> None:
    """Touch memory and free it, in huge pages and in small ones.

    In a virtual machine, the very first touch makes the host allocate memory, which takes about 10 times as long.
    """
    for is_huge in (True, False):
        memory = mmap.mmap(-1, FIRST_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if is_huge:
            memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE] = 1


def main() -> int:
    """Take the batches and print both figures."""
    path, batch_size, step_ms = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    for file in path.rglob("*"):
        if file.is_file():
            file.read_bytes()
    _back_memory()
    store = Store.open(path)
    gc.collect()
    gc.freeze()  # the objects of the imports, which would take 60 ms to scan at an arbitrary moment
    begun = time.process_time()
    with Loader(store, LoaderConfig(batch_size=batch_size)) as loader:
        taker = _Taker(loader, step_ms / 1000)
        filled = taker.take(FIRST_BYTES)
        first = (time.process_time() - begun) / filled * 1e9
        buffers = taker.buffers
        taker.take(2 * store.manifest.payload_bytes)
        begun = time.process_time()
        filled = taker.take(2 * FIRST_BYTES)
        steady = (time.process_time() - begun) / filled * 1e9
    print(json.dumps({"first": first, "steady": steady, "buffers": buffers}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
