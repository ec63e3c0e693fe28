"""Compacting a store: shards with dropped rows written anew without them, small neighbours joined.

Live rows keep their order, so that row n of a bucket of the store is the same sample before and after, and plans stay valid.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.errors import UsageError
from bucketline.store.collect import Collected, collect
from bucketline.store.free_disk import refuse_too_little_disk
from bucketline.store.layout import COPY_PREFIX
from bucketline.store.manifest import read_manifest
from bucketline.store.publish import changing, describe_shard, next_generation, publish_shards
from bucketline.store.reader import Store
from bucketline.store.row_copier import RowCopier
from bucketline.store.text_block import TEXT_GROUP

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.store.manifest import Manifest, ShardEntry

SMALL = 4  # a shard is small below a quarter of the shard size: joining such at least halves their number
OVERHEAD = 1.1  # page rounding, block headers, captions that two new shards both need


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Shards beside each other that are written anew together."""

    shards: range  # their ordinals
    sizes: tuple[int, ...]  # at which the new shards are full, in bytes, but for the last one
    num_bytes: int  # of the live rows, about


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """What a compaction did, or would do."""

    generation: int  # the newest, afterwards
    rewritten: tuple[str, ...]  # shards whose rows were copied
    written: tuple[str, ...]  # shards that take their place; none in a dry run
    rows: int  # that were copied
    dropped: int  # rows that were left out
    before_bytes: int  # of the files of `rewritten`
    after_bytes: int  # of the files of `written`; in a dry run about
    collected: Collected | None  # None where nothing was to be collected


def compact(
    path: Path,
    *,
    shard_bytes: int,
    gc_older_than_s: float | None = None,
    dry_run: bool = False,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005
) -> Compacted:
    """Publish a generation without dropped rows and small shards, unless there are none; then collect, if asked to.

    `on_bytes` is told how many bytes of rows are copied, of how many. The files of shards that were written anew stay until
    they are collected. Interrupted in the middle, the store is as it was.

    Raises:
        CorruptError: where a row or caption that is to be copied is not what was written, naming it.
        StoreError: where there is no store, a file of it is missing, or the disk cannot hold the copies.
        LockedError: where another process changes the store.
    """
    if shard_bytes < 1:
        raise UsageError(f"the shard size is {shard_bytes} bytes, expected 1 or more")
    if dry_run:
        manifest = read_manifest(path)
        runs = plan_runs(manifest, shard_bytes)
        found = None if gc_older_than_s is None else collect(path, manifest, gc_older_than_s, dry_run=True)
        return _report(manifest, runs, manifest, (), found)
    with changing(path) as manifest:
        runs = plan_runs(manifest, shard_bytes)
        after, written = _rewrite(path, manifest, runs, shard_bytes, on_bytes) if runs else (manifest, ())
        found = None if gc_older_than_s is None else collect(path, after, gc_older_than_s)
    return _report(manifest, runs, after, written, found)


