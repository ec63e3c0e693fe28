"""Change a store: adopt finished shards, drop rows, publish the next generation.

Only one process at a time does this; it holds the store's writer lock.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import lmdb
import numpy as np

from bucketline.errors import CorruptError, LockedError, StoreError
from bucketline.files.atomic_write import FileLock, explaining, is_aside, is_held, remove_unless_held, sync_folder
from bucketline.files.paths import read_regular
from bucketline.forks import cached_property
from bucketline.store.folder import Folder, LocalFolder
from bucketline.store.format.block import bytes_digest, sample_digest
from bucketline.store.format.manifest import (
    COPY_PREFIX,
    ENGINE,
    FORMAT_VERSION,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    SAMPLE_PREFIX,
    SHARD_NAME,
    DroppedEntry,
    Manifest,
    ShardEntry,
    check_fingerprint,
    dropped_path,
    generation_path,
    generations,
    newest_intact,
    object_name,
    read_manifest,
    sealed,
    shard_paths,
    write_manifest,
)
from bucketline.store.format.schema import Schema
from bucketline.store.format.text import TextError
from bucketline.store.read.samples import disk_bytes
from bucketline.store.read.store import Store
from bucketline.store.remote.generations import find_newest
from bucketline.store.remote.objects import asked_again
from bucketline.store.shard.meta import read_meta
from bucketline.store.shard.reader import (
    RANGE_BYTES,
    SealedShard,
    as_keys,
    captions_cut,
    index_bytes,
    keys_of,
    positions_of,
    read_entries,
    search_index,
)
from bucketline.store.shard.sidecar import DroppedRows, dropped_counts, encode_dropped, refuse_other
from bucketline.store.write.column import MAKING
from bucketline.store.write.seal import RECORDS, committed_records, may_have_commits, read_lmdb, seal_apart

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.format.manifest import FileEntry
    from bucketline.typed_json import Json


RUNS_FOLDER = "runs"  # in pending/: the files of the ranks of a run
KEPT_CAPTIONS = "captions"  # in pending/: stores of captions that a pack has encoded, and not yet written with their rows


# ----------------------------------------------------------------------------------------------------------------- change base
# The generation that a change starts from: how it is found, its shards, and where new shards and its list of dropped rows go.
#
# `generations/G.json` is written before `manifest.json` is replaced, so a crash between the two leaves an older
# `manifest.json`; so does restoring one by hand. Continuing from it would treat the newer generations' shards as unlisted and
# restore samples that were dropped.


def newest_manifest(store: Path) -> Manifest | None:
    """Return the manifest of a store's newest generation; None if there is no store yet.

    If a crash left generations but no `manifest.json`, it is the newest intact one.
    """
    return find_newest(LocalFolder(store), lists=True)


def existing_manifest(store: Path) -> Manifest:
    """Return the manifest of a store's newest generation."""
    return newest_manifest(store) or read_manifest(store)  # which raises the precise error


