"""Compact a store in object storage: in a mirror of it that has the shards to rewrite, committed at the end."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.store.change.compact import compact
from bucketline.store.change.garbage_collect import collect
from bucketline.store.format.manifest import read_manifest
from bucketline.store.sync.mirror import change
from bucketline.store.write.publish import next_generation, publish_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bucketline.store.change.compact import Compacted
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.manifest_entries import ShardEntry
    from bucketline.store.remote.objects import ObjectFolder
    from bucketline.store.sync.mirror import Mirror


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """A compaction that was not committed, since another writer was first."""

    base: Manifest
    manifest: Manifest
    report: Compacted

    def on(self, newest: Manifest) -> list[ShardEntry] | None:
        """Return the shards of `newest` with this compaction's copies; None if a shard has changed that they were made of."""
        kept = {entry.name for entry in self.base.shards} & {entry.name for entry in self.manifest.shards}
        shards = list(newest.shards)
        for old, new in zip(_gaps(self.base.shards, kept), _gaps(self.manifest.shards, kept), strict=True):
            if old:
                at = next((n for n, entry in enumerate(shards) if entry == old[0]), 0)
                if shards[at : at + len(old)] != old:
                    return None
                shards[at : at + len(old)] = new
        return shards


def _gaps(shards: Sequence[ShardEntry], kept: set[str]) -> list[list[ShardEntry]]:
    """Return the runs of shards between those that are kept, empty ones included."""
    gaps: list[list[ShardEntry]] = [[]]
    for entry in shards:
        if entry.name in kept:
            gaps.append([])
        else:
            gaps[-1].append(entry)
    return gaps


def compact_objects(
    objects: ObjectFolder,
    *,
    shard_bytes: int,
    gc_older_than_s: float | None = None,
    dry_run: bool = False,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005
) -> Compacted:
    """Rewrite shards as `compact` does, having got only those; then collect garbage if requested."""
    made: list[_Made] = []

    def compacted(mirror: Mirror) -> Compacted:
        base = read_manifest(mirror.path)
        if made:
            if (after := made[0].on(base)) is not None:
                published = publish_shards(mirror.path, base, after, next_generation(mirror.path, base))
                return dataclasses.replace(made[0].report, generation=published.generation)
            mirror.remove_made(made.pop().manifest)
        planned = compact(mirror.path, shard_bytes=shard_bytes, dry_run=True)
        if dry_run or not planned.rewritten:
            return planned
        mirror.fetch(planned.rewritten)
        report = compact(mirror.path, shard_bytes=shard_bytes, on_bytes=on_bytes)
        made.append(_Made(base=base, manifest=read_manifest(mirror.path), report=report))
        return report

    done = change(objects, compacted, dry_run=dry_run, keep_made=True)
    if gc_older_than_s is None:
        return done
    return dataclasses.replace(done, collected=collect(objects, gc_older_than_s, dry_run=dry_run))
