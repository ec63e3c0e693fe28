"""Repair a store: keep every sample that can be read and verified, drop the rest; the next pack encodes those again.

A sidecar is rebuilt from its shard's file if that is intact. The readable rows of any other damaged shard are copied to a new
one in its place, as in `compact`. One generation is published at the end. An interrupted repair leaves the store unchanged, and
the next run removes its copies. Damaged files stay until garbage collection.
"""

from __future__ import annotations

import dataclasses
import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.files.atomic_write import write_or_explain
from bucketline.files.disk_space import refuse_too_little_disk
from bucketline.store.change.compact import OVERHEAD, live_bytes
from bucketline.store.change.copy_rows import RowCopier
from bucketline.store.change.readable_rows import DamagedStore, Survey, all_lost, surveyed
from bucketline.store.format.hashing import bytes_digest, file_digest
from bucketline.store.format.layout import IN_FILE, shard_paths
from bucketline.store.format.manifest import generations, read_manifest
from bucketline.store.format.manifest_entries import FileEntry
from bucketline.store.read.lost_files import files_of, files_of_column
from bucketline.store.read.store import Store
from bucketline.store.shard.reader import INDEX_FORMAT, SealedShard
from bucketline.store.shard.row_locator import EXTENTS_FORMAT
from bucketline.store.shard.sidecar import PAGE_CHECKSUM, PagedFile
from bucketline.store.verify.column import ColumnCheck
from bucketline.store.verify.shard import ShardCheck
from bucketline.store.verify.verify import verify
from bucketline.store.write.describe import describe_shard
from bucketline.store.write.publish import (
    changing,
    encode_dropped,
    next_generation,
    publish_shards,
    remove_interrupted_copies,
)
from bucketline.store.write.seal import rebuilt_sidecars

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.manifest_entries import DroppedEntry, ShardEntry

MIN_SHARD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedShard:
    """Repair of one damaged shard, done or planned."""

    shard: str
    restored: tuple[str, ...]  # rebuilt sidecars, under shards/
    written: tuple[str, ...]  # the new shard with its readable rows; empty in a dry run
    is_replaced: bool  # whether it leaves the store: readable rows move to `written`, the others are dropped
    kept: int  # number of samples
    dropped: int  # number of samples
    dropped_ids: tuple[str, ...]  # of samples with readable records
    lost_columns: tuple[str, ...] = ()  # added columns that its rows lack now


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """Result of a repair or of its dry run."""

    generation: int  # newest generation afterwards
    samples: int  # live samples afterwards
    dropped: int
    shards: tuple[RepairedShard, ...]  # damaged shards


@dataclass(slots=True, kw_only=True)
class _Damaged:
    """A damaged shard and its planned repair."""

    ordinal: int
    entry: ShardEntry  # with entries of the rebuilt sidecars
    bad: set[Path]  # its damaged files
    rebuilt: dict[Path, bytes]
    survey: Survey | None  # None if rebuilding the sidecars is enough
    lost_columns: tuple[str, ...]  # added columns with damaged files, which its rows lose


def repair(
    path: Path,
    *,
    threads: int | None = None,
    dry_run: bool = False,
    on_bytes: Callable[[int], None] = lambda done: None,  # noqa: ARG005
) -> Repaired:
    """Read all shards and publish a generation of the readable samples, unless all are readable.

    `on_bytes` and `threads` as in `verify`.

    Raises:
        StoreError: if there is no store, its manifest is damaged, a file cannot be read for a reason unrelated to its bytes
            (missing permission, a link to an absent disk), or the store is not writable.
        LockedError: if another process changes the store.
    """
    if dry_run:
        manifest = read_manifest(path)
        return _report(manifest, _examined(path, manifest, _faulty(path, manifest, threads, on_bytes)), {}, manifest)
    with changing(path, adopting=False) as manifest:
        remove_interrupted_copies(path, manifest)
        found = _examined(path, manifest, _faulty(path, manifest, threads, on_bytes), writes=True)
        after, written = manifest, _copied(path, manifest, found)
        shards = [*manifest.shards]
        for one in reversed(found):
            shards[one.ordinal : one.ordinal + 1] = [one.entry] if one.survey is None else written.get(one.ordinal, ())
        if tuple(shards) != manifest.shards:
            after = publish_shards(path, manifest, shards, next_generation(path, manifest))
    return _report(manifest, found, written, after)


