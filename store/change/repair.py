"""Repair a store: keep every sample that can be read and verified, drop the rest; the next pack encodes those again.

A sidecar is rebuilt from its shard's file if that is intact. The readable rows of any other damaged shard are copied to a new
one in its place, as in `compact`. One generation is published at the end. An interrupted repair leaves the store unchanged, and
the next run removes its copies. Damaged files stay until garbage collection.
"""

from __future__ import annotations

import dataclasses
import errno
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.files.atomic_write import write_or_explain
from bucketline.files.disk_space import refuse_too_little_disk
from bucketline.store.change.compact import OVERHEAD, live_bytes
from bucketline.store.change.copy_rows import LeftOut, RowCopier, tried
from bucketline.store.format.columns import EntriesOf
from bucketline.store.format.hashing import bytes_digest, caption_digest, file_digest
from bucketline.store.format.layout import shard_paths
from bucketline.store.format.manifest import generations, read_manifest
from bucketline.store.format.manifest_entries import FileEntry
from bucketline.store.format.text_block import EMPTY_CAPTION_ROW
from bucketline.store.read.iter_samples import live_positions
from bucketline.store.read.lost_files import files_of, files_of_column
from bucketline.store.read.store import Store
from bucketline.store.shard.reader import INDEX_FORMAT, SealedShard
from bucketline.store.shard.row_locator import EXTENTS_FORMAT
from bucketline.store.shard.sidecar import PagedFile
from bucketline.store.verify.column import ColumnCheck
from bucketline.store.verify.description import sidecar_differences
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
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.manifest_entries import DroppedEntry, ShardEntry
    from bucketline.store.format.text_block import Entry, RaggedSpec

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
    lost_columns: tuple[str, ...]  # added columns with damaged files, which its rows lose
    rebuilt: dict[Path, bytes] = field(default_factory=dict)
    left_out: LeftOut | None = None  # None if rebuilding the sidecars is enough
    written: tuple[ShardEntry, ...] = ()  # the shards that its rows were copied to


class DamagedStore(Store):
    """A store whose damaged shards are read as far as possible."""

    def __init__(self, path: Path, manifest: Manifest, damaged: Iterable[int]) -> None:
        super().__init__(path, manifest)
        for ordinal in damaged:
            self.shards[ordinal].takes_any_length = True

    def entry(self, spec: RaggedSpec, shard: int, row: int) -> Entry:
        """Return an entry. The empty caption's, which every shard has, come from any shard where they are readable."""
        if row != EMPTY_CAPTION_ROW or spec.of is EntriesOf.ROWS:
            return super().entry(spec, shard, row)
        for ordinal in (shard, *(n for n in range(len(self.shards)) if n != shard)):
            found = tried(super().entry, spec, ordinal, row)
            if not isinstance(found, StoreError) and found.digest == caption_digest(""):
                return found
        raise CorruptError(f"{self.path}: no shard has a readable empty caption")

    def readable_ids(self, ordinal: int) -> list[str]:
        """Return the ids of a shard's live samples whose records can be read."""
        shard, found = self.shards[ordinal], list[str]()
        if isinstance(tried(shard.read, 0, 1), StoreError):
            return found
        for group in shard.entry.live:
            positions = tried(live_positions, shard, group)
            if not isinstance(positions, StoreError):
                records = (tried(lambda at: shard.record(shard.index_entry(at)), at) for at in positions.tolist())
                found += [record.id for record in records if not isinstance(record, StoreError)]
        return found


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
        return _report(manifest, _examined(path, manifest, threads, on_bytes, writes=False), manifest)
    with changing(path, adopting=False) as manifest:
        remove_interrupted_copies(path, manifest)
        found, after = _examined(path, manifest, threads, on_bytes, writes=True), manifest
        shards = [*manifest.shards]
        for one in reversed(found):
            shards[one.ordinal : one.ordinal + 1] = [one.entry] if one.left_out is None else one.written
        if tuple(shards) != manifest.shards:
            after = publish_shards(path, manifest, shards, next_generation(path, manifest))
    return _report(manifest, found, after)