def is_published(store: Path, manifest: Manifest) -> bool:
    """Return whether `manifest.json` is this manifest, by digest."""
    try:
        return manifest.digest.encode("ascii") in read_regular(store / MANIFEST, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return False


def listed_by_any(store: Path, names: Collection[str]) -> set[str]:
    """Return those of some shards' names that any existing generation lists, including damaged ones."""
    found: set[str] = set()
    for generation in generations(store) if names else ():
        try:
            data = read_regular(generation_path(store, generation), MAX_MANIFEST_BYTES)
        except OSError:
            continue  # just collected, or not a file: it lists nothing
        found |= {name for name in names if any(form % name.encode("ascii", "replace") in data for form in _NAMED)}
    return found


_NAMED = (b'"name": "%b"', b'"name":"%b"')


AT_ONCE = 16  # requests for indexes
MAX_INDEXES = 4096  # that are kept
_indexes: dict[str, NDArray[Any]] = {}  # by the digest of the sidecar: indexes that this process has read whole


class ChangeBase:
    """A generation of a store, on a disk or in object storage."""

    def __init__(
        self,
        folder: Folder,
        manifest: Manifest,
        number: int,
        made: Path,
        cache: Path | None = None,
        *,
        is_cache_kept: bool = False,
    ) -> None:
        """Read nothing yet.

        `number` is the generation that is prepared. `made` is the folder in which new shards are made, laid out as a store: on
        a disk the store's. `cache`: of object storage; if it is kept, sidecars are read through it, whole.
        """
        self.folder, self.manifest, self.number, self.made = folder, manifest, number, made
        self._cache, self._is_cache_kept = cache, is_cache_kept

    @cached_property
    def store(self) -> Store:
        return Store.at(self.folder, self.manifest, self._cache)

    @cached_property
    def dropped(self) -> DroppedRows:
        """Return the generation's dropped rows; nothing is read yet."""

        def read(path: Path, listed: FileEntry) -> bytes:
            def request() -> bytes:
                data = self.folder.read(object_name(path), listed.num_bytes)
                refuse_other(self.folder.place(object_name(path)), data, listed)
                return data

            return asked_again(request, self.folder.deadline_s)

        return DroppedRows(self.made, self.manifest, None if isinstance(self.folder, LocalFolder) else read)

    def _is_made(self, entry: ShardEntry) -> bool:
        """Return whether a shard's files are in the folder of those that are made."""
        return isinstance(self.folder, LocalFolder) or shard_paths(self.made, entry.name).meta.exists()

    def shard(self, entry: ShardEntry) -> SealedShard:
        """Return the reader of a shard of the generation, or of one that was made; nothing is opened yet."""
        if self._is_made(entry):
            return SealedShard(self.made, entry, dropped=self.dropped)
        return SealedShard(self.store.path, entry, source=self.store.source, dropped=self.dropped)

    def find(self, entries: Sequence[ShardEntry], keys: NDArray[np.bytes_]) -> list[NDArray[Any]]:
        """Return of each of some shards the index entries of the samples that have one of some sorted digests."""
        if isinstance(self.folder, LocalFolder):
            return [self._find(entry, keys) for entry in entries]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            new = {entry.name: pool.submit(self._find, entry, keys) for entry in entries if entry.meta.digest not in _indexes}
        return [new[entry.name].result() if entry.name in new else self._find(entry, keys) for entry in entries]

    def _find(self, entry: ShardEntry, keys: NDArray[np.bytes_]) -> NDArray[Any]:
        is_long = index_bytes(entry) > RANGE_BYTES * max(1, len(keys))
        if entry.meta.digest not in _indexes and is_long and not self._is_cache_kept:
            return self._request(search_index, entry, keys)
        index = self.index(entry)
        own = keys_of(index["digest"])
        if len(keys) > len(own):
            return index[positions_of(own, keys) >= 0]
        at = positions_of(keys, own)
        return index[at[at >= 0]]

    def index(self, entry: ShardEntry) -> NDArray[Any]:
        """Return a shard's whole index, which this process keeps."""
        if (index := _indexes.get(entry.meta.digest)) is None:
            is_short = index_bytes(entry) <= RANGE_BYTES and not self._is_cache_kept
            index = self._request(read_entries, entry, 0, entry.samples) if is_short else self.shard(entry).index
            if len(_indexes) >= MAX_INDEXES:
                _indexes.clear()
            _indexes[entry.meta.digest] = index
        return index

    def _request(self, search: Callable[..., NDArray[Any]], entry: ShardEntry, *what: object) -> NDArray[Any]:
        """Return what a function returns that reads ranges of a shard's sidecar."""
        folder, name = LocalFolder(self.made) if self._is_made(entry) else self.folder, f"shards/{entry.name}.meta"
        read = partial(folder.read_range, name)
        return asked_again(lambda: search(read, folder.place(name), entry, *what), folder.deadline_s)

    def list_dropped(
        self, shards: Iterable[ShardEntry], changed: Mapping[tuple[str, str], NDArray[np.uint32]] = MappingProxyType({})
    ) -> DroppedEntry | None:
        """Write the list of the dropped rows of some shards; return its entry, that of the generation if it has just these.

        Those of buckets that are not `changed`, by shard and bucket, are the generation's.
        """
        groups = [(entry.name, group) for entry in shards for group, _ in dropped_counts(entry)]
        if not groups:
            return None
        data = encode_dropped([changed[own] if own in changed else self.dropped.of(*own) for own in groups])
        entry = DroppedEntry(generation=self.number, num_bytes=len(data), digest=bytes_digest(data))
        if self.manifest.dropped is not None and self.manifest.dropped.digest == entry.digest:
            return self.manifest.dropped
        self.folder.write(object_name(dropped_path(self.made, entry)), data)
        return entry

    def fetch_indexes(self) -> None:
        """Get the indexes of all shards, and the list of dropped rows, before shards are read one after the other."""
        if not isinstance(self.folder, LocalFolder):
            self.store.fetch_indexes()


# --------------------------------------------------------------------------------------------------------------------- publish

WRITER_LOCK = "writer.lock"
WAIT_S = 600.0  # of a commit, for the lock: 128 writers may be ahead, each with a manifest of many shards
FOLDERS = ("shards", "pending", "generations")


def prepare_store(store: Path) -> None:
    """Create a store's folders and fsync them: after a power loss, commits in an unsynced folder could be lost."""
    refuse_linked_folders(store)
    try:
        made = [folder for folder in (store, *store.absolute().parents) if not folder.exists()]
        for folder in (store, *(store / name for name in FOLDERS)):
            folder.mkdir(exist_ok=True, parents=folder == store)
        for folder in (store, *(folder.parent for folder in made)):
            sync_folder(folder)
    except OSError as error:
        raise StoreError(f"cannot make {store} a store: {error.strerror}") from error


def refuse_linked_folders(store: Path) -> None:
    """Check that a store's own folders are not links: writes and removals there would hit somebody else's files."""
    for folder in (store / name for name in FOLDERS):
        if folder.is_symlink():
            raise StoreError(
                f"{folder} is a link; a store is changed only where its folders are its own: replace the link by "
                f"the folder, or move all of {store} and link to it"
            )


def lock_store(store: Path, *, wait_s: float = 0.0) -> FileLock:
    return FileLock(store / "pending" / WRITER_LOCK, wait_s=wait_s)


def new_manifest(schema: Schema) -> Manifest:
    """Return the manifest of an empty store, generation 0, not yet written."""
    return sealed(
        Manifest(
            **{own.name: getattr(schema, own.name) for own in dataclasses.fields(Schema)},
            format_version=FORMAT_VERSION,
            store_id=uuid.uuid4().hex,
            generation=0,
            engine=ENGINE,
            page_bytes=os.sysconf("SC_PAGE_SIZE"),
            shards=(),
            retired=(),
            digest="",
        )
    )


@contextmanager
def changing(store: Path, *, adopting: bool = True) -> Iterator[Manifest]:
    """Lock an existing store and yield its newest generation, after adopting what an interrupted run left.

    If another writer holds the lock, wait: a commit holds it for milliseconds.
    Without `adopting`, that stays for the next run: adoption reads the indexes of all shards.
    """
    if not all((store / name).is_dir() for name in FOLDERS):
        existing_manifest(store)  # raises if there is none, and nothing is made
        prepare_store(store)
    refuse_linked_folders(store)
    with lock_store(store, wait_s=WAIT_S):
        try:
            manifest = existing_manifest(store)  # read again, now under the lock
            if not is_published(store, manifest):  # a crash between the two writes, or an older manifest was restored
                manifest = write_manifest(store, manifest)
            yield publish(store, manifest, adopt(store, manifest), ()) if adopting else manifest
        except OSError as error:
            raise StoreError(f"cannot change {store}: {error.strerror or error}; rerun the command") from error


def adopt(store: Path, manifest: Manifest) -> list[str]:
    """Finish what an interrupted run left: seal pending shards, and return the names of shards that no generation lists yet.

    Shards that any generation lists, retired shards and copies of an interrupted compact are never returned: their rows are, or
    were, in other shards, and samples dropped from those since would come back. What a running process writes is left to it.
    """
    with explaining(store):
        remove_interrupted_copies(store, manifest)
        for path in sorted((store / "pending").glob("*.lmdb")):
            lock = path.with_suffix(".lock")
            if path.is_symlink() or (path.exists() and not path.is_file()):
                raise StoreError(
                    f"{path} is a link or not a regular file, which no run leaves: move it elsewhere and rerun the command"
                )
            try:
                with FileLock(lock):  # never acquired again: a shard name has one writer
                    if not (is_gone := not path.exists()) and not may_have_commits(path):
                        path.unlink()
                        is_gone = True
                if not is_gone:
                    seal_apart(store, path.stem)  # removes the pending file itself, once its samples are in `shards/`
            except LockedError:
                continue  # another process writes it, and commits it itself
            lock.unlink(missing_ok=True)
        return unlisted(store, manifest)


def unlisted(store: Path, manifest: Manifest, beginnings: tuple[str, ...] = ("",)) -> list[str]:
    """Return the names of sealed shards that no generation lists yet, and that begin with one of `beginnings`.

    Call under the store's lock.
    """
    found = {path.stem for path in (store / "shards").glob("*.lmdb") if SHARD_NAME.fullmatch(path.stem)} - manifest.known_shards
    found = {name for name in found if name.startswith(beginnings) and not name.startswith(COPY_PREFIX)}
    return sorted(found - listed_by_any(store, found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpublished:
    """Rows that writers have committed to a store on a disk, and no generation lists yet."""

    rows: int
    is_being_written: bool  # by a running process, whose rows are not counted


def unpublished(store: Path, manifest: Manifest) -> Unpublished:
    """Return what an interrupted run has left in a store, which the next one adopts. Changes nothing."""
    found = [*(store / "pending").glob("*.lmdb"), *(shard_paths(store, name).lmdb for name in unlisted(store, manifest))]
    found, rows = [path for path in found if not path.name.startswith(COPY_PREFIX)], 0
    locks = (path for path in (store / "pending").glob("*.lock") if path.is_file())  # a pipe would be waited for
    for path in locks:  # the store's, and of each shard that is being written
        with suppress(OSError), path.open("rb") as lock:
            if is_held(lock.fileno()):
                return Unpublished(rows=0, is_being_written=True)
    for path in found:  # which no later run changes
        with suppress(lmdb.Error, OSError, StoreError), read_lmdb(path) as (_, txn), txn.cursor() as cursor:
            rows += committed_records(txn)[1]
            keys = cursor.iternext(values=False) if cursor.set_range(SAMPLE_PREFIX) else ()
            rows += sum(1 for _ in takewhile(lambda key: bytes(key).startswith(SAMPLE_PREFIX), keys))
    return Unpublished(rows=rows, is_being_written=False)


def remove_interrupted_copies(store: Path, manifest: Manifest) -> None:
    """Remove what killed processes left unfinished, and the copies of an interrupted rewrite that no generation lists.

    Call under the store's lock.
    """
    with explaining(store):
        remove_unfinished(store)
        known = manifest.known_shards
        left = [path for path in (store / "shards").glob(f"{COPY_PREFIX}*") if path.name.partition(".")[0] not in known]
        if not left:
            return
        try:  # after an older manifest was restored, newer generations list shards that it does not
            known |= {shard.name for n in generations(store) for shard in read_manifest(store, n).shards}
        except StoreError:
            return  # the shards of a damaged generation are unknown
        for path in left:
            if path.name.partition(".")[0] not in known and not _is_folder(path):
                path.unlink()


def remove_unfinished(store: Path) -> None:
    """Remove unfinished files whose locks no process holds. Pending shards stay for adoption, but copies of rows do not.

    It needs no lock: columns are added, and pages and notes written, without the store's.
    """
    for folder in (store, *(store / name for name in FOLDERS)):
        for path in folder.glob("*"):
            if _is_folder(path):
                continue
            is_pending, is_copy = folder.name == "pending", path.name.startswith(COPY_PREFIX)
            if is_aside(path.name) or (is_pending and path.suffix == MAKING):
                remove_unless_held(path)
            elif is_pending and path.suffix in (".lmdb", RECORDS) and (is_copy or not path.with_suffix(".lmdb").exists()):
                remove_unless_held(path, path.with_suffix(".lock"))


def _is_folder(path: Path) -> bool:
    """Return whether the path is a folder and not a link to one: no writer creates folders next to its files."""
    return path.is_dir() and not path.is_symlink()


def publish(
    store: Path,
    manifest: Manifest,
    new: Iterable[str],
    dropped: Iterable[bytes],
    rules: dict[str, Json] | None = None,
    taken_back: Collection[str] = (),
) -> Manifest:
    """Publish what `with_shards` makes of `manifest`, in a store on a disk. If nothing changes, nothing is written."""
    with explaining(store):
        base = ChangeBase(LocalFolder(store), manifest, next_generation(store, manifest), store)
        after = with_shards(base, new, dropped, rules, taken_back)
        return manifest if after is manifest else publish_shards(store, after, after.shards, base.number)


def with_shards(
    base: ChangeBase,
    new: Iterable[str],
    dropped: Iterable[bytes],
    rules: dict[str, Json] | None = None,
    taken_back: Collection[str] = (),
) -> Manifest:
    """Return the base's manifest with the sealed shards `new`, without the samples whose digests are `dropped`.

    `rules` replaces the manifest's; None keeps them. A sample in a new shard replaces one with the same id in an older shard,
    unless the id is withdrawn: it may have been since the shard was begun. The ids `taken_back` are no longer withdrawn.
    If nothing changes, it is the same manifest.
    """
    manifest = base.manifest
    buckets = {bucket.name: bucket for bucket in manifest.buckets}
    added: list[ShardEntry] = []
    errors = [manifest.text_error]
    for name in sorted(new):
        found = read_meta(base.made, name, with_columns=bool(manifest.added))
        errors.append(found.text_error)
        for bucket in found.buckets:
            if buckets.setdefault(bucket.name, bucket) != bucket:
                raise StoreError(f"shard {name} has other columns in {bucket.name} than the store's other shards")
        added.append(found.entry)
    withdrawn = tuple(sorted({*manifest.withdrawn}.difference(taken_back)))
    shards, changed, _ = replaced(base, added, (*dropped, *map(sample_digest, withdrawn if added else ())))
    rules = manifest.rules if rules is None else rules
    if (shards, rules, withdrawn) == (manifest.shards, manifest.rules, manifest.withdrawn):
        return manifest
    ordered = tuple(buckets[name] for name in sorted(buckets))
    try:
        return dataclasses.replace(
            manifest,
            buckets=ordered,
            rules=rules,
            shards=shards,
            dropped=base.list_dropped(shards, changed) if changed else manifest.dropped,
            withdrawn=withdrawn,
            text_error=TextError.joined(errors),
        )
    except ValueError as error:  # sealed shards, whose sidecars say what cannot be
        raise CorruptError(f"{base.made / 'shards'}: {error}; move that shard elsewhere and pack again") from error


def replaced(
    base: ChangeBase, added: Sequence[ShardEntry], dropped: Iterable[bytes]
) -> tuple[tuple[ShardEntry, ...], dict[tuple[str, str], NDArray[np.uint32]], set[bytes]]:
    """Return entries of the base's and the added shards, without samples that are dropped or that a later added shard holds.

    And all dropped rows of each shard's buckets of which that changes some, and the digests of the samples that are gone.
    """
    shards = base.manifest.shards
    entries = (*shards, *added)
    keys = [as_keys(list(dropped))]
    holders = [np.full(len(keys[0]), len(entries))]  # a dropped sample's row is removed from every shard
    for ordinal, entry in enumerate(added, len(shards)):
        keys.append(keys_of(base.index(entry)["digest"]))
        holders.append(np.full(entry.samples, ordinal))
    newer = np.concatenate(keys)
    order = np.argsort(newer)
    newer, holder = newer[order], np.concatenate(holders)[order]
    first = np.flatnonzero(np.append(True, newer[1:] != newer[:-1])[: len(newer)])
    newer, last_holder = newer[first], np.maximum.reduceat(holder, first)
    changed: dict[tuple[str, str], NDArray[np.uint32]] = {}
    left, gone = list(entries), set[bytes]()
    for ordinal, found in enumerate(base.find(entries, newer) if len(newer) else ()):
        older = found[last_holder[positions_of(keys_of(found["digest"]), newer)] > ordinal]
        if len(older):
            left[ordinal] = _without(base.dropped, entries[ordinal], older, changed, gone)
    return tuple(left), changed, gone


def _without(
    dropped: DroppedRows,
    entry: ShardEntry,
    older: NDArray[Any],
    changed: dict[tuple[str, str], NDArray[np.uint32]],
    gone: set[bytes],
) -> ShardEntry:
    """Return a shard's entry without samples, those of some entries of its index; add to `changed` and `gone`."""
    groups, names = dict(entry.groups), sorted(entry.groups)
    is_new = np.zeros(len(older), dtype=bool)
    for number in np.unique(older["bucket"]).tolist():
        group, own = names[number], older["bucket"] == number
        before = dropped.of(entry.name, group)
        own &= ~np.isin(older["row"], before)
        if own.any():
            merged = changed[entry.name, group] = np.union1d(before, older["row"][own])
            groups[group] = groups[group]._replace(dropped=len(merged))
            is_new |= own
    older = older[is_new]
    gone.update(digest.tobytes() for digest in older["digest"])
    lost = captions_cut(entry, older)
    return dataclasses.replace(
        entry,
        groups=groups,
        cut={name: count - lost[name] for name, count in entry.cut.items()},
        record_bytes=entry.record_bytes - int(older["record_bytes"].sum(dtype=np.int64)),
    )


def publish_shards(store: Path, manifest: Manifest, shards: Sequence[ShardEntry], generation: int) -> Manifest:
    """Publish `manifest` as `generation`, with `shards`; shards that it no longer lists become retired."""
    names = {shard.name for shard in shards}
    retired = tuple(sorted(name for name in manifest.known_shards - names if _has_files(store, name)))
    return write_manifest(store, dataclasses.replace(manifest, generation=generation, shards=tuple(shards), retired=retired))


def _has_files(store: Path, name: str) -> bool:
    """Return whether any file of a shard exists: its sidecar may outlive the shard's own file and keep it retired."""
    paths = shard_paths(store, name)
    return any(path.exists() for path in (paths.lmdb, paths.meta))


def next_generation(store: Path, manifest: Manifest) -> int:
    """Return an unused generation number, even if an older manifest was restored."""
    return 1 + max([manifest.generation, *generations(store)])


class StoreTarget(Protocol):
    """A store that is written, on a disk or in object storage. Can be pickled."""

    path: Path  # of the folder, laid out as a store, in which shards are made: on a disk the store's own

    @property
    def folder(self) -> Folder:
        """The store's folder, where readers find it."""
        ...

    def held(self) -> AbstractContextManager[None]:
        """Prepare to write, for this process only. Enter it before `newest`."""
        ...

    def newest(self) -> Manifest | None:
        """Return the newest generation; None if there is no store yet."""
        ...

    def writing(self, schema: Schema) -> AbstractContextManager[Manifest]:
        """Lock the store, creating it if needed, and yield its newest generation after adopting what a killed writer left."""
        ...

    def open(self, manifest: Manifest) -> Store: ...

    def publish(
        self,
        manifest: Manifest,
        sealed: Iterable[str],
        dropped: Iterable[bytes] = (),
        rules: dict[str, Json] | None = None,
        taken_back: Collection[str] = (),
    ) -> Manifest:
        """Publish sealed shards that are not listed yet; see `with_shards`. `manifest` is the newest generation known here."""
        ...

    def send_lists(self) -> None:
        """Let what the packer notes next to a store be found where the store is."""
        ...

    def disk_bytes(self, manifest: Manifest) -> int:
        """Return the size of the store's files."""
        ...


class LocalTarget:
    """A store on a disk; see `StoreTarget`. Outside of `writing`, `publish` locks the store for as long as it takes."""

    def __init__(self, path: Path, *, waits: bool = False) -> None:
        """Touch nothing yet. `waits`: `writing` waits for other writers, as a commit does; otherwise it refuses at once."""
        self.path, self._waits = path, waits
        self._is_locked = False

    @property
    def folder(self) -> Folder:
        return LocalFolder(self.path)

    def held(self) -> AbstractContextManager[None]:
        """Do nothing: `writing` locks the store."""
        return nullcontext()

    def newest(self) -> Manifest | None:
        return newest_manifest(self.path)

    @contextmanager
    def writing(self, schema: Schema) -> Iterator[Manifest]:
        store = self.path
        stored_manifest(store, schema)  # before the folder is touched
        prepare_store(store)
        with lock_store(store, wait_s=WAIT_S if self._waits else 0.0):
            manifest = stored_manifest(store, schema)  # read again under the lock
            if manifest is None or not is_published(store, manifest):  # new, or a crash between two writes
                manifest = write_manifest(store, manifest or new_manifest(schema))
            manifest = publish(store, manifest, adopt(store, manifest), ())
            self._is_locked = True
            try:
                yield manifest
            finally:
                self._is_locked = False

    def open(self, manifest: Manifest) -> Store:
        return Store(self.path, manifest)

    def publish(
        self,
        manifest: Manifest,
        sealed: Iterable[str],
        dropped: Iterable[bytes] = (),
        rules: dict[str, Json] | None = None,
        taken_back: Collection[str] = (),
    ) -> Manifest:
        with nullcontext(manifest) if self._is_locked else changing(self.path, adopting=False) as newest:
            if newest.store_id != manifest.store_id:
                raise StoreError(
                    f"{self.path} is another store than when this run began: its id is {newest.store_id}, expected "
                    f"{manifest.store_id}; nothing was published: rerun the command"
                )
            new = set(sealed) - newest.known_shards  # another writer may have adopted some, and compacted them since
            return publish(self.path, newest, new, dropped, rules, taken_back)

    def send_lists(self) -> None:
        """Do nothing: they are in the store's folder."""

    def disk_bytes(self, manifest: Manifest) -> int:  # noqa: ARG002 - as of `StoreTarget`
        return disk_bytes(self.path)


def stored_manifest(store: Path, schema: Schema) -> Manifest | None:
    """Return the newest generation of the store that is to be continued; None if there is no store yet."""
    if store.exists() and not store.is_dir():
        raise StoreError(f"{store} is a file; expected a store's folder, or a path where there is nothing")
    if store.is_dir() and not (store / MANIFEST).exists():
        strange = sorted(path.name for path in store.iterdir() if path.name not in FOLDERS and path.suffix != ".tmp")
        if strange and newest_intact(store) is None:
            raise StoreError(
                f"{store} is not a store and not empty (it has {strange[0]!r}); choose a path where there is nothing"
            )
    manifest = newest_manifest(store)
    if manifest is not None:
        check_fingerprint(manifest, schema)
    return manifest
