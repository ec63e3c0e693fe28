"""Compare a listing with a store: which images are new, which are gone, and which of those may be dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
class SampleChanges:
    """What becomes of a store's samples whose images are rejected, unreadable or gone: a part of the result of a run."""

    pruned: int  # samples dropped because their images are no longer in the source
    pruned_ids: list[str]  # of these and the following, at most NAMED_IDS
    not_pruned: str | None  # why --prune kept some or all of what is no longer in the source
    not_pruned_beyond_limit: int  # samples that --prune kept because they are more than --prune allows
    not_in_source: int  # samples that are kept though their images are no longer in the source
    not_in_source_ids: list[str]
    dropped: int  # samples dropped because their images are now rejected
    dropped_ids: list[str]
    kept_unreadable: int  # samples whose images or captions could not be read; they are kept
    kept_unreadable_ids: list[str]
    kept_beyond_limit: int  # samples kept although their images are rejected, because there are too many rejects
    too_many_rejects: bool  # more than --max-rejects: nothing is dropped


def sample_changes(
    config: PackConfig, store: Store, outline: Outline, account: RunSummary
) -> tuple[list[bytes], dict[str, Any]]:
    """Return the digests of the samples of a store's generation that a run drops, and the fields of `SampleChanges`.

    None is pruned if these are more than the limit. None either if any image was unreadable, since others may only be out of
    reach. Samples below an existing empty folder are kept: it may be the mount point of an unmounted disk.
    """
    too_many = not reject_limit(config.max_rejects).allows(len(account.rejects), of=outline.num_items)
    rejected = [] if too_many else account.dropped
    gone = not_in_source(store, outline)
    pruned, pruned_ids, why, num_refused = list[bytes](), list[str](), None, 0
    if config.prune is not None and too_many:
        why = "more images were rejected than --max-rejects allows"
    elif config.prune is not None and account.unreadable:
        why = _why_unread(account)
    elif config.prune is not None:
        limit = prune_limit(config.prune)
        pruned, pruned_ids, why = _prunable(config.source, outline, gone)
        if not limit.allows(len(pruned), of=store.manifest.samples):
            of, num_refused = counted(store.manifest.samples, "sample"), len(pruned)
            why = f"{num_refused} of {of} would be dropped, --prune allows {limit}"
            pruned, pruned_ids = [], []
    if not pruned:
        kept_ids = gone.ids(NAMED_IDS)
    else:
        are_pruned = {*pruned}
        kept_ids = [] if len(pruned) == len(gone) else [one for one in gone.ids() if sample_digest(one) not in are_pruned]
    return [*map(sample_digest, rejected), *pruned], {
        "pruned": len(pruned),
        "pruned_ids": pruned_ids,
        "not_pruned": why,
        "not_pruned_beyond_limit": num_refused,
        "not_in_source": len(gone) - len(pruned),
        "not_in_source_ids": kept_ids[:NAMED_IDS],
        "dropped": len(rejected),
        "dropped_ids": rejected[:NAMED_IDS],
        "kept_unreadable": len(account.kept),
        "kept_unreadable_ids": account.kept[:NAMED_IDS],
        "kept_beyond_limit": len(account.dropped) - len(rejected),
        "too_many_rejects": too_many,
    }


def _why_unread(account: RunSummary) -> str:
    """Return why nothing is pruned if images could not be read: the first of them, and what to do."""
    first = account.unreadable_first[0]
    detail = next(reject.detail for reject in account.rejects if reject.id == first)
    is_link = LEADS_OUT in detail
    steps = "add --follow-links, or remove the link" if is_link else "make it readable, or remove it if it is gone for good"
    found = f"{counted(account.unreadable, 'image')} could not be read, and others may be out of reach as well"
    return f"{found}: {first} ({detail}); {steps}, and prune again"


def _prunable(source: str, outline: Outline, gone: Gone) -> tuple[list[bytes], list[str], str | None]:
    """Return the digests and first ids of the samples to prune: all but those below an empty folder; and why not these."""
    inside = tuple(f"{folder}/" for folder in outline.listing.empty_folders)
    ids = gone.ids() if inside else []
    kept = next((sample_id for sample_id in ids if sample_id.startswith(inside)), None)
    if kept is None:
        return gone.digests(), gone.ids(NAMED_IDS), None
    folder = next(folder for folder in outline.listing.empty_folders if kept.startswith(f"{folder}/"))
    path = f"{source.rstrip('/')}/{folder}"
    why = f"{path} is empty, like the mount point of an unmounted disk; remove the folder if its images are gone"
    pruned = [sample_id for sample_id in ids if not sample_id.startswith(inside)]
    return [*map(sample_digest, pruned)], pruned[:NAMED_IDS], why