def _faulty(path: Path, manifest: Manifest, threads: int | None, on_bytes: Callable[[int], None]) -> list[int]:
    """Return the ordinals of the shards that have a fault."""
    names = {fault.shard for fault in verify(Store(path, manifest), on_bytes, threads, shards_only=True).corrupt}
    return [n for n, entry in enumerate(manifest.shards) if entry.name in names]


def _examined(path: Path, manifest: Manifest, ordinals: list[int], *, writes: bool = False) -> list[_Damaged]:
    """Return the planned repair of each shard. With `writes`, write the rebuilt sidecars, which is harmless."""
    found = []
    for ordinal in ordinals:
        entry = manifest.shards[ordinal]
        lost = tuple(column for column in sorted(entry.added) if _is_damaged(Store(path, manifest), entry, column))
        entry = dataclasses.replace(entry, added={name: own for name, own in entry.added.items() if name not in lost})
        bad = {file for file, expected in files_of(path, entry) if not _is_as_written(file, expected)}
        bad |= _wrong_sidecars(path, entry, bad, is_explained=bool(bad or lost))
        found.append(_Damaged(ordinal=ordinal, entry=entry, bad=bad, rebuilt={}, survey=None, lost_columns=lost))
    for one in found:
        _rebuild_sidecars(path, one)
    for one in found:  # uses the indexes of newer shards too
        _rebuild_dropped(path, manifest, one, {file: data for other in found for file, data in other.rebuilt.items()})
    for one in found:
        if writes:
            for file, data in one.rebuilt.items():
                write_or_explain(file, data)
        left = one.bad - one.rebuilt.keys()
        if one.lost_columns and not one.bad and not _has_faults(path, manifest, one):
            continue
        if not one.bad or left or (writes and _has_faults(path, manifest, one)):
            one.survey = _survey(path, manifest, one, left if writes else one.bad)
    return found


def _wrong_sidecars(path: Path, entry: ShardEntry, bad: set[Path], *, is_explained: bool) -> set[Path]:
    """Return a shard's sidecars that are as the manifest lists them, but not what its file says.

    Without an explanation of the shard's faults, all its files are intact: then the sidecars are compared with rebuilt ones.
    """
    paths = shard_paths(path, entry.name)
    if paths.extents in bad:
        return set()
    found = PagedFile(paths.extents, entry.extents.num_bytes, EXTENTS_FORMAT).metadata.get("places")
    if found != IN_FILE:
        return {paths.extents, paths.index}
    if is_explained:
        return set()
    try:
        rebuilt = zip((EXTENTS_FORMAT, INDEX_FORMAT), (paths.extents, paths.index), rebuilt_sidecars(paths.lmdb), strict=True)
        return {file for kind, file, data in rebuilt if not _says_the_same(file, data, kind)}
    except CorruptError:
        return set()


def _says_the_same(path: Path, rebuilt: bytes, kind: str) -> bool:
    """Return whether all that a sidecar says is in the rebuilt one; those of older versions lack the checksums of lines."""
    old = PagedFile(path, path.stat().st_size, kind)
    new = PagedFile.over(path, memoryview(rebuilt), kind)
    if any(new.metadata.get(key) != value for key, value in old.metadata.items()):
        return False
    names = [name for name in old.names if name != PAGE_CHECKSUM]
    return all(new.has(name) and np.array_equal(old.column(name), new.column(name)) for name in names)