def _examined(
    path: Path, manifest: Manifest, threads: int | None, on_bytes: Callable[[int], None], *, writes: bool
) -> list[_Damaged]:
    """Return the repair of each shard that has a fault. With `writes`, write the rebuilt sidecars and the copies of rows."""
    store = Store(path, manifest)
    names = {fault.shard for fault in verify(store, on_bytes, threads, shards_only=True).corrupt}
    found = [_damaged(store, n) for n, entry in enumerate(manifest.shards) if entry.name in names]
    rebuilt = {file: data for one in found for file, data in one.rebuilt.items()}
    for one in found:  # uses the indexes of newer shards too
        _rebuild_dropped(path, manifest, one, rebuilt)
    to_copy = []
    for one in found:
        for file, data in one.rebuilt.items() if writes else ():
            write_or_explain(file, data)
        left = one.bad - one.rebuilt.keys()
        is_doubtful = writes or not one.bad  # unwritten sidecars are taken to be enough
        if left or (is_doubtful and _has_faults(path, manifest, one)):
            one.left_out, lmdb = LeftOut(), shard_paths(path, one.entry.name).lmdb
            if (left if writes else one.bad) <= {lmdb} and lmdb.exists():  # rows are located by the sidecars
                to_copy.append(one)
            else:
                one.left_out = LeftOut(
                    one.entry.live_samples, DamagedStore(path, manifest, [one.ordinal]).readable_ids(one.ordinal)
                )
    if to_copy:
        _copy(path, manifest, found, to_copy, writes=writes)
    return found


def _damaged(store: Store, ordinal: int) -> _Damaged:
    """Return which files of a shard with a fault are damaged, with its sidecars made again if its own file is intact."""
    entry = store.manifest.shards[ordinal]
    lost = tuple(column for column in sorted(entry.added) if _is_damaged(store, entry, column))
    entry = dataclasses.replace(entry, added={name: own for name, own in entry.added.items() if name not in lost})
    bad = {file for file, expected in files_of(store.path, entry) if not _is_as_written(file, expected)}
    one, paths = _Damaged(ordinal=ordinal, entry=entry, bad=bad, lost_columns=lost), shard_paths(store.path, entry.name)
    if paths.lmdb not in bad:
        with suppress(CorruptError):
            extents, index = rebuilt_sidecars(paths.lmdb)
            if paths.extents in bad or not _says_the_same(paths.extents, extents, EXTENTS_FORMAT):
                one.rebuilt[paths.extents] = extents
                one.entry = dataclasses.replace(one.entry, extents=_entry_of(extents))
            if paths.index in bad or not _says_the_same(paths.index, index, INDEX_FORMAT):
                one.rebuilt[paths.index] = index
                one.entry = dataclasses.replace(one.entry, index=_entry_of(index))
    one.bad |= one.rebuilt.keys()
    return one


def _says_the_same(path: Path, rebuilt: bytes, kind: str) -> bool:
    """Return whether an intact sidecar is as one that was made again."""
    try:
        found = PagedFile(path, path.stat().st_size, kind)
        return not any(sidecar_differences(found, PagedFile.over(path, memoryview(rebuilt), kind)))
    except CorruptError:
        return False


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
    if rows and bytes_digest(data := encode_dropped(arrays, one.entry.shard_id)) == dropped.digest:
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


def _copy(path: Path, manifest: Manifest, found: list[_Damaged], to_copy: list[_Damaged], *, writes: bool) -> None:
    """Copy the rows of shards that check, or with `writes` false only check them."""
    for one in found:
        manifest = _with_entry(manifest, one)
    sizes = [max(MIN_SHARD_BYTES, int(live_bytes(manifest, one.entry) * OVERHEAD)) for one in to_copy]
    if writes:  # the largest is stored twice while it is sealed
        refuse_too_little_disk(path, sum(sizes) + max(sizes), f"repairing {path}")
    store = DamagedStore(path, manifest, [one.ordinal for one in to_copy])
    with RowCopier(store, next_generation(path, manifest), writes=writes) as copier:
        for one, size in zip(to_copy, sizes, strict=True):
            names = copier.copy(range(one.ordinal, one.ordinal + 1), (), 2 * size, one.left_out)
            one.written = tuple(describe_shard(path, name, manifest)[0] for name in names)


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


def _report(manifest: Manifest, found: list[_Damaged], after: Manifest) -> Repaired:
    shards = tuple(_report_shard(one) for one in found)
    dropped = sum(shard.dropped for shard in shards)
    return Repaired(generation=after.generation, samples=manifest.samples - dropped, dropped=dropped, shards=shards)


def _report_shard(one: _Damaged) -> RepairedShard:
    left_out = one.left_out or LeftOut()
    return RepairedShard(
        shard=one.entry.name,
        restored=tuple(sorted(file.name for file in one.rebuilt)) if one.left_out is None else (),
        written=tuple(entry.name for entry in one.written),
        is_replaced=one.left_out is not None,
        kept=one.entry.live_samples - left_out.rows,
        dropped=left_out.rows,
        dropped_ids=tuple(left_out.ids),
        lost_columns=one.lost_columns,
    )
