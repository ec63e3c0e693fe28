"""Reading a whole store once, by several threads, and naming every fault.

What a shard's check is, is in `shard_check`; what lies in the folder beside the newest generation is `folder_check`'s.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.store.faults import Fault
from bucketline.store.folder_check import FolderCheck, Stray
from bucketline.store.shard_check import ShardCheck

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.store.manifest import ShardEntry
    from bucketline.store.reader import Store

__all__ = ["Fault", "Stray", "Verified", "verify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What was read, and what was wrong."""

    blocks: int
    rows: int
    corrupt: tuple[Fault, ...]
    strays: tuple[Stray, ...] = ()


class _StoppedError(Exception):
    """The caller has gone; a thread is to end."""


def verify(store: Store, on_bytes: Callable[[int], None], threads: int | None = None) -> Verified:
    """Read every file of the store's folder; faults come in the order of the store's shards.

    `on_bytes` is told of progress, in bytes of the generation's shard files, by the threads that read; there are as many as
    the machine has cores unless `threads` says otherwise. Each holds a few MiB. An exception in the caller's thread (Ctrl-C)
    ends all of them at their next segment.
    """
    stopped = threading.Event()

    def went_on(num_bytes: int) -> None:
        if stopped.is_set():
            raise _StoppedError
        if num_bytes:
            on_bytes(num_bytes)

    folder = FolderCheck(store, went_on)
    blocks = rows = 0
    faults: list[Fault] = []
    with ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="bucketline-verify") as pool:
        try:
            rest = pool.submit(folder.run)
            found = [pool.submit(_check_shard, store, entry, went_on) for entry in store.manifest.shards]
            for shard in found:
                result = shard.result()
                blocks, rows = blocks + result.blocks, rows + result.rows
                faults.extend(result.corrupt)
            rest.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return Verified(blocks=blocks, rows=rows, corrupt=(*folder.faults, *faults), strays=folder.strays)


def _check_shard(store: Store, entry: ShardEntry, on_bytes: Callable[[int], None]) -> Verified:
    check = ShardCheck(store, entry, on_bytes)
    check.run()
    return Verified(blocks=check.blocks, rows=check.rows, corrupt=check.faults)
