"""Changes to a store in object storage: drop, compact, restore. Each works on a mirror of it, and is committed at the end."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import TYPE_CHECKING

from bucketline.errors import StoreError
from bucketline.store.change.compact import compact
from bucketline.store.change.drop import drop
from bucketline.store.change.drop_shards import drop_shards
from bucketline.store.change.restore import Earlier, restore
from bucketline.store.remote.generations import newest_generation, read_generation
from bucketline.store.sync.collect import collect_objects
from bucketline.store.sync.mirror import change

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bucketline.store.change.compact import Compacted
    from bucketline.store.change.drop import Dropped
    from bucketline.store.change.drop_shards import DroppedShards
    from bucketline.store.change.restore import Restored
    from bucketline.store.remote.objects import ObjectFolder
    from bucketline.store.sync.mirror import Mirror


def drop_objects(objects: ObjectFolder, ids: Iterable[str], *, dry_run: bool = False) -> Dropped:
    """Drop samples, as `drop` does."""
    wanted = tuple(ids)
    return change(objects, lambda mirror: drop(mirror.path, wanted, dry_run=dry_run), dry_run=dry_run)


def drop_shard_objects(objects: ObjectFolder, names: Iterable[str], *, dry_run: bool = False) -> DroppedShards:
    """Drop complete shards, as `drop_shards` does; their samples are not named, since their data is not read."""
    wanted = tuple(names)
    return change(objects, lambda mirror: drop_shards(mirror.path, wanted, dry_run=dry_run), dry_run=dry_run, sidecars=False)


def restore_objects(objects: ObjectFolder, generation: int, *, dry_run: bool = False) -> Restored:
    """Make an earlier generation the newest one again, as `restore` does."""

    def restored(mirror: Mirror) -> Restored:
        newest = newest_generation(objects)
        if generation < newest.generation:
            mirror.add_generation(read_generation(objects, generation, newest))
        return restore(mirror.path, generation, dry_run=dry_run)

    return change(objects, restored, dry_run=dry_run)


def earlier_objects(objects: ObjectFolder) -> tuple[int, list[Earlier]]:
    """Return the newest generation's number, and those that can be read, the newest first, as `earlier_generations` does."""
    newest, found = newest_generation(objects), []
    for entry in objects.entries("generations"):
        number = entry.name.removeprefix("generations/").removesuffix(".json")
        with suppress(StoreError, ValueError):
            samples = read_generation(objects, int(number), newest).samples
            found.append(Earlier(generation=int(number), samples=samples, published=entry.modified_s))
    return newest.generation, sorted(found, key=lambda earlier: -earlier.generation)


def compact_objects(
    objects: ObjectFolder,
    *,
    shard_bytes: int,
    gc_older_than_s: float | None = None,
    dry_run: bool = False,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005
) -> Compacted:
    """Rewrite shards as `compact` does, having got only those; then collect garbage if requested."""

    def compacted(mirror: Mirror) -> Compacted:
        planned = compact(mirror.path, shard_bytes=shard_bytes, dry_run=True)
        if dry_run or not planned.rewritten:
            return planned
        mirror.fetch(planned.rewritten)
        return compact(mirror.path, shard_bytes=shard_bytes, on_bytes=on_bytes)

    done = change(objects, compacted, dry_run=dry_run)
    if gc_older_than_s is None:
        return done
    return dataclasses.replace(done, collected=collect_objects(objects, gc_older_than_s, dry_run=dry_run))
