"""Verify a store in object storage: one shard at a time is on the disk while it is read."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import CorruptError, StoreError
from bucketline.store.folder import MissingObjectError
from bucketline.store.format.hashing import line_sums
from bucketline.store.format.layout import shard_paths
from bucketline.store.format.manifest import sealed
from bucketline.store.read.lost_files import files_of
from bucketline.store.read.store import Store
from bucketline.store.remote.generations import newest_generation
from bucketline.store.remote.lines import decode_lines, lines_bytes, lines_name
from bucketline.store.transfer.download import Downloader
from bucketline.store.verify.strays import FolderCheck
from bucketline.store.verify.verify import Fault, Verified, verify
from bucketline.store.write.publish import prepare_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.manifest_entries import ShardEntry
    from bucketline.store.remote.objects import ObjectFolder


def verify_objects(
    objects: ObjectFolder, on_bytes: Callable[[int], None], threads: int | None = None, manifest: Manifest | None = None
) -> Verified:
    """Read every object and return the faults in shard order, as `verify` does on a disk.

    Raises:
        StoreError: if there is no store, or the bucket cannot be reached.
    """
    manifest = manifest or newest_generation(objects)
    folder = FolderCheck(objects, manifest, on_bytes)
    folder.run()
    blocks, rows, faults = 0, 0, [*folder.faults]
    for entry in manifest.shards:
        found = _shard(objects, manifest, entry, on_bytes, threads)
        blocks, rows = blocks + found.blocks, rows + found.rows
        faults += found.corrupt
    return Verified(blocks=blocks, rows=rows, corrupt=tuple(faults), strays=folder.strays)


def _shard(
    objects: ObjectFolder, manifest: Manifest, entry: ShardEntry, on_bytes: Callable[[int], None], threads: int | None
) -> Verified:
    with tempfile.TemporaryDirectory(prefix="bucketline-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "store"
        prepare_store(path)
        try:
            Downloader(objects, takes_any_digest=True).get(files_of(path, entry))
            faults = _faults_of_lines(objects, entry, path)
        except (CorruptError, MissingObjectError) as error:
            return Verified(blocks=0, rows=0, corrupt=(Fault(shard=entry.name, error=str(error)),))
        alone = sealed(dataclasses.replace(manifest, shards=(entry,), retired=()))
        found = verify(Store(path, alone), on_bytes, threads, shards_only=True)
    return dataclasses.replace(found, corrupt=(*faults, *found.corrupt))


def _faults_of_lines(objects: ObjectFolder, entry: ShardEntry, path: Path) -> tuple[Fault, ...]:
    """Compare the checksums of the lines, which readers rely on, with the shard's file."""
    if entry.line_checksums:
        return ()  # they are in the extents, and compared with them
    name = lines_name(entry.name)
    try:
        stored = decode_lines(objects.read(name, lines_bytes(entry)), entry, Path(objects.place(name)))
    except StoreError as error:
        return (Fault(shard=entry.name, error=f"{error}; `store push` writes it again"),)
    if stored.tolist() == line_sums(shard_paths(path, entry.name).lmdb).finish():
        return ()
    return (
        Fault(shard=entry.name, error=f"{objects.place(name)}: checksums of lines differ from the shard's; remove it and push"),
    )
