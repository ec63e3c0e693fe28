"""Make an earlier generation the newest one again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.errors import StoreError
from bucketline.store.folder import LocalFolder
from bucketline.store.format.manifest import generation_path, generations, read_manifest
from bucketline.store.read.lost_files import NAMED_SHARDS, lost_shards
from bucketline.store.write.newest import existing_manifest
from bucketline.store.write.publish import changing, next_generation, publish_shards

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.store.format.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Result of a restore or of its dry run."""

    restored: int  # the earlier generation
    generation: int  # newest generation afterwards
    samples_before: int
    samples: int  # afterwards
    is_changed: bool  # False if the newest generation already had exactly the rows of the earlier one


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """A generation that a store still has."""

    generation: int
    samples: int
    published: float  # Unix time


def restore(store: Path, generation: int, *, dry_run: bool = False) -> Restored:
    """Publish the rows of an earlier generation as a new, newest one. With `dry_run`, only check.

    What an interrupted run left is published as a generation first: the rows stay reachable there, and the next pack does not
    add them to what was restored. Shards that only later generations list become retired, so that no run adopts them again.

    Raises:
        StoreError: if the generation, or a file of its shards, is no longer there; nothing is changed.
        CorruptError: if the generation's manifest is damaged.
        LockedError: if another process changes the store.
    """
    if dry_run:
        newest = existing_manifest(store)
        earlier = _whole(store, newest, generation)
        return _result(earlier, newest, newest.generation)
    _whole(store, existing_manifest(store), generation)  # before anything is adopted
    with changing(store) as newest:
        earlier = _whole(store, newest, generation)
        if _has_rows_of(newest, earlier):
            return _result(earlier, newest, newest.generation)
        known = replace(earlier, retired=tuple(sorted(newest.known_shards - {shard.name for shard in earlier.shards})))
        after = publish_shards(store, known, earlier.shards, next_generation(store, newest))
    return _result(earlier, newest, after.generation)


def earlier_generations(store: Path) -> list[Earlier]:
    """Return the generations whose manifests can be read, the newest first."""
    found = []
    for number in reversed(generations(store)):
        try:
            samples = read_manifest(store, number).samples
            published = generation_path(store, number).stat().st_mtime
        except (OSError, StoreError):
            continue
        found.append(Earlier(generation=number, samples=samples, published=published))
    return found


def _whole(store: Path, newest: Manifest, generation: int) -> Manifest:
    """Return the manifest of an earlier generation, whose files are all there."""
    there = generations(store)
    if generation not in there:
        raise StoreError(
            f"{store} has no generation {generation}: it was removed by `store compact --gc`, or never made; nothing was "
            f"changed; there are {', '.join(map(str, there)) or 'none'}"
        )
    earlier = read_manifest(store, generation)
    if (earlier.store_id, earlier.generation) != (newest.store_id, generation):
        raise StoreError(
            f"{generation_path(store, generation)} is of another store or generation: it says generation "
            f"{earlier.generation} of store {earlier.store_id}, expected {generation} of {newest.store_id}; nothing was changed"
        )
    if lost := lost_shards(LocalFolder(store), earlier):
        more = f", and {counted(len(lost) - NAMED_SHARDS, 'shard')} more" if len(lost) > NAMED_SHARDS else ""
        raise StoreError(
            f"generation {generation} of {store} cannot be restored: files of {counted(len(lost), 'shard')} are gone, "
            f"collected or lost: {'; '.join(map(str, lost[:NAMED_SHARDS]))}{more}; nothing was changed; restore these files, "
            "or choose another generation"
        )
    return earlier


def _has_rows_of(newest: Manifest, earlier: Manifest) -> bool:
    return (newest.shards, newest.buckets) == (earlier.shards, earlier.buckets)


def _result(earlier: Manifest, before: Manifest, generation: int) -> Restored:
    return Restored(
        restored=earlier.generation,
        generation=generation,
        samples_before=before.samples,
        samples=earlier.samples,
        is_changed=not _has_rows_of(before, earlier),
    )
