"""Make an earlier generation the newest one again: a commit of its manifest."""

from __future__ import annotations

from contextlib import suppress
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


def restore(place: Path | ObjectFolder, generation: int, *, dry_run: bool = False) -> tuple[Manifest, Manifest]:
    """Publish the rows of an earlier generation as a new, newest one. With `dry_run`, only check.

    Return the generation that was the newest, and the one that has these rows: the same if it has them already.

    What an interrupted run left on a disk is published as a generation first: the rows stay reachable there, and the next pack
    does not add them to what was restored. Shards that only later generations list become retired, so that no run adopts them
    again.
    """

    def restored(base: ChangeBase) -> Manifest:
        newest, earlier = base.manifest, _whole(base, generation)
        return newest if (newest.shards, newest.buckets) == (earlier.shards, earlier.buckets) else earlier

    with newest_base(place) as base:  # before anything is adopted
        before, earlier = base.manifest, restored(base)
    return (before, earlier) if dry_run else commit_change(place, restored)


def earlier_generations(place: Path | ObjectFolder) -> list[tuple[Manifest, float]]:
    """Return the generations whose manifests can be read, the newest first, each with its time of publication (Unix)."""
    found = []
    with newest_base(place) as base:
        for number, file in listed_generations(base.folder).items():
            with suppress(StoreError):
                found.append((read_generation(base.folder, number, base.manifest), file.modified_s))
    return found[::-1]


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