def _rebuild_sidecars(path: Path, one: _Damaged) -> None:
    """Rebuild a shard's damaged extents and index, if the shard's file is intact."""
    paths = shard_paths(path, one.entry.name)
    if not {paths.extents, paths.index} & one.bad or paths.lmdb in one.bad:
        return
    try:
        extents, index = rebuilt_sidecars(paths.lmdb)
    except CorruptError:
        return
    if paths.extents in one.bad:
        one.rebuilt[paths.extents] = extents
        one.entry = dataclasses.replace(one.entry, extents=_entry_of(extents), line_checksums=True)
    if paths.index in one.bad:
        one.rebuilt[paths.index] = index
        one.entry = dataclasses.replace(one.entry, index=_entry_of(index))


def _rebuild_dropped(path: Path, manifest: Manifest, one: _Damaged, rebuilt: dict[Path, bytes]) -> None:
    """Rebuild a shard's lost list of dropped rows, unless the result's digest differs from the lost list's.

    The rows are those of an older generation's list and those that newer shards replace. `rebuilt` has sidecars that are not
    written yet.
    """
    dropped = one.entry.dropped
    if dropped is None or shard_paths(path, one.entry.name).dropped(dropped.generation) not in one.bad:
        return
    shard = _with_index(path, one.entry, rebuilt)
    try:
        rows = _older_list(path, one.entry)
        for newer in manifest.shards[one.ordinal + 1 :]:
            positions = shard.positions(_with_index(path, newer, rebuilt).keys())
            for found in shard.index_entries(positions[positions >= 0]):
                rows.setdefault(found.bucket, set()).add(found.row)
    except StoreError:
        return
    arrays = {group: np.array(sorted(own), dtype="<u4") for group, own in rows.items()}
    for shard_id in (one.entry.shard_id, None) if rows else ():
        data = encode_dropped(arrays, shard_id)
        if bytes_digest(data) == dropped.digest:
            one.rebuilt[shard.paths.dropped(dropped.generation)] = data


def _with_index(path: Path, entry: ShardEntry, rebuilt: dict[Path, bytes]) -> SealedShard:
    """Return a shard whose index may not be written yet."""
    shard = SealedShard(path, entry)
    if shard.paths.index in rebuilt:
        shard.index = PagedFile.over(shard.paths.index, memoryview(rebuilt[shard.paths.index]), INDEX_FORMAT)
    return shard


def _with_entry(manifest: Manifest, one: _Damaged) -> Manifest:
    shards = [*manifest.shards]
    shards[one.ordinal] = one.entry
    return dataclasses.replace(manifest, shards=tuple(shards))


def _has_faults(path: Path, manifest: Manifest, one: _Damaged) -> bool:
    check = ShardCheck(Store(path, _with_entry(manifest, one)), one.entry, lambda _: None)
    check.run()
    return bool(check.faults)


def _survey(path: Path, manifest: Manifest, one: _Damaged, bad: set[Path]) -> Survey:
    """Return what is readable of a shard whose files `bad` are damaged."""
    lmdb = shard_paths(path, one.entry.name).lmdb
    store = DamagedStore(path, _with_entry(manifest, one), [one.entry.name])
    has_sidecars = bad <= {lmdb}
    if lmdb in bad and not (has_sidecars and lmdb.exists()):
        return Survey(unnamed=one.entry.live_samples)
    if has_sidecars:
        try:
            return surveyed(store, one.ordinal)
        except CorruptError:  # the sidecars are intact but contradict each other
            pass
    return all_lost(store, one.ordinal)


