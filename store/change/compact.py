"""Compact a store's shards, and collect the files that no generation needs.

Live rows keep their order: row n of a bucket is the same sample before and after, so plans stay valid.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import LockedError, StoreError, UsageError
from bucketline.files.atomic_write import FileLock, refuse_too_little_disk
from bucketline.store.change.commit import commit_change, newest_base, on_this_disk
from bucketline.store.change.copy_rows import RowCopier
from bucketline.store.folder import as_folder, folder_time
from bucketline.store.format.manifest import COPY_PREFIX, DROPPED_SUFFIX, MANIFEST, SHARD_ID, SHARD_NAME, dump_manifest
from bucketline.store.read.files import all_files, files_of
from bucketline.store.read.store import Store
from bucketline.store.remote.generations import (
    complete_first,
    generation_name,
    listed_generations,
    newest_after,
    newest_generation,
    read_generation,
)
from bucketline.store.shard.meta import read_meta
from bucketline.store.shard.sidecar import dropped_counts
from bucketline.store.transfer import FRESH_S, pending_shards
from bucketline.store.write.column import ADDING_LOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    from bucketline.store.folder import Folder, ListedFile
    from bucketline.store.format.manifest import Manifest, ShardEntry
    from bucketline.store.remote.objects import ObjectFolder
    from bucketline.store.write.publish import ChangeBase

    _New: TypeAlias = list[tuple[ShardEntry, ...]]


# ------------------------------------------------------------------------------------------------------------- garbage collect
# Garbage collection: remove old generations, and the files that only they list, on a disk and in object storage.
#
# The order makes every crash harmless: shards' own files go first, their indexes last of theirs, then the generations'
# manifests. What is left in between is known to be retired and is never adopted.

UNLISTED_S = 2 * FRESH_S  # an object that no generation lists is left alone for this time
_FILE = re.compile(rf"shards/({SHARD_NAME.pattern})\.(({SHARD_ID.pattern})\.)?(lmdb|meta)")
_LIST = re.compile(rf"generations/[0-9]+-{SHARD_ID.pattern}\{DROPPED_SUFFIX}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Result of a garbage collection or of its dry run."""

    generations: tuple[int, ...]
    files: tuple[str, ...]  # names under shards/, and of lists of dropped rows
    disk_bytes: int  # of all removed files
    waiting: tuple[int, ...]  # generations superseded too recently; kept, with all files that only they list


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlisted:
    """A file of a shard, or of an added column, or a list of dropped rows, that no kept generation lists."""

    file: ListedFile
    shard: str  # "" of a list of dropped rows
    is_of_column: bool
    is_live: bool  # a kept generation lists the shard
    is_retired: bool  # a generation that is removed lists the file, or one has retired the shard


def collect(place: Path | ObjectFolder, older_than_s: float, *, dry_run: bool = False) -> Collected:
    """Remove generations superseded more than `older_than_s` ago, then files that no other generation lists.

    Call it under the lock of a store on a disk; a dry run needs none. Ages are by the clock that dates the files; a dry run
    writes nothing, so it goes by this machine's. The newest generation is kept. A reader with a removed generation open gets
    an error at the first file that it has not opened yet.
    """
    folder = as_folder(place)
    newest = newest_generation(folder, lists=True)
    now = time.time() if dry_run else folder_time(folder)
    documents = listed_generations(folder)
    since = {number: min(now, documents[after].modified_s) for number, after in itertools.pairwise(documents)}
    superseded = [number for number in since if number < newest.generation]
    old = [number for number in superseded if now - since[number] >= older_than_s]
    # before the generations are read: what is committed later is not among them
    found = [*folder.names("shards"), *folder.names("generations")]
    newest = newest_after(folder, newest, lists=True)
    kept = [_read(folder, number, newest) for number in listed_generations(folder) if number not in old]
    kept.append(newest)
    gone = [manifest for number in old if (manifest := _read_if_whole(folder, number, newest)) is not None]
    rule = _unlisted_here(place, dry_run=dry_run) if isinstance(place, Path) else _unlisted_there(place, now, dry_run=dry_run)
    with rule as may_go:
        files = [one.file for one in _unlisted(found, kept, gone) if may_go(one)]
        if not dry_run:
            if complete_first(folder, newest) < newest.generation:  # else it would go back behind what was committed meanwhile
                folder.write(MANIFEST, dump_manifest(newest))  # readers must not begin at a generation that is removed now
            for part in itertools.groupby(files, _turn):
                folder.remove(file.name for file in part[1])
            folder.remove(generation_name(number) for number in old)
    return Collected(
        generations=tuple(old),
        files=tuple(file.name.removeprefix("shards/") for file in files),
        disk_bytes=sum(file.num_bytes for file in files) + sum(documents[number].num_bytes for number in old),
        waiting=tuple(number for number in superseded if number not in old),
    )


