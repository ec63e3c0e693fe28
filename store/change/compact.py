"""Compact a store: rewrite shards without their dropped rows and join small neighbours.

Live rows keep their order: row n of a bucket is the same sample before and after, so plans stay valid.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import UsageError
from bucketline.files.disk_space import refuse_too_little_disk
from bucketline.store.change.commit import commit_change, newest_base, on_this_disk
from bucketline.store.change.copy_rows import RowCopier
from bucketline.store.change.garbage_collect import Collected, collect
from bucketline.store.read.lost_files import files_of
from bucketline.store.read.store import Store
from bucketline.store.write.describe import describe_shard

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from bucketline.store.format.manifest import Manifest, ShardEntry
    from bucketline.store.remote.objects import ObjectFolder
    from bucketline.store.write.change_base import ChangeBase

    _New: TypeAlias = list[tuple[ShardEntry, ...]]  # shards of each run

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

    base: Manifest
    runs: list[range]
    new: _New

    def in_place(self, newest: Manifest) -> tuple[ShardEntry, ...] | None:
        """Return the shards of `newest` with the copies; None if a shard has changed that they were made of."""
        shards = list(newest.shards)
        for run, new in zip(self.runs, self.new, strict=True):
            old = self.base.shards[run.start : run.stop]
            at = next((n for n, entry in enumerate(shards) if entry == old[0]), 0)
            if tuple(shards[at : at + len(old)]) != old:
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
        shards = copies[-1].in_place(base.manifest) if copies else None
        if shards is None:
            copies.append(_copied(base, plan_runs(base.manifest, shard_bytes), shard_bytes, on_bytes))
            shards = copies[-1].in_place(base.manifest)
        assert shards is not None
        return base.manifest if shards == base.manifest.shards else replace(base.manifest, shards=shards)

    def collect_garbage() -> None:
        if gc_older_than_s is not None:
            collected.append(collect(place, gc_older_than_s))

    _, after = commit_change(place, compacted, finish=collect_garbage)
    done = copies[-1]
    return _report(done.base, done.runs, done.new, after.generation, next(iter(collected), None))


def plan_runs(manifest: Manifest, shard_bytes: int) -> list[range]:
    """Return the ordinals of the shards to rewrite together: those with dropped rows, and adjacent small ones."""
    sizes = [live_bytes(manifest, shard) for shard in manifest.shards]
    small = [SMALL * size < shard_bytes for size in sizes]
    added = [shard.added.keys() for shard in manifest.shards]  # rows with other added columns are never joined

    def joins(n: int, other: int) -> bool:
        return 0 <= other < len(small) and small[n] and small[other] and added[n] == added[other]

    chosen = [shard.dropped is not None or joins(n, n - 1) or joins(n, n + 1) for n, shard in enumerate(manifest.shards)]
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
        return _CopiedRuns(base=manifest, runs=[], new=[])
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
        new = [tuple(describe_shard(base.made, name, manifest).entry for name in own) for own in names]
        for run, own in zip(runs, new, strict=True):
            _check_rows([manifest.shards[n] for n in run], own)
    # a generation may list the new shards from here on, so an interruption is left to the next writer
    return _CopiedRuns(base=manifest, runs=runs, new=new)


def _check_rows(old: list[ShardEntry], new: tuple[ShardEntry, ...]) -> None:
    """Check that as many rows were copied as were live, per bucket."""
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
