"""Pull a store from object storage: all of it, or some of its rows."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.errors import CorruptError, StoreError, UsageError
from bucketline.files.atomic_folder import refuse_existing, staged_folder
from bucketline.files.atomic_write import write_or_explain
from bucketline.files.disk_space import refuse_too_little_disk
from bucketline.files.regular_file import read_regular
from bucketline.store.change.copy_rows import RowCopier
from bucketline.store.change.merge import entry_of
from bucketline.store.change.merge_rows import part_of
from bucketline.store.folder import MissingObjectError
from bucketline.store.format.hashing import file_digest
from bucketline.store.format.layout import shard_paths
from bucketline.store.format.manifest import MANIFEST, dump_manifest, generation_path, sealed, write_manifest
from bucketline.store.read.lost_files import files_of
from bucketline.store.read.store import Store
from bucketline.store.remote.generations import newest_generation, read_generation
from bucketline.store.shard.reader import SealedShard
from bucketline.store.sync.push import note_pushed
from bucketline.store.sync.selection import PullSelection
from bucketline.store.transfer.download import Downloader, is_there
from bucketline.store.transfer.upload import LISTS, MAX_LIST_BYTES
from bucketline.store.write.describe import describe_shard
from bucketline.store.write.publish import changing, prepare_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.manifest_entries import DroppedEntry, FileEntry, ShardEntry
    from bucketline.store.format.schema import AddedColumn
    from bucketline.store.remote.objects import ObjectFolder

_GENERATION = 1  # of a store of some rows: 0 is the empty store
NOTE = ".pulling.json"  # what an unfinished pull is of; names of the copies it has made
WORK = ".pulling"  # one shard at a time whose rows are copied


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """Result of a pull."""

    generation: int  # of the store on the disk
    samples: int
    shards: int
    num_bytes: int  # received
    copied: int  # shards of which only some rows were wanted
    is_update: bool  # an older generation of the store was there


def pull(
    folder: ObjectFolder,
    out: Path,
    selection: PullSelection | None = None,
    *,
    generation: int | None = None,
    jobs: int = 4,
    on_total: Callable[[int], None] = lambda _: None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Pulled:
    """Write the newest generation of a store in object storage, or another one, to the store `out` on a disk.

    If `out` is an older generation of the same store, only what it lacks is sent. With a selection, `out` is a new store of
    the selected rows: whole shards where all of their rows are selected, and copies of the rows otherwise. If it is
    interrupted, the same call continues.

    Raises:
        UsageError: if `out` exists and is not an older generation of the store, or a bucket does not exist.
        StoreError: if the store cannot be read, the disk is too small, or `out` has changes of its own.
        CorruptError: if an object differs from the manifest.
        LockedError: if another process writes to `out`.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100 - keeps its links unresolved
    selection = selection or PullSelection()
    newest = newest_generation(folder)
    manifest = newest if generation is None else read_generation(folder, generation, newest)
    selection.refuse_unknown(manifest, folder.url)
    received = [0]

    def counted_bytes(num_bytes: int) -> None:
        received[0] += num_bytes
        on_bytes(num_bytes)

    downloader = Downloader(folder, jobs=jobs, on_bytes=counted_bytes)
    is_update = (out / MANIFEST).is_file() and selection.is_all
    copied = 0
    if is_update:
        manifest = _update(folder, out, manifest, downloader, on_total)
    else:
        refuse_existing(out, "path")
        with staged_folder(out, resumable=True) as partial:
            note = _Note(partial, {"store": manifest.store_id, "selection": repr(selection)})
            prepare_store(partial)
            for place in (partial, partial / WORK):
                _forget_others(place, manifest.shards)
            if selection.is_all:
                _whole(folder, partial, manifest, downloader, on_total)
            else:
                manifest, copied = _Copies(folder, partial, manifest, selection, downloader, note).run(on_total)
            if selection.is_all:
                note_pushed(partial, folder.url, manifest)
            note.remove()
    if is_update:
        note_pushed(out, folder.url, manifest)
    return Pulled(
        generation=manifest.generation,
        samples=manifest.samples,
        shards=len(manifest.shards),
        num_bytes=received[0],
        copied=copied,
        is_update=is_update,
    )


class _Note:
    """The note of an unfinished pull: its store, its selection, the copies it made. What another pull left is removed."""

    def __init__(self, partial: Path, what: dict[str, str]) -> None:
        self._path, self._partial = partial / NOTE, partial
        try:
            self._noted: dict[str, Any] = json.loads(read_regular(self._path, 1 << 28))
        except (OSError, ValueError):
            self._noted = {}
        if self._noted.get("what") != what:
            shutil.rmtree(partial)
            partial.mkdir()
            self._noted = {"what": what, "copies": {}, "store_id": uuid.uuid4().hex}
            self._write()

    @property
    def store_id(self) -> str:
        """Id of the new store, if only some rows are wanted."""
        return str(self._noted["store_id"])

    @property
    def copies(self) -> dict[str, list[str]]:
        """Names of finished copies by the shard whose rows they have, as it was at that time."""
        found: dict[str, list[str]] = self._noted["copies"]
        return found

    def add(self, key: str, names: list[str]) -> None:
        self.copies[key] = names
        self._write()

    def _write(self) -> None:
        write_or_explain(self._path, json.dumps(self._noted).encode())

    def remove(self) -> None:
        """Leave nothing in the finished store that does not belong there."""
        self._path.unlink()
        shutil.rmtree(self._partial / WORK, ignore_errors=True)


def _missing_bytes(store: Path, shards: tuple[ShardEntry, ...]) -> int:
    files = (file for entry in shards for file in files_of(store, entry))
    return sum(expected.num_bytes for path, expected in files if not is_there(path, expected))