def _turn(file: ListedFile) -> int:
    """Return when a file is removed: a shard's own file first, then the others, indexes last."""
    return {"lmdb": 0, "index": 2}.get(file.name.rpartition(".")[2], 1)


def _unlisted(found: Sequence[ListedFile], kept: Sequence[Manifest], gone: Sequence[Manifest]) -> list[Unlisted]:
    """Return the files that no kept generation lists, in the order in which they may be removed."""
    listed, known = _names(kept), _names(gone)
    live, left = ({shard.name for manifest in own for shard in manifest.shards} for own in (kept, gone))
    retired = (left | {name for manifest in (*kept, *gone) for name in manifest.retired}) - live
    unlisted = []
    for file in sorted(found, key=lambda file: (_turn(file), file.name)):
        match = _FILE.fullmatch(file.name)
        if _LIST.fullmatch(file.name) and file.name not in listed:
            unlisted.append(Unlisted(file=file, shard="", is_of_column=False, is_live=False, is_retired=file.name in known))
        elif match is not None and file.name not in listed:
            shard, is_of_column = match[1], match[2] is not None
            is_retired = file.name in known or shard in retired
            unlisted.append(
                Unlisted(file=file, shard=shard, is_of_column=is_of_column, is_live=shard in live, is_retired=is_retired)
            )
    return unlisted


def _names(manifests: Sequence[Manifest]) -> set[str]:
    return {path.as_posix() for manifest in manifests for path, _ in all_files(Path(), manifest)}


@contextmanager
def _unlisted_here(store: Path, *, dry_run: bool) -> Iterator[Callable[[Unlisted], bool]]:
    """Yield which unlisted files on a disk may go; none of a column that is being added, and let none begin meanwhile.

    Shards that no generation lists yet are kept: the next run may adopt them. A list of dropped rows may always go: only
    who has the store's lock writes one.
    """
    path, none_is_added = store / "pending" / ADDING_LOCK, True
    with ExitStack() as held:
        if not dry_run and path.exists():
            try:
                held.enter_context(FileLock(path))
            except LockedError:
                none_is_added = False

        def may_go(found: Unlisted) -> bool:
            if not found.is_live:
                return not found.shard or found.is_retired or found.shard.startswith(COPY_PREFIX)
            return none_is_added or not found.is_of_column

        yield may_go


@contextmanager
def _unlisted_there(objects: ObjectFolder, now: float, *, dry_run: bool) -> Iterator[Callable[[Unlisted], bool]]:
    """Yield which unlisted objects may go; `now` is the server's time.

    Any of them may be another writer's upload, so it is left alone for a day, and longer while a running process notes that it
    sends it. Notes of processes that have ended go at the end.
    """
    being_sent, stale = pending_shards(objects, UNLISTED_S, now)

    def may_go(found: Unlisted) -> bool:
        return found.shard not in being_sent and (found.is_retired or now - found.file.modified_s >= UNLISTED_S)

    yield may_go
    if not dry_run:
        objects.remove(stale)


def _read(folder: Folder, number: int, newest: Manifest) -> Manifest:
    try:
        return read_generation(folder, number, newest)
    except StoreError as error:
        raise StoreError(
            f"{folder.place(generation_name(number))} cannot be read, so the files that it needs are unknown "
            f"({error!s:.200}); nothing was removed; move it elsewhere if no run needs it, and rerun the command"
        ) from error


