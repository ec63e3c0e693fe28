"""Make an earlier generation the newest one again."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.errors import StoreError
from bucketline.store.change.commit import commit_change, newest_base
from bucketline.store.read.lost_files import NAMED_SHARDS, lost_shards
from bucketline.store.remote.generations import listed_generations, read_generation

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.remote.objects import ObjectFolder
    from bucketline.store.write.change_base import ChangeBase


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


def restore(place: Path | ObjectFolder, generation: int, *, dry_run: bool = False) -> Restored:
    """Publish the rows of an earlier generation as a new, newest one. With `dry_run`, only check.

    What an interrupted run left on a disk is published as a generation first: the rows stay reachable there, and the next pack
    does not add them to what was restored. Shards that only later generations list become retired, so that no run adopts them
    again.

    Raises:
        StoreError: if the generation, or a file of its shards, is no longer there; nothing is changed.
        CorruptError: if the generation's manifest is damaged.
        LockedError: if another process changes the store on this disk.
    """
    with newest_base(place) as base:  # before anything is adopted
        earlier = _whole(base, generation)
        before = base.manifest
    if dry_run:
        return _result(earlier, before, before.generation)

    def restored(base: ChangeBase) -> Manifest:
        earlier = _whole(base, generation)
        if _has_rows_of(base.manifest, earlier):
            return base.manifest
        return earlier

    before, after = commit_change(place, restored)
    return _result(earlier, before, after.generation)


def earlier_generations(place: Path | ObjectFolder) -> tuple[int, list[Earlier]]:
    """Return the newest generation's number, and the generations whose manifests can be read, the newest first."""
    with newest_base(place) as base:
        newest, found = base.manifest, []
        for number, file in listed_generations(base.folder).items():
            with suppress(StoreError):
                samples = read_generation(base.folder, number, newest).samples
                found.append(Earlier(generation=number, samples=samples, published=file.modified_s))
    return newest.generation, found[::-1]


def _whole(base: ChangeBase, generation: int) -> Manifest:
    """Return the manifest of an earlier generation, whose files are all there."""
    folder, newest, place = base.folder, base.manifest, base.folder.place("")
    there = sorted({*listed_generations(folder), newest.generation})
    if generation not in there:
        raise StoreError(
            f"{place} has no generation {generation}: it was removed by `store compact --gc`, or never made; nothing was "
            f"changed; there are {', '.join(map(str, there))}"
        )
    earlier = read_generation(folder, generation, newest)
    if lost := lost_shards(folder, earlier.shards):
        more = f", and {counted(len(lost) - NAMED_SHARDS, 'shard')} more" if len(lost) > NAMED_SHARDS else ""
        raise StoreError(
            f"generation {generation} of {place} cannot be restored: files of {counted(len(lost), 'shard')} are gone, "
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
