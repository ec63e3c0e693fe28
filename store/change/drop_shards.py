"""Drop complete shards with all their samples, even if they cannot be read any more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bucketline.errors import StoreError
from bucketline.store.change.commit import commit_change, newest_base
from bucketline.store.change.repair import DamagedStore
from bucketline.store.folder import LocalFolder
from bucketline.store.read.lost_files import NAMED_SHARDS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.remote.objects import ObjectFolder
    from bucketline.store.write.change_base import ChangeBase


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedShards:
    """Result of a drop or of its dry run."""

    generation: int  # newest generation afterwards
    shards: tuple[str, ...]
    ids: tuple[str, ...]  # of samples with readable records
    dropped: int  # number of samples
    samples: int  # remaining


def drop_shards(place: Path | ObjectFolder, names: Iterable[str], *, dry_run: bool = False) -> DroppedShards:
    """Publish a generation without some shards; older generations keep them. With `dry_run`, only check.

    What an interrupted run left stays for the next pack: adopting it would read the indexes of all shards. Of a store in object
    storage the samples are not named, since no data is read.

    Raises:
        StoreError: if the store has no such shard; nothing is dropped.
        LockedError: if another process changes the store on this disk.
    """
    wanted = tuple(dict.fromkeys(names))
    if dry_run:
        with newest_base(place) as base:
            return _report(base, wanted)
    reports: list[DroppedShards] = []

    def without(base: ChangeBase) -> Manifest:
        reports.append(_report(base, wanted))
        return replace(base.manifest, shards=tuple(entry for entry in base.manifest.shards if entry.name not in wanted))

    _, after = commit_change(place, without, adopting=False)
    return replace(reports[-1], generation=after.generation)


def _report(base: ChangeBase, names: tuple[str, ...]) -> DroppedShards:
    """Return the report, with the shards' sample ids as far as they are readable."""
    manifest, place = base.manifest, base.folder.place("")
    ordinals = {entry.name: n for n, entry in enumerate(manifest.shards)}
    if unknown := [name for name in names if name not in ordinals]:
        known = ", ".join(list(ordinals)[:NAMED_SHARDS]) or "none"
        raise StoreError(
            f"{place} has no shard {unknown[0]!r:.120}; nothing was dropped; it has {known}"
            f"{' and others' if len(ordinals) > NAMED_SHARDS else ''}; `store info` names those that have lost files"
        )
    ids: list[str] = []
    if isinstance(base.folder, LocalFolder):
        for name in names:
            ids += DamagedStore(base.folder.path, manifest, [ordinals[name]]).readable_ids(ordinals[name])
    dropped = sum(manifest.shards[ordinals[name]].live_samples for name in names)
    return DroppedShards(
        generation=manifest.generation, shards=names, ids=tuple(ids), dropped=dropped, samples=manifest.samples - dropped
    )