def _read_if_whole(folder: Folder, number: int, newest: Manifest) -> Manifest | None:
    """Return an outdated generation's manifest; None if damaged: its successor's `retired` has what only it listed."""
    try:
        return read_generation(folder, number, newest)
    except StoreError:
        return None


# --------------------------------------------------------------------------------------------------------------------- compact

SMALL = 4  # shards below 1/4 of the shard size are small: joining them at least halves their number
OVERHEAD = 1.1  # page rounding, block headers, captions needed by two new shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """Result of a compaction or of its dry run."""

    generation: int  # newest generation afterwards
    rewritten: tuple[str, ...]  # shards whose rows were copied
    written: tuple[str, ...]  # their replacements; none in a dry run
    rows: int  # rows copied
    dropped: int  # dropped rows left out
    before_bytes: int  # of the files of `rewritten`
    after_bytes: int  # of the files of `written`; approximate in a dry run
    collected: Collected | None  # None without garbage collection


@dataclass(frozen=True, slots=True, kw_only=True)
class _CopiedRuns:
    """The copies of a generation's rows, and the runs of shards that they replace."""

    base: ChangeBase
    runs: list[range]
    new: _New

    def in_place(self, newest: ChangeBase) -> tuple[ShardEntry, ...] | None:
        """Return the shards of `newest` with the copies; None if a shard of which they were made has other rows now."""
        shards = list(newest.manifest.shards)
        for run, new in zip(self.runs, self.new, strict=True):
            old = self.base.manifest.shards[run.start : run.stop]
            at = next((n for n, entry in enumerate(shards) if entry == old[0]), 0)
            if tuple(shards[at : at + len(old)]) != old:
                return None
            groups = ((entry.name, group) for entry in old for group, _ in dropped_counts(entry))
            if not all(np.array_equal(self.base.dropped.of(*own), newest.dropped.of(*own)) for own in groups):
                return None
            shards[at : at + len(old)] = new
        return tuple(shards)


def compact(
    place: Path | ObjectFolder,
    *,
    shard_bytes: int,
    gc_older_than_s: float | None = None,
    dry_run: bool = False,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005
) -> Compacted:
    """Publish a generation without dropped rows and small shards, if there are any; then collect garbage if requested.

    `on_bytes` is called with the row bytes copied so far and in total. Files of rewritten shards stay until garbage collection.
    An interrupted compaction leaves the store unchanged. In object storage, the shards to rewrite are got first; if another
    writer is faster, the copies serve the next attempt unless it has changed one of these shards.
    """
    if shard_bytes < 1:
        raise UsageError(f"the shard size is {shard_bytes} bytes, expected 1 or more")
    if dry_run:
        with newest_base(place) as base:
            manifest = base.manifest
        found = None if gc_older_than_s is None else collect(place, gc_older_than_s, dry_run=True)
        return _report(manifest, plan_runs(manifest, shard_bytes), None, manifest.generation, found)
    copies = list[_CopiedRuns]()  # of the last attempt
    collected = list[Collected]()

    def compacted(base: ChangeBase) -> Manifest:
        shards = copies[-1].in_place(base) if copies else None
        if shards is None:
            copies.append(_copied(base, plan_runs(base.manifest, shard_bytes), shard_bytes, on_bytes))
            shards = copies[-1].in_place(base)
        assert shards is not None
        if shards == base.manifest.shards:
            return base.manifest
        return replace(base.manifest, shards=shards, dropped=base.list_dropped(shards))

    def collect_garbage() -> None:
        if gc_older_than_s is not None:
            collected.append(collect(place, gc_older_than_s))

    _, after = commit_change(place, compacted, finish=collect_garbage)
    done = copies[-1]
    return _report(done.base.manifest, done.runs, done.new, after.generation, next(iter(collected), None))


