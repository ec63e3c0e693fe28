"""Drop samples: their rows are added to the shards' sorted lists; nothing is rewritten."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bucketline.errors import StoreError, UsageError
from bucketline.store.change.commit import commit_change, newest_base
from bucketline.store.format.hashing import sample_digest
from bucketline.store.read.iter_samples import Selection, live_samples
from bucketline.store.shard.reader import as_keys
from bucketline.store.write.publish import replaced

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.remote.objects import ObjectFolder
    from bucketline.store.write.change_base import ChangeBase

NAMED_SAMPLES = 5  # ids that an error lists by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Result of a drop or of its dry run."""

    generation: int  # newest generation afterwards
    ids: tuple[str, ...]
    samples: int  # remaining


def drop(place: Path | ObjectFolder, ids: Iterable[str], *, match: str | None = None, dry_run: bool = False) -> Dropped:
    """Publish a generation without the given samples; older generations keep them. With `dry_run`, only check.

    `match`: a pattern of *, ? and [abc]; the samples whose ids match are dropped, too.
    """
    named = tuple(ids)
    if not named and match is None:
        raise UsageError("there is no id to drop; name samples, a pattern with --match, or a file of ids with --from-file")
    wanted: tuple[str, ...] = ()

    def check(base: ChangeBase) -> None:
        nonlocal wanted
        wanted = tuple(dict.fromkeys((*named, *_matching(base, match))))
        _refuse_unknown(base, wanted)

    def without(base: ChangeBase) -> Manifest:
        check(base)
        return replace(base.manifest, shards=tuple(replaced(base, (), map(sample_digest, wanted))))

    if dry_run:
        with newest_base(place) as base:
            check(base)
        manifest = base.manifest
        return Dropped(generation=manifest.generation, ids=wanted, samples=manifest.samples - len(wanted))
    _, after = commit_change(place, without)
    return Dropped(generation=after.generation, ids=wanted, samples=after.samples)


def _matching(base: ChangeBase, match: str | None) -> list[str]:
    if match is None:
        return []
    base.fetch_indexes()
    found = [listed.record.id for listed in live_samples(base.store, Selection(match=match))]
    if not found:
        raise StoreError(f"{base.folder.place('')} has no sample that matches {match!r:.200}; nothing was dropped")
    return found


def read_ids(path: Path) -> list[str]:
    """Return the ids in a file, one per line; empty lines are skipped."""
    try:
        text = path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; expected a file with one id per line") from error
    return [line.removesuffix("\r") for line in text.split("\n") if line.removesuffix("\r")]


def _refuse_unknown(base: ChangeBase, ids: tuple[str, ...]) -> None:
    left = dict.fromkeys(ids)
    base.fetch_indexes()
    for entry in reversed(base.manifest.shards):
        shard, asked = base.shard(entry), list(left)
        digests = [sample_digest(sample_id) for sample_id in asked]
        for sample_id, digest, position in zip(asked, digests, shard.positions(as_keys(digests)), strict=True):
            if position >= 0 and shard.find(digest) is not None:
                del left[sample_id]
        if not left:
            return
    named = ", ".join(repr(sample_id) for sample_id in list(left)[:NAMED_SAMPLES])
    raise StoreError(
        f"{base.folder.place('')} has no sample {named}{' and others' if len(left) > NAMED_SAMPLES else ''} "
        f"({len(left)} of {len(ids)} ids given); "
        "nothing was dropped; ids are paths in the source, with their extension"
    )