def _get_shards(
    store: Path, shards: tuple[ShardEntry, ...], downloader: Downloader, on_total: Callable[[int], None], url: str
) -> None:
    num_bytes = _missing_bytes(store, shards)
    refuse_too_little_disk(store, num_bytes, f"pulling {url}")
    on_total(num_bytes)
    files = [list(files_of(store, entry)) for entry in shards]
    downloader.get(file for own in files for file in own[1:])
    downloader.get(own[0] for own in files)  # a writer never adopts a shard without its sidecars


def _whole(
    folder: ObjectFolder, store: Path, manifest: Manifest, downloader: Downloader, on_total: Callable[[int], None]
) -> None:
    _get_shards(store, manifest.shards, downloader, on_total, folder.url)
    _remove_others(store, manifest)
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


def _forget_others(store: Path, shards: tuple[ShardEntry, ...]) -> None:
    """Remove what an earlier, interrupted pull got of other shards under the names of these."""
    for entry in shards:
        index = shard_paths(store, entry.name).index
        if index.exists() and file_digest(index)[1] != entry.index.digest:
            for path, _ in files_of(store, entry):
                path.unlink(missing_ok=True)


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
        _get_shards(store, manifest.shards, downloader, on_total, folder.url)
        get_lists(folder, store)
        note_pushed(store, folder.url, own, manifest)
        data = dump_manifest(manifest)
        write_or_explain(generation_path(store, manifest.generation), data)
        write_or_explain(store / MANIFEST, data)
    return manifest


def _sidecars(store: Path, entry: ShardEntry) -> list[tuple[Path, FileEntry | DroppedEntry]]:
    return [(path, expected) for path, expected in files_of(store, entry) if path.suffix != ".lmdb"]


def _of_buckets(added: Mapping[str, AddedColumn], names: set[str]) -> dict[str, AddedColumn]:
    """Return added columns of some buckets only."""
    return {
        name: dataclasses.replace(own, buckets={bucket: form for bucket, form in own.buckets.items() if bucket in names})
        for name, own in added.items()
    }


class _Copies:
    """A new store of some rows."""

    def __init__(
        self,
        folder: ObjectFolder,
        out: Path,
        manifest: Manifest,
        selection: PullSelection,
        downloader: Downloader,
        note: _Note,
    ) -> None:
        self._folder, self._out, self._manifest, self._selection = folder, out, manifest, selection
        self._downloader, self._note, self._work = downloader, note, out / WORK

    def run(self, on_total: Callable[[int], None]) -> tuple[Manifest, int]:
        """Return the new store's manifest, and of how many shards only some rows were copied."""
        may_have = [
            entry
            for entry in self._manifest.shards
            if any(count and self._selection.has_bucket(b) for b, count in entry.live.items())
        ]
        on_total(_missing_bytes(self._out, tuple(may_have)))  # less, where only sidecars are needed
        shards: list[ShardEntry] = []
        num_copied = 0
        for entry in may_have:
            own = self._take(entry)
            shards += own
            num_copied += any(new.name != entry.name for new in own)
        if not shards:
            raise UsageError(f"no row of {self._folder.url} is selected; nothing was written")
        listed = {group for entry in shards for group in entry.groups}
        manifest = dataclasses.replace(
            self._manifest,
            store_id=self._note.store_id,
            generation=_GENERATION,
            shards=tuple(shards),
            buckets=tuple(bucket for bucket in self._manifest.buckets if bucket.name in listed),
            added=_of_buckets(self._manifest.added, listed),
            retired=(),
        )
        _remove_others(self._out, manifest)
        return write_manifest(self._out, sealed(manifest)), num_copied

    def _take(self, entry: ShardEntry) -> list[ShardEntry]:
        """Return the new store's shards with the selected rows of a shard."""
        added = "".join(f":{column}:{own.shard_id}" for column, own in sorted(entry.added.items()))
        key = f"{entry.name}:{entry.dropped.digest if entry.dropped else ''}{added}"
        if key in self._note.copies:
            return [describe_shard(self._out, name, self._manifest)[0] for name in self._note.copies[key]]
        prepare_store(self._work)
        files = list(files_of(self._work, entry))
        if is_there(shard_paths(self._out, entry.name).lmdb, entry.lmdb):  # all of its rows are selected
            return [entry]
        self._downloader.get(_sidecars(self._work, entry))
        if self._selection.reads_records:
            self._get_data(entry)
        shard = SealedShard(self._work, entry)
        keys = self._selection.keys(shard)
        if not len(keys):
            self._forget()
            self._note.add(key, [])
            return []
        self._get_data(entry)
        if len(keys) == entry.live_samples:
            for path, _ in (*files[1:], files[0]):
                path.replace(self._out / "shards" / path.name)
            return [entry]
        own, data = entry_of(part_of(shard, keys), 0)
        write_or_explain(shard.paths.dropped(0), data)
        view = dataclasses.replace(self._manifest, shards=(own,), retired=())
        with RowCopier(Store(self._work, view), _GENERATION) as copier:
            names = copier.copy(range(1), (), max(1, entry.lmdb.num_bytes))
        for name in names:
            made = sorted((self._work / "shards").glob(f"{name}.*"), key=lambda path: path.name == f"{name}.lmdb")
            for source in made:
                source.replace(self._out / "shards" / source.name)
        self._note.add(key, names)
        self._forget()
        return [describe_shard(self._out, name, self._manifest)[0] for name in names]

    def _get_data(self, entry: ShardEntry) -> None:
        refuse_too_little_disk(self._out, 2 * entry.lmdb.num_bytes, f"pulling {self._folder.url}")
        self._downloader.get(files_of(self._work, entry))

    def _forget(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)
