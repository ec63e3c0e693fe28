"""Compact a store: rewrite shards without their dropped rows and join small neighbours.

Live rows keep their order: row n of a bucket is the same sample before and after, so plans stay valid.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import StoreError, UsageError
from bucketline.files.atomic_write import explaining
from bucketline.files.disk_space import refuse_too_little_disk
from bucketline.store.change.copy_rows import RowCopier
from bucketline.store.change.garbage_collect import Collected, collect
from bucketline.store.format.manifest import generations
from bucketline.store.read.lost_files import files_of
from bucketline.store.read.store import Store
from bucketline.store.write.describe import describe_shard
from bucketline.store.write.newest import existing_manifest
from bucketline.store.write.publish import changing, next_generation, publish_shards

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.manifest_entries import ShardEntry

SMALL = 4  # shards below 1/4 of the shard size are small: joining them at least halves their number
OVERHEAD = 1.1  # page rounding, block headers, captions needed by two new shards


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRun:
    """Adjacent shards that are rewritten together."""

    shards: range  # ordinals
    sizes: tuple[int, ...]  # at which the new shards are full, in bytes; the last one has no entry
    num_bytes: int  # of the live rows, approximate


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


def compact(
    path: Path,
    *,
    shard_bytes: int,
    gc_older_than_s: float | None = None,
    dry_run: bool = False,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005
) -> Compacted:
    """Publish a generation without dropped rows and small shards, if there are any; then collect garbage if requested.

    `on_bytes` is called with the row bytes copied so far and in total. Files of rewritten shards stay until garbage collection.
    An interrupted compaction leaves the store unchanged.

    Raises:
        CorruptError: if a row or caption to be copied is damaged, naming it.
        StoreError: if there is no store, one of its files is missing, or the disk cannot hold the copies.
        LockedError: if another process changes the store.
    """
    if shard_bytes < 1:
        raise UsageError(f"the shard size is {shard_bytes} bytes, expected 1 or more")
    if dry_run:
        return _foretold(path, shard_bytes, gc_older_than_s)
    with changing(path) as manifest:
        runs = plan_runs(manifest, shard_bytes)
        after, written = _rewrite(path, manifest, runs, shard_bytes, on_bytes) if runs else (manifest, ())
        found = None if gc_older_than_s is None else collect(path, gc_older_than_s)
    return _report(manifest, runs, after, written, found)


def _foretold(path: Path, shard_bytes: int, gc_older_than_s: float | None) -> Compacted:
    """Return what a compaction would do, without a lock; retried if another process changed the generations."""
    while True:
        before = generations(path)
        try:
            manifest = existing_manifest(path)
            with explaining(path):
                found = None if gc_older_than_s is None else collect(path, gc_older_than_s, dry_run=True)
        except StoreError:
            if generations(path) == before:
                raise
        else:
            if generations(path) == before:
                return _report(manifest, plan_runs(manifest, shard_bytes), manifest, (), found)


def plan_runs(manifest: Manifest, shard_bytes: int) -> list[ShardRun]:
    """Return the shards to rewrite: those with dropped rows, and adjacent small ones."""
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
            num_bytes = sum(sizes[at:end])
            number = max(1, -int(-num_bytes * OVERHEAD // shard_bytes))
            runs.append(ShardRun(shards=range(at, end), sizes=(-(-num_bytes // number),) * (number - 1), num_bytes=num_bytes))
        at = max(end, at + 1)
    return runs


def live_bytes(manifest: Manifest, shard: ShardEntry) -> int:
    """Return the bytes of a shard's live rows and records, and their share of its captions and ragged entries."""
    shared = shard.caption_bytes + manifest.ragged_bytes(shard)
    captions = -(-shared * shard.live_samples // max(1, shard.samples))
    return _row_bytes(manifest, shard) + shard.record_bytes + captions


def _row_bytes(manifest: Manifest, shard: ShardEntry) -> int:
    return sum(count * manifest.specs[name].row_bytes for name, count in shard.live.items())


def _file_bytes(shard: ShardEntry) -> int:
    return sum(file.num_bytes for _, file in files_of(Path(), shard))


def _rewrite(
    path: Path, manifest: Manifest, runs: list[ShardRun], shard_bytes: int, on_bytes: Callable[[int, int], None]
) -> tuple[Manifest, tuple[ShardEntry, ...]]:
    """Copy the runs' rows and publish. Return the new manifest and its new shards. Call under the store's lock."""
    total = sum(run.num_bytes for run in runs)
    largest = max(min(run.num_bytes, shard_bytes) for run in runs)  # stored twice while it is sealed
    old = [manifest.shards[n] for run in runs for n in run.shards]
    added = sum(manifest.row_bytes(shard) - _row_bytes(manifest, shard) for shard in old)
    refuse_too_little_disk(path, int((total + largest + added) * OVERHEAD), f"compacting {path}")
    to_copy = sum(_row_bytes(manifest, shard) for shard in old)
    done = [0]

    def copied(num_bytes: int) -> None:
        done[0] += num_bytes
        on_bytes(done[0], to_copy)

    generation = next_generation(path, manifest)
    with RowCopier(Store(path, manifest), generation, copied) as copier:
        names = [copier.copy(run.shards, run.sizes, shard_bytes) for run in runs]
        new = [tuple(describe_shard(path, name, manifest)[0] for name in own) for own in names]
        for run, own in zip(runs, new, strict=True):
            _check_rows([manifest.shards[n] for n in run.shards], own)
    # a generation may list the new shards from here on, so an interruption is left to the next writer
    shards = list(manifest.shards)
    for run, own in reversed(list(zip(runs, new, strict=True))):
        shards[run.shards.start : run.shards.stop] = own
    return publish_shards(path, manifest, shards, generation), tuple(entry for own in new for entry in own)


def _check_rows(old: list[ShardEntry], new: tuple[ShardEntry, ...]) -> None:
    """Check that as many rows were copied as were live, per bucket."""
    before, after = Counter[str](), Counter[str]()
    for shards, counts in ((old, before), (new, after)):
        for shard in shards:
            counts.update(shard.live)
    if before != after:
        raise AssertionError(f"live rows were {before}, the copies have {after}")


def _report(
    manifest: Manifest, runs: list[ShardRun], after: Manifest, written: tuple[ShardEntry, ...], collected: Collected | None
) -> Compacted:
    old = [manifest.shards[n] for run in runs for n in run.shards]
    about = sum(run.num_bytes for run in runs)
    return Compacted(
        generation=after.generation,
        rewritten=tuple(shard.name for shard in old),
        written=tuple(shard.name for shard in written),
        rows=sum(shard.live_samples for shard in old),
        dropped=sum(shard.samples - shard.live_samples for shard in old),
        before_bytes=sum(map(_file_bytes, old)),
        after_bytes=sum(map(_file_bytes, written)) if after is not manifest else about,
        collected=collected,
    )
