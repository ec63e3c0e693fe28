"""Repair a store: sidecars are made again, and shards that do not check are compacted without the rows that do not.

What cannot be read any more is dropped: a row, the rows that use a damaged caption, or a shard of which too much is lost.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import CorruptError, StoreError
from bucketline.files.atomic_write import refuse_too_little_disk, write_or_explain
from bucketline.store.change.commit import commit_change, on_this_disk
from bucketline.store.change.compact import OVERHEAD, live_bytes
from bucketline.store.change.copy_rows import LeftOut, RowCopier, tried
from bucketline.store.format.block import EntriesOf, bytes_digest, caption_digest, file_digest
from bucketline.store.format.manifest import FileEntry, ShardEntry, shard_paths
from bucketline.store.format.text import EMPTY_CAPTION_ROW
from bucketline.store.read.files import files_of, files_of_column
from bucketline.store.read.samples import live_positions
from bucketline.store.read.store import Store
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.shard.meta import read_meta
from bucketline.store.verify.shard import ColumnCheck, ShardCheck
from bucketline.store.verify.verify import verify_folder
from bucketline.store.write.publish import remove_interrupted_copies
from bucketline.store.write.seal import rebuilt_meta

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.text import Entry, RaggedSpec
    from bucketline.store.write.publish import ChangeBase

MIN_SHARD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedShard:
    """The repair of a damaged shard."""

    shard: str
    restored: tuple[str, ...]  # rebuilt sidecars, under shards/
    written: tuple[str, ...]  # the new shard with its readable rows
    is_replaced: bool  # whether it leaves the store: readable rows move to `written`, the others are dropped
    kept: int  # number of samples
    dropped: int  # number of samples
    dropped_ids: tuple[str, ...]  # of samples with readable records
    lost_columns: tuple[str, ...]  # added columns that its rows lack now


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """Result of a repair."""

    generation: int  # newest generation afterwards
    samples: int  # live samples afterwards
    dropped: int
    shards: tuple[RepairedShard, ...]  # damaged shards


class DamagedStore(Store):
    """A store with a damaged shard, which is read as far as possible."""

    def __init__(self, path: Path, manifest: Manifest, damaged: int) -> None:
        super().__init__(path, manifest)
        self.shards[damaged].takes_any_length = True

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
    place: Path | ObjectFolder,
    *,
    threads: int | None = None,
    on_bytes: Callable[[int], None] = lambda done: None,  # noqa: ARG005
) -> Repaired:
    """Read all shards and publish a generation of the readable samples, unless all are readable.

    `on_bytes` and `threads` as in `verify_folder`. Of a store in object storage, the damaged shards are got first.
    """
    found: list[RepairedShard] = []

    def repaired(base: ChangeBase) -> Manifest:
        found.clear()
        if isinstance(place, Path):
            remove_interrupted_copies(place, base.manifest)
        faults = verify_folder(base.folder, on_bytes, threads, base.manifest, shards_only=True).corrupt
        damaged, shards = {fault.shard for fault in faults}, list[ShardEntry]()
        with on_this_disk(base, [one for one in base.manifest.shards if one.name in damaged], damaged=True) as path:
            for ordinal, entry in enumerate(base.manifest.shards):
                own: tuple[ShardEntry, ...] = (entry,)
                if entry.name in damaged:
                    own, report = _repaired(base, path, ordinal)
                    found.append(report)
                shards += own
        if tuple(shards) == base.manifest.shards:
            return base.manifest
        return replace(base.manifest, shards=tuple(shards), dropped=base.list_dropped(shards))

    _, after = commit_change(place, repaired, adopting=False)
    dropped = sum(shard.dropped for shard in found)
    return Repaired(generation=after.generation, samples=after.samples, dropped=dropped, shards=tuple(found))


def _repaired(base: ChangeBase, path: Path, ordinal: int) -> tuple[tuple[ShardEntry, ...], RepairedShard]:
    """Return the shards that take the place of a damaged one, and the report."""
    entry = base.manifest.shards[ordinal]
    bad = {file for file, expected in files_of(path, replace(entry, added={})) if not _is_as_written(file, expected)}
    entry, restored = _with_sidecar(base, path, entry, bad)
    manifest, lmdb = _with_shard(base.manifest, ordinal, entry), shard_paths(path, entry.name).lmdb
    lost = tuple(column for column in sorted(entry.added) if _is_damaged(Store(path, manifest), entry, column))
    entry = replace(entry, added={name: own for name, own in entry.added.items() if name not in lost})
    manifest = _with_shard(manifest, ordinal, entry)
    new: tuple[ShardEntry, ...] = (entry,)
    left_out, is_replaced = LeftOut(), bool(bad) or _has_faults(Store(path, manifest), entry)
    if is_replaced:
        restored, store = (), DamagedStore(path, manifest, ordinal)
        is_listed = all(not isinstance(tried(store.dropped.of, entry.name, group), StoreError) for group in entry.live)
        if bad <= {lmdb} and lmdb.exists() and is_listed:  # rows are located by the sidecar
            size = max(MIN_SHARD_BYTES, int(live_bytes(manifest, entry) * OVERHEAD))
            refuse_too_little_disk(base.made, 2 * size, f"repairing {base.folder.place('')}")  # twice while it is sealed
            with RowCopier(store, manifest.generation + 1, path=base.made) as copier:
                names = copier.copy(range(ordinal, ordinal + 1), 2 * size, left_out)
            new = tuple(read_meta(base.made, name, with_columns=True).entry for name in names)
        else:
            left_out, new = LeftOut(entry.live_samples, store.readable_ids(ordinal)), ()
    return new, RepairedShard(
        shard=entry.name,
        restored=restored,
        written=tuple(one.name for one in new) if is_replaced else (),
        is_replaced=is_replaced,
        kept=entry.live_samples - left_out.rows,
        dropped=left_out.rows,
        dropped_ids=tuple(left_out.ids),
        lost_columns=lost,
    )


def _with_shard(manifest: Manifest, ordinal: int, entry: ShardEntry) -> Manifest:
    return replace(manifest, shards=(*manifest.shards[:ordinal], entry, *manifest.shards[ordinal + 1 :]))


def _with_sidecar(base: ChangeBase, path: Path, entry: ShardEntry, bad: set[Path]) -> tuple[ShardEntry, tuple[str, ...]]:
    """Make a shard's sidecar again if it is damaged or says otherwise, and the shard's own file is intact.

    Return its entry with it, and its name; what was written is no longer in `bad`.
    """
    paths = shard_paths(path, entry.name)
    if paths.lmdb in bad:
        return entry, ()
    try:
        data = rebuilt_meta(paths.lmdb)
    except CorruptError:
        return entry, ()
    own = FileEntry(num_bytes=len(data), digest=bytes_digest(data))
    if paths.meta not in bad and own == entry.meta:
        return entry, ()
    write_or_explain(paths.meta, data)
    if isinstance(base.folder, ObjectFolder):
        base.folder.write(f"shards/{paths.meta.name}", data)
    bad.discard(paths.meta)
    return replace(entry, meta=own), (paths.meta.name,)


def _has_faults(store: Store, entry: ShardEntry) -> bool:
    check = ShardCheck(store, entry, lambda _: None)
    check.run()
    return bool(check.faults)


def _is_damaged(store: Store, entry: ShardEntry, column: str) -> bool:
    if not all(_is_as_written(file, expected) for file, expected in files_of_column(store.path, entry, column)):
        return True
    check = ColumnCheck(store, entry, column, lambda _: None)
    check.run()
    return bool(check.faults)


def _is_as_written(path: Path, expected: FileEntry) -> bool:
    """Return whether a file is intact; missing files and read errors of the medium count as damaged."""
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