def _copied(path: Path, manifest: Manifest, found: list[_Damaged]) -> dict[int, tuple[ShardEntry, ...]]:
    """Copy the readable rows of shards to new ones. Return their entries by the damaged shard's ordinal."""
    to_copy = {one.ordinal: one.survey for one in found if one.survey is not None and one.survey.readable}
    if not to_copy:
        return {}
    for one in found:
        manifest = _with_entry(manifest, one)
    sizes = {n: max(MIN_SHARD_BYTES, int(live_bytes(manifest, manifest.shards[n]) * OVERHEAD)) for n in to_copy}
    needed = sum(sizes.values()) + max(sizes.values())  # the largest is stored twice while it is sealed
    refuse_too_little_disk(path, needed, f"repairing {path}")
    store = DamagedStore(path, manifest, [manifest.shards[n].name for n in to_copy])
    for n, survey in to_copy.items():
        store.damaged[n].lost = survey.lost
    entries = {}
    with RowCopier(store, next_generation(path, manifest)) as copier:
        for n, survey in to_copy.items():
            names = copier.copy(range(n, n + 1), (), 2 * sizes[n])
            entries[n] = tuple(describe_shard(path, name, manifest)[0] for name in names)
            if sum(entry.samples for entry in entries[n]) != survey.readable:
                raise AssertionError(f"{survey.readable} rows were readable, the copies have {entries[n]}")
    return entries


def _older_list(path: Path, entry: ShardEntry) -> dict[str, set[int]]:
    """Return a shard's dropped rows from the newest generation that has another, readable list of it."""
    for number in reversed(generations(path)):
        try:
            same = [one for one in read_manifest(path, number).shards if one.name == entry.name]
        except StoreError:
            continue
        for older in same:
            dropped = older.dropped
            if dropped is None or dropped == entry.dropped:
                continue
            if _is_as_written(shard_paths(path, entry.name).dropped(dropped.generation), dropped):
                shard = SealedShard(path, older)
                return {group: set(shard.dropped_rows(group).tolist()) for group in older.groups if older.groups[group].dropped}
    return {}


def _is_damaged(store: Store, entry: ShardEntry, column: str) -> bool:
    """Return whether an added column of a shard's rows has a fault."""
    for file, expected in files_of_column(store.path, entry, column):
        if not _is_as_written(file, expected):
            return True
    check = ColumnCheck(store, entry, column, lambda _: None)
    check.run()
    return bool(check.faults)


def _entry_of(data: bytes) -> FileEntry:
    return FileEntry(num_bytes=len(data), digest=bytes_digest(data))


def _is_as_written(path: Path, expected: FileEntry | DroppedEntry) -> bool:
    """Return whether a file is intact; missing files and read errors of the medium count as damaged.

    Raises:
        StoreError: if it cannot be read for another reason: its bytes may be intact.
    """
    try:
        return file_digest(path) == (expected.num_bytes, expected.digest)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            links = [str(link) for link in (path, path.parent) if link.is_symlink()]
            if not links:
                return False
            reason = f"{links[0]} is a dangling link"
        elif error.errno == errno.EIO:
            return False
        else:
            reason = str(error.strerror)
        raise StoreError(
            f"{path} cannot be read: {reason}; fix this and rerun the command, or remove the file if it is lost"
        ) from error


def _report(manifest: Manifest, found: list[_Damaged], written: dict[int, tuple[ShardEntry, ...]], after: Manifest) -> Repaired:
    shards = tuple(_report_shard(one, written.get(one.ordinal, ())) for one in found)
    dropped = sum(shard.dropped for shard in shards)
    return Repaired(generation=after.generation, samples=manifest.samples - dropped, dropped=dropped, shards=shards)


def _report_shard(one: _Damaged, written: tuple[ShardEntry, ...]) -> RepairedShard:
    survey, live = one.survey, one.entry.live_samples
    kept = live if survey is None else survey.readable
    return RepairedShard(
        shard=one.entry.name,
        restored=tuple(sorted(file.name for file in one.rebuilt)) if survey is None else (),
        written=tuple(entry.name for entry in written),
        is_replaced=survey is not None,
        kept=kept,
        dropped=live - kept,
        dropped_ids=() if survey is None else tuple(survey.ids),
        lost_columns=one.lost_columns,
    )