def plan_runs(manifest: Manifest, shard_bytes: int) -> list[range]:
    """Return the ordinals of the shards to rewrite together: those with dropped rows, and adjacent small ones."""
    sizes = [live_bytes(manifest, shard) for shard in manifest.shards]
    small = [SMALL * size < shard_bytes for size in sizes]
    added = [shard.added.keys() for shard in manifest.shards]  # rows with other added columns are never joined

    def joins(n: int, other: int) -> bool:
        return 0 <= other < len(small) and small[n] and small[other] and added[n] == added[other]

    has_dropped = [bool(dropped_counts(shard)) for shard in manifest.shards]
    chosen = [has_dropped[n] or joins(n, n - 1) or joins(n, n + 1) for n in range(len(small))]
    runs, at = [], 0
    while at < len(chosen):
        end = at
        while end < len(chosen) and chosen[end] and added[end] == added[at]:
            end += 1
        if end > at:
            runs.append(range(at, end))
        at = max(end, at + 1)
    return runs


def live_bytes(manifest: Manifest, shard: ShardEntry) -> int:
    """Return the bytes of a shard's live rows and records, and their share of its captions and ragged entries."""
    shared = shard.caption_bytes + manifest.ragged_bytes(shard)
    captions = -(-shared * shard.live_samples // max(1, shard.samples))
    return _row_bytes(manifest, shard) + shard.record_bytes + captions


def _run_bytes(manifest: Manifest, run: range) -> int:
    return sum(live_bytes(manifest, manifest.shards[n]) for n in run)


def _row_bytes(manifest: Manifest, shard: ShardEntry) -> int:
    return sum(count * manifest.specs[name].row_bytes for name, count in shard.live.items())


def _file_bytes(shard: ShardEntry) -> int:
    return sum(file.num_bytes for _, file in files_of(Path(), shard))


def _copied(base: ChangeBase, runs: list[range], shard_bytes: int, on_bytes: Callable[[int, int], None]) -> _CopiedRuns:
    """Copy the runs' rows to new shards. On a disk, call it under the store's lock."""
    manifest = base.manifest
    if not runs:
        return _CopiedRuns(base=base, runs=[], new=[])
    sizes = [_run_bytes(manifest, run) for run in runs]
    largest = min(max(sizes), shard_bytes)  # stored twice while it is sealed
    old = [manifest.shards[n] for run in runs for n in run]
    added = sum(manifest.row_bytes(shard) - _row_bytes(manifest, shard) for shard in old)
    refuse_too_little_disk(base.made, int((sum(sizes) + largest + added) * OVERHEAD), f"compacting {base.folder.place('')}")
    to_copy = sum(_row_bytes(manifest, shard) for shard in old)
    done = [0]

    def copied(num_bytes: int) -> None:
        done[0] += num_bytes
        on_bytes(done[0], to_copy)

    with (
        on_this_disk(base, old) as path,
        RowCopier(Store(path, manifest), manifest.generation + 1, copied, base.made) as copier,
    ):
        names = [copier.copy(run, shard_bytes) for run in runs]
        new = [tuple(read_meta(base.made, name, with_columns=True).entry for name in own) for own in names]
        for run, own in zip(runs, new, strict=True):
            _check_rows([manifest.shards[n] for n in run], own)
    # a generation may list the new shards from here on, so an interruption is left to the next writer
    return _CopiedRuns(base=base, runs=runs, new=new)


def _check_rows(old: list[ShardEntry], new: tuple[ShardEntry, ...]) -> None:
    before, after = Counter[str](), Counter[str]()
    for shards, counts in ((old, before), (new, after)):
        for shard in shards:
            counts.update(shard.live)
    if before != after:
        raise AssertionError(f"live rows were {before}, the copies have {after}")


def _report(
    base: Manifest, runs: list[range], new: _New | None, generation: int, collected: Collected | None = None
) -> Compacted:
    """Return the result; `new` is None in a dry run."""
    old = [base.shards[n] for run in runs for n in run]
    written = [entry for own in new or () for entry in own]
    return Compacted(
        generation=generation,
        rewritten=tuple(shard.name for shard in old),
        written=tuple(shard.name for shard in written),
        rows=sum(shard.live_samples for shard in old),
        dropped=sum(shard.samples - shard.live_samples for shard in old),
        before_bytes=sum(map(_file_bytes, old)),
        after_bytes=sum(_run_bytes(base, run) for run in runs) if new is None else sum(map(_file_bytes, written)),
        collected=collected,
    )
