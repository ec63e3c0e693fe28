"""Pull a store from object storage: its newest generation, whole."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import CorruptError, StoreError, UsageError
from bucketline.files.atomic_folder import refuse_existing, staged_folder
from bucketline.files.atomic_write import write_or_explain
from bucketline.files.disk_space import refuse_too_little_disk
from bucketline.store.folder import MissingObjectError
from bucketline.store.format.hashing import file_digest
from bucketline.store.format.layout import shard_paths
from bucketline.store.format.manifest import MANIFEST, dump_manifest, generation_path
from bucketline.store.read.lost_files import files_of
from bucketline.store.remote.generations import newest_generation, read_generation
from bucketline.store.transfer.files import LISTS, MAX_LIST_BYTES, Downloader, is_there
from bucketline.store.write.publish import changing, prepare_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.remote.objects import ObjectFolder

NOTE = ".pulling"  # the id of the store that an unfinished pull is of


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """Result of a pull."""

    generation: int  # of the store on the disk
    samples: int
    shards: int
    num_bytes: int  # received
    is_update: bool  # an older generation of the store was there


def pull(
    folder: ObjectFolder,
    out: Path,
    *,
    jobs: int = 4,
    on_total: Callable[[int], None] = lambda _: None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Pulled:
    """Write the newest generation of a store in object storage to the store `out` on a disk.

    If `out` is an older generation of the same store, only what it lacks is sent. If it is interrupted, the same call
    continues.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100 - keeps its links unresolved
    manifest = newest_generation(folder)
    received = [0]

    def counted_bytes(num_bytes: int) -> None:
        received[0] += num_bytes
        on_bytes(num_bytes)

    downloader = Downloader(folder, jobs=jobs, on_bytes=counted_bytes)
    is_update = (out / MANIFEST).is_file()
    if is_update:
        manifest = _update(folder, out, manifest, downloader, on_total)
    else:
        refuse_existing(out, "path")
        with staged_folder(out, resumable=True) as partial:
            _begin(partial, manifest)
            _get(folder, partial, manifest, downloader, on_total)
            _remove_others(partial, manifest)
            (partial / NOTE).unlink()
    return Pulled(
        generation=manifest.generation,
        samples=manifest.samples,
        shards=len(manifest.shards),
        num_bytes=received[0],
        is_update=is_update,
    )


def _begin(partial: Path, manifest: Manifest) -> None:
    """Note of which store the pull is; remove what another pull left, and files of other shards of the same names."""
    note = partial / NOTE
    if not (note.is_file() and note.read_text(encoding="ascii", errors="replace") == manifest.store_id):
        shutil.rmtree(partial)
        partial.mkdir()
        write_or_explain(note, manifest.store_id.encode("ascii"))
    prepare_store(partial)
    for entry in manifest.shards:
        index = shard_paths(partial, entry.name).index
        if index.exists() and file_digest(index)[1] != entry.index.digest:
            for path, _ in files_of(partial, entry):
                path.unlink(missing_ok=True)


def _get(
    folder: ObjectFolder, store: Path, manifest: Manifest, downloader: Downloader, on_total: Callable[[int], None]
) -> None:
    """Get what the store on the disk lacks of a generation, then its manifest."""
    files = [list(files_of(store, entry)) for entry in manifest.shards]
    num_bytes = sum(expected.num_bytes for own in files for path, expected in own if not is_there(path, expected))
    refuse_too_little_disk(store, num_bytes, f"pulling {folder.url}")
    on_total(num_bytes)
    downloader.get(file for own in files for file in own[1:])
    downloader.get(own[0] for own in files)  # a writer never adopts a shard without its sidecars
    get_lists(folder, store)
    data = dump_manifest(manifest)
    write_or_explain(generation_path(store, manifest.generation), data)
    write_or_explain(store / MANIFEST, data)


def get_lists(folder: ObjectFolder, store: Path) -> None:
    """Get what the packer noted next to a store."""
    for name in LISTS:
        try:
            data = folder.read(name, MAX_LIST_BYTES)
        except (MissingObjectError, CorruptError):  # none, or too long
            continue
        write_or_explain(store / name, data)


def _remove_others(store: Path, manifest: Manifest) -> None:
    """Remove what an earlier, interrupted pull got and the generation does not list (it was of an older one)."""
    listed = {path for entry in manifest.shards for path, _ in files_of(store, entry)}
    for path in (store / "shards").iterdir():
        if path not in listed:
            path.unlink()


def _update(
    folder: ObjectFolder, store: Path, manifest: Manifest, downloader: Downloader, on_total: Callable[[int], None]
) -> Manifest:
    """Bring an older generation of the store on the disk to the newest one. Under the store's lock."""
    with changing(store, adopting=False) as own:
        if own.store_id != manifest.store_id:
            raise UsageError(f"{store} is another store than {folder.url}; choose a path where there is nothing")
        if own.digest == manifest.digest:
            return own
        try:
            is_older = (
                own.generation < manifest.generation and read_generation(folder, own.generation, manifest).digest == own.digest
            )
        except StoreError as error:
            raise StoreError(
                f"generation {own.generation} of {store} is no longer in {folder.url}, so that nothing tells whether "
                f"{store} has changes of its own; pull into a path where there is nothing ({error})"
            ) from None
        if not is_older:
            raise StoreError(
                f"{store}, generation {own.generation}, has changes that {folder.url}, generation {manifest.generation}, does "
                "not have; push them, or pull into a path where there is nothing"
            )
        shards = {entry.name: entry.lmdb.digest for entry in own.shards}
        if other := [entry.name for entry in manifest.shards if shards.get(entry.name, entry.lmdb.digest) != entry.lmdb.digest]:
            raise StoreError(
                f"{store} has another shard {other[0]} than {folder.url}, where the name was used again; "
                "pull into a path where there is nothing"
            )
        _get(folder, store, manifest, downloader, on_total)
    return manifest
