"""Read a complete store once in several threads and report every fault.

`store.verify.shard` checks one shard, `store.verify.strays` the rest of the folder.
"""

from __future__ import annotations

import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import CorruptError, StoppedError
from bucketline.store.folder import MissingObjectError
from bucketline.store.format.manifest import sealed
from bucketline.store.read.lost_files import files_of
from bucketline.store.read.store import Store
from bucketline.store.remote.generations import newest_generation
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.transfer.download import Downloader
from bucketline.store.verify.faults import Fault
from bucketline.store.verify.shard import ColumnCheck, ShardCheck
from bucketline.store.verify.strays import FolderCheck, Stray

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.store.folder import Folder
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.manifest_entries import ShardEntry

__all__ = ["Fault", "Stray", "Verified", "verify", "verify_folder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Counts of what was read, and the faults."""

    blocks: int
    rows: int
    corrupt: tuple[Fault, ...]
    strays: tuple[Stray, ...] = ()


def verify(store: Store, on_bytes: Callable[[int], None], threads: int | None = None, *, shards_only: bool = False) -> Verified:
    """Verify a generation of a store; see `verify_folder`."""
    return verify_folder(store.folder, on_bytes, threads, store.manifest, shards_only=shards_only)


def verify_folder(
    folder: Folder,
    on_bytes: Callable[[int], None],
    threads: int | None = None,
    manifest: Manifest | None = None,
    *,
    shards_only: bool = False,
) -> Verified:
    """Read every file in a store's folder and return the faults in shard order.

    `manifest` is a generation, by default the newest. With `shards_only`, read only the files of its shards.

    The reading threads call `on_bytes` with the bytes read from the generation's shard files. `threads` defaults to the number
    of CPU cores; each needs a few MiB. Of a store in object storage, there is one, and one shard at a time is on this disk. An
    exception in the caller's thread (Ctrl-C) ends all of them at their next segment.
    """
    manifest = manifest or newest_generation(folder)
    if isinstance(folder, ObjectFolder):
        threads, check_shard = 1, partial(_check_there, folder, manifest)
    else:
        check_shard = partial(_check_shard, Store.at(folder, manifest))
    stopped = threading.Event()

    def went_on(num_bytes: int) -> None:
        if stopped.is_set():
            raise StoppedError
        if num_bytes:
            on_bytes(num_bytes)

    rest_of_it = FolderCheck(folder, manifest, went_on)
    blocks = rows = 0
    faults: list[Fault] = []
    with ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="bucketline-verify") as pool:
        try:
            rest = None if shards_only else pool.submit(rest_of_it.run)
            found = [pool.submit(check_shard, entry, went_on) for entry in manifest.shards]
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
    return Verified(blocks=blocks, rows=rows, corrupt=(*rest_of_it.faults, *faults), strays=rest_of_it.strays)


def _check_shard(store: Store, entry: ShardEntry, on_bytes: Callable[[int], None]) -> Verified:
    check = ShardCheck(store, entry, on_bytes)
    check.run()
    faults, blocks = check.faults, check.blocks
    for column in sorted(entry.added):
        of_column = ColumnCheck(store, entry, column, on_bytes)
        of_column.run()
        faults, blocks = (*faults, *of_column.faults), blocks + of_column.blocks
    return Verified(blocks=blocks, rows=check.rows, corrupt=faults)


def _check_there(folder: ObjectFolder, manifest: Manifest, entry: ShardEntry, on_bytes: Callable[[int], None]) -> Verified:
    """Check a shard of a store in object storage, which is got for that."""
    with tempfile.TemporaryDirectory(prefix="bucketline-", ignore_cleanup_errors=True) as work:
        path = Path(work)
        (path / "shards").mkdir()
        try:
            Downloader(folder, takes_any_digest=True).get(files_of(path, entry))
        except (CorruptError, MissingObjectError) as error:
            return Verified(blocks=0, rows=0, corrupt=(Fault(shard=entry.name, error=str(error)),))
        return _check_shard(Store(path, sealed(replace(manifest, shards=(entry,), retired=()))), entry, on_bytes)
