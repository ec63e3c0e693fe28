"""Drop complete shards with all their samples, even if they cannot be read any more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bucketline.errors import StoreError
from bucketline.store.change.readable_rows import DamagedStore, all_lost
from bucketline.store.format.manifest import read_manifest
from bucketline.store.read.lost_files import NAMED_SHARDS
from bucketline.store.write.publish import changing, next_generation, publish_shards

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from bucketline.store.format.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedShards:
    """Result of a drop or of its dry run."""

    generation: int  # newest generation afterwards
    shards: tuple[str, ...]
    ids: tuple[str, ...]  # of samples with readable records
    dropped: int  # number of samples
    samples: int  # remaining


def drop_shards(store: Path, names: Iterable[str], *, dry_run: bool = False) -> DroppedShards:
    """Publish a generation without some shards; older generations keep them. With `dry_run`, only check.

    What an interrupted run left stays for the next pack: adopting it would read the indexes of all shards.

    Raises:
        StoreError: if the store has no such shard; nothing is dropped.
        LockedError: if another process changes the store.
    """
    wanted = tuple(dict.fromkeys(names))
    if dry_run:
        manifest = read_manifest(store)
        return _report(store, manifest, wanted)
    with changing(store, adopting=False) as manifest:
        report = _report(store, manifest, wanted)
        kept = [entry for entry in manifest.shards if entry.name not in wanted]
        after = publish_shards(store, manifest, kept, next_generation(store, manifest))
    return replace(report, generation=after.generation)


def _report(store: Path, manifest: Manifest, names: tuple[str, ...]) -> DroppedShards:
    """Return the report, with the shards' sample ids as far as they are readable."""
    ordinals = {entry.name: n for n, entry in enumerate(manifest.shards)}
    if unknown := [name for name in names if name not in ordinals]:
        known = ", ".join(list(ordinals)[:NAMED_SHARDS]) or "none"
        raise StoreError(
            f"{store} has no shard {unknown[0]!r:.120}; nothing was dropped; it has {known}"
            f"{' and others' if len(ordinals) > NAMED_SHARDS else ''}; `store info` names those that have lost files"
        )
    found = [all_lost(DamagedStore(store, manifest, [name]), ordinals[name]) for name in names]
    dropped = sum(manifest.shards[ordinals[name]].live_samples for name in names)
    ids = tuple(sample_id for survey in found for sample_id in survey.ids)
    return DroppedShards(
        generation=manifest.generation, shards=names, ids=ids, dropped=dropped, samples=manifest.samples - dropped
    )
