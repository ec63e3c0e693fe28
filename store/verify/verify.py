"""Read a complete store once in several threads and report every fault.

`store.verify.shard` checks one shard, `store.verify.strays` the rest of the folder.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.errors import StoppedError
from bucketline.store.verify.column import ColumnCheck
from bucketline.store.verify.faults import Fault
from bucketline.store.verify.shard import ShardCheck
from bucketline.store.verify.strays import FolderCheck, Stray

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.store.format.manifest_entries import ShardEntry
    from bucketline.store.read.store import Store

__all__ = ["Fault", "Stray", "Verified", "verify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Counts of what was read, and the faults."""

    blocks: int
    rows: int
    corrupt: tuple[Fault, ...]
    strays: tuple[Stray, ...] = ()


def verify(store: Store, on_bytes: Callable[[int], None], threads: int | None = None, *, shards_only: bool = False) -> Verified:
    """Read every file in the store's folder and return the faults in shard order.

    With `shards_only`, read only the files of the generation's shards.

    The reading threads call `on_bytes` with the bytes read from the generation's shard files. `threads` defaults to the number
    of CPU cores; each needs a few MiB. An exception in the caller's thread (Ctrl-C) ends all of them at their next segment.
    """
    stopped = threading.Event()

    def went_on(num_bytes: int) -> None:
        if stopped.is_set():
            raise StoppedError
        if num_bytes:
            on_bytes(num_bytes)

    folder = FolderCheck(store.folder, store.manifest, went_on)
    blocks = rows = 0
    faults: list[Fault] = []
    with ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="bucketline-verify") as pool:
        try:
            rest = None if shards_only else pool.submit(folder.run)
            found = [pool.submit(_check_shard, store, entry, went_on) for entry in store.manifest.shards]
            for shard in found:
                result = shard.result()
                blocks, rows = blocks + result.blocks, rows + result.rows
                faults.extend(result.corrupt)
            if rest is not None:
                rest.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return Verified(blocks=blocks, rows=rows, corrupt=(*folder.faults, *faults), strays=folder.strays)


def _check_shard(store: Store, entry: ShardEntry, on_bytes: Callable[[int], None]) -> Verified:
    check = ShardCheck(store, entry, on_bytes)
    check.run()
    faults, blocks = check.faults, check.blocks
    for column in sorted(entry.added):
        of_column = ColumnCheck(store, entry, column, on_bytes)
        of_column.run()
        faults, blocks = (*faults, *of_column.faults), blocks + of_column.blocks
    return Verified(blocks=blocks, rows=check.rows, corrupt=faults)
