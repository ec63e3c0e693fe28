"""Compare a listing with a store: which images are new, which are gone, and which of those may be dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.ingest.pipeline.packed_index import StoredIds
from bucketline.ingest.rules import prune_limit, reject_limit
from bucketline.ingest.sources.local_files import LEADS_OUT
from bucketline.store.format.hashing import DIGEST_BYTES, sample_digest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.parallel.item_parts import Outline
    from bucketline.ingest.rules import Limit
    from bucketline.ingest.summary import RunSummary
    from bucketline.store import Store

NAMED_IDS = 10  # ids that a summary lists per count


def unknown(store: Store, outline: Outline) -> NDArray[np.bool_]:
    """Return for each listed image whether the store has no live sample of it."""
    return StoredIds(store).positions(outline.keys) < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """Live samples of a store that the source no longer has."""

    store: Store
    shards: NDArray[np.int64]  # [N] ordinals
    keys: NDArray[np.bytes_]  # [N]

    def __len__(self) -> int:
        return len(self.keys)

    def digests(self) -> list[bytes]:
        return [key.tobytes() for key in self.keys.view(f"V{DIGEST_BYTES}")]

    def ids(self, most: int | None = None) -> list[str]:
        """Return the ids, sorted. `most` limits them to the first by digest, since each id is read from its shard."""
        found = zip(self.shards[:most].tolist(), self.digests()[:most], strict=True)
        return sorted(self.store.record_of(shard, digest).id for shard, digest in found)


def not_in_source(store: Store, outline: Outline) -> Gone:
    """Return the live samples of a store that the source no longer has."""
    stored = StoredIds(store)
    gone = stored.not_among(outline.keys)
    return Gone(store=store, shards=stored.shards_of(gone), keys=stored.keys[gone])


@dataclass(frozen=True, slots=True, kw_only=True)
class Drops:
    """The samples that a run drops."""

    rejected: list[str]  # ids of samples whose images are now rejected
    pruned: Pruning
    too_many_rejects: bool  # more than --max-rejects: nothing is dropped


def drops(config: PackConfig, store: Store, outline: Outline, account: RunSummary) -> Drops:
    """Choose the samples of a store's generation that a run drops."""
    too_many = not reject_limit(config.max_rejects).allows(len(account.rejects), of=outline.num_items)
    pruned = Pruning(digests=[], ids=[])
    if config.prune is not None:
        limit = prune_limit(config.prune)
        pruned = pruning(store, config.source, outline, account, limit, too_many=too_many)
    return Drops(rejected=[] if too_many else account.dropped, pruned=pruned, too_many_rejects=too_many)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """The samples that `--prune` drops."""

    digests: list[bytes]
    ids: list[str]  # at most NAMED
    why_not: str | None = None  # why some or all of what is gone is kept
    num_refused: int = 0  # samples that are kept because they are more than --prune allows


def pruning(store: Store, source: str, outline: Outline, account: RunSummary, limit: Limit, *, too_many: bool) -> Pruning:
    """Choose the samples to prune; none if they are more than `limit`.

    None either if any image was unreadable, since others may only be out of reach. Samples below an existing empty folder are
    kept: it may be the mount point of an unmounted disk.
    """
    if too_many:
        return Pruning(digests=[], ids=[], why_not="more images were rejected than --max-rejects allows")
    if account.unreadable:
        return Pruning(digests=[], ids=[], why_not=_why_unread(account))
    found = _gone(store, source, outline)
    number, of = len(found.digests), store.manifest.samples
    if limit.allows(number, of=of):
        return found
    why = f"{number} of {counted(of, 'sample')} would be dropped, --prune allows {limit}"
    return Pruning(digests=[], ids=[], why_not=why, num_refused=number)


def _why_unread(account: RunSummary) -> str:
    """Return why nothing is pruned if images could not be read: the first of them, and what to do."""
    first = account.unreadable_first[0]
    detail = next(reject.detail for reject in account.rejects if reject.id == first)
    is_link = LEADS_OUT in detail
    steps = "add --follow-links, or remove the link" if is_link else "make it readable, or remove it if it is gone for good"
    found = f"{counted(account.unreadable, 'image')} could not be read, and others may be out of reach as well"
    return f"{found}: {first} ({detail}); {steps}, and prune again"


def _gone(store: Store, source: str, outline: Outline) -> Pruning:
    """Choose all samples that the source no longer has, except those below an empty folder."""
    gone = not_in_source(store, outline)
    inside = tuple(f"{folder}/" for folder in outline.empty_folders)
    ids = gone.ids() if inside else []
    kept = next((sample_id for sample_id in ids if sample_id.startswith(inside)), None)
    if kept is None:
        return Pruning(digests=gone.digests(), ids=gone.ids(NAMED_IDS))
    folder = next(folder for folder in outline.empty_folders if kept.startswith(f"{folder}/"))
    path = f"{source.rstrip('/')}/{folder}"
    why = f"{path} is empty, like the mount point of an unmounted disk; remove the folder if its images are gone"
    pruned = [sample_id for sample_id in ids if not sample_id.startswith(inside)]
    return Pruning(digests=[*map(sample_digest, pruned)], ids=pruned[:NAMED_IDS], why_not=why)