def plan_runs(manifest: Manifest, shard_bytes: int) -> list[Run]:
    """Say which shards are to be written anew: those with dropped rows, and small ones beside each other."""
    sizes = [live_bytes(manifest, shard) for shard in manifest.shards]
    small = [SMALL * size < shard_bytes for size in sizes]
    chosen = [
        _dropped(shard) > 0 or (small[n] and any(small[n - 1 : n] + small[n + 1 : n + 2]))
        for n, shard in enumerate(manifest.shards)
    ]
    runs, at = [], 0
    while at < len(chosen):
        end = at
        while end < len(chosen) and chosen[end]:
            end += 1
        if end > at:
            num_bytes = sum(sizes[at:end])
            number = max(1, -int(-num_bytes * OVERHEAD // shard_bytes))
            runs.append(Run(shards=range(at, end), sizes=(-(-num_bytes // number),) * (number - 1), num_bytes=num_bytes))
        at = end + 1
    return runs


def live_bytes(manifest: Manifest, shard: ShardEntry) -> int:
    """Give the bytes of a shard's live rows and records, and the share of its captions that falls to them."""
    live = _live(shard)
    rows = sum(count * manifest.specs[name].row_bytes for name, count in live.items())
    captions = -(-shard.caption_bytes * sum(live.values()) // max(1, shard.samples))
    return rows + shard.record_bytes + captions


def _live(shard: ShardEntry) -> dict[str, int]:
    return {name: group.rows - group.dropped for name, group in shard.groups.items() if name != TEXT_GROUP}


def _dropped(shard: ShardEntry) -> int:
    return sum(group.dropped for group in shard.groups.values())


def _file_bytes(shard: ShardEntry) -> int:
    lists = shard.dropped.num_bytes if shard.dropped else 0
    return shard.lmdb.num_bytes + shard.extents.num_bytes + shard.index.num_bytes + lists


def _rewrite(
    path: Path, manifest: Manifest, runs: list[Run], shard_bytes: int, on_bytes: Callable[[int, int], None]
) -> tuple[Manifest, tuple[ShardEntry, ...]]:
    """Copy the runs' rows and publish; give the new manifest and its new shards. Under the store's lock."""
    total = sum(run.num_bytes for run in runs)
    largest = max(min(run.num_bytes, shard_bytes) for run in runs)  # it lies there twice while it is sealed
    refuse_too_little_disk(path, int((total + largest) * OVERHEAD), f"compacting {path}")
    to_copy = sum(
        count * manifest.specs[name].row_bytes
        for run in runs
        for n in run.shards
        for name, count in _live(manifest.shards[n]).items()
    )
    done = [0]

    def copied(num_bytes: int) -> None:
        done[0] += num_bytes
        on_bytes(done[0], to_copy)

    generation = next_generation(path, manifest)
    prefix = f"{COPY_PREFIX}{generation:06d}-{secrets.token_hex(4)}"  # a name that no shard has had
    copier = RowCopier(Store(path, manifest), prefix, copied)
    try:
        names = [copier.copy(run.shards, run.sizes, shard_bytes) for run in runs]
        new = [tuple(describe_shard(path, name, manifest)[0] for name in own) for own in names]
        for run, own in zip(runs, new, strict=True):
            _check_rows([manifest.shards[n] for n in run.shards], own)
    except BaseException:
        copier.discard()
        raise
    # from here on a generation may list them: what an interruption leaves is for the next writer to judge
    shards = list(manifest.shards)
    for run, own in reversed(list(zip(runs, new, strict=True))):
        shards[run.shards.start : run.shards.stop] = own
    return publish_shards(path, manifest, shards, generation), tuple(entry for own in new for entry in own)


def _check_rows(old: list[ShardEntry], new: tuple[ShardEntry, ...]) -> None:
    """Hold the number of rows that were copied against those that were live, bucket by bucket."""
    before: dict[str, int] = {}
    after: dict[str, int] = {}
    for shards, counts in ((old, before), (new, after)):
        for shard in shards:
            for name, count in _live(shard).items():
                counts[name] = counts.get(name, 0) + count
    if {name: n for name, n in before.items() if n} != after:
        raise AssertionError(f"live rows were {before}, the copies have {after}")


def _report(
    manifest: Manifest, runs: list[Run], after: Manifest, written: tuple[ShardEntry, ...], collected: Collected | None
) -> Compacted:
    old = [manifest.shards[n] for run in runs for n in run.shards]
    about = sum(run.num_bytes for run in runs)
    return Compacted(
        generation=after.generation,
        rewritten=tuple(shard.name for shard in old),
        written=tuple(shard.name for shard in written),
        rows=sum(sum(_live(shard).values()) for shard in old),
        dropped=sum(_dropped(shard) for shard in old),
        before_bytes=sum(map(_file_bytes, old)),
        after_bytes=sum(map(_file_bytes, written)) if after is not manifest else about,
        collected=collected,
    )
