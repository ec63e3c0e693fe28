"""The part of a listing that a store has: which images are unchanged, without a look-up in every shard, and which are gone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.command_line import counted
from bucketline.errors import UsageError
from bucketline.ingest.rules import HeldOut, prune_limit, reject_limit, split_draw
from bucketline.ingest.sources.source import LEADS_OUT, split_of
from bucketline.store.format.block import DIGEST_BYTES, sample_digest
from bucketline.store.shard.reader import as_keys

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from numpy.typing import NDArray

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.parallel.items import Outline, Share
    from bucketline.ingest.sources.source import Listing, SourceItem
    from bucketline.ingest.summary import RunSummary
    from bucketline.store import Manifest, Store
    from bucketline.store.shard.reader import SealedShard


_HELD_OUT = "is_held_out"  # derived, not a column of the index: True for rows of the validation split
_COLUMNS = ("source_bytes", "source_mtime_ns", "captions", "content", _HELD_OUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSample:
    """A sample's properties in the store, to detect whether its image changed."""

    shard: int  # its ordinal in the store
    source_bytes: int
    source_mtime_ns: int
    captions: int  # checksum
    content: bytes  # digest of its file
    is_held_out: bool


class StoredIds:
    """The live samples of a store's generation by the digest of their id; 24 bytes of memory each.

    The digests of all shards are sorted together, so comparing them with a listing takes a single search, whatever the number
    of shards.
    """

    def __init__(self, store: Store, columns: Sequence[str] = (), share: Share | None = None) -> None:
        """Read the digests, and `columns` into `self.columns`; `share` limits them to the samples of one rank."""
        parts = [_live(shard, ("digest", *columns), share) for shard in store.shards]
        keys = np.concatenate([as_keys([]), *(part["digest"] for part in parts)])
        empty = {name: np.empty((0, DIGEST_BYTES) if name == "content" else 0, dtype="u1") for name in columns}
        self.columns = {name: np.concatenate([part[name] for part in parts or [empty]]) for name in columns}
        self._ends = np.cumsum([len(part["digest"]) for part in parts], dtype=np.int64)
        # stable: if two shards have a sample, the first one wins, as in a look-up shard by shard
        self.order = np.argsort(keys, kind="stable")
        self.keys = keys[self.order]

    def __len__(self) -> int:
        return len(self.keys)

    def positions(self, keys: NDArray[np.bytes_]) -> NDArray[np.int64]:
        """Return the positions of samples in `keys` and `order`, given `as_keys` of their digests; -1 if not in the store."""
        found = np.full(len(keys), -1, dtype=np.int64)
        if not len(self.keys):
            return found
        if len(keys) == 1:
            order = np.zeros(1, dtype=np.int64)
        else:
            order = np.argsort(keys)  # neighbours are then searched in succession, on pages that are already cached
            keys = keys[order]
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        is_there = self.keys[at] == keys
        found[order[is_there]] = at[is_there]
        return found

    def shards_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ordinals of the shards that hold the samples at `positions`."""
        return np.searchsorted(self._ends, self.order[positions], side="right")

    def not_among(self, listed: NDArray[np.bytes_]) -> NDArray[np.int64]:
        """Return the positions of the samples whose keys are not in `listed`."""
        is_listed = np.zeros(len(self.keys), dtype=bool)
        found = self.positions(listed)
        is_listed[found[found >= 0]] = True
        first = self.positions(self.keys[~is_listed])  # if two shards have a sample, `listed` finds only the first
        return np.flatnonzero(~is_listed)[~is_listed[first]]


class PackedIndex:
    """The live samples of a store's generation by id; 65 bytes of memory each; safe to use from several threads.

    A search takes a twentieth of the time of a look-up in one shard's index, and a store may have hundreds of shards
    (`python -m bucketline.bench pack --again`).
    """

    def __init__(self, store: Store, share: Share | None = None) -> None:
        """Read the indexes; with `share`, keep only the samples of one rank."""
        self._ids = StoredIds(store, _COLUMNS, share)

    def find(self, sample_id: str) -> PackedSample | None:
        """Return a sample by id; None if the store has no live row of it."""
        return self.find_all([sample_id])[0]

    def find_all(self, sample_ids: Sequence[str]) -> list[PackedSample | None]:
        """Return samples by id, in order; a search for many at once takes a tenth of the time of as many searches."""
        found = self._ids.positions(as_keys([*map(sample_digest, sample_ids)]))
        there = np.flatnonzero(found >= 0)
        at = found[there]
        shards, positions = self._ids.shards_of(at).tolist(), self._ids.order[at]
        sizes, mtimes, captions, contents, held_out = (self._ids.columns[name][positions] for name in _COLUMNS)
        numbers = zip(shards, sizes.tolist(), mtimes.tolist(), captions.tolist(), held_out.tolist(), strict=True)
        samples: list[PackedSample | None] = [None] * len(sample_ids)
        for n, content, (shard, num_bytes, mtime_ns, checksum, is_held_out) in zip(
            there.tolist(), contents, numbers, strict=True
        ):
            samples[n] = PackedSample(
                shard=shard,
                source_bytes=num_bytes,
                source_mtime_ns=mtime_ns,
                captions=checksum,
                content=content.tobytes(),
                is_held_out=is_held_out,
            )
        return samples


def _live(shard: SealedShard, names: Sequence[str], share: Share | None) -> dict[str, NDArray[Any]]:
    """Return columns of a shard's live samples: digests as keys, contents as bytes `[samples, 16]`."""
    is_kept, digests = shard.live_entries(), shard.keys()
    if share is not None:
        is_kept &= share.of(digests)
    is_val = np.array([name.startswith("val/") for name in shard.groups], dtype=bool)
    derived: dict[str, NDArray[Any]] = {"digest": digests, _HELD_OUT: is_val[shard.index["bucket"]]}
    return {name: (derived[name] if name in derived else shard.index[name])[is_kept] for name in names}


# ---------------------------------------------------------------------------------------------------------------- listing diff

NAMED_IDS = 10  # ids that a summary lists per count


def withdrawn_ids(manifest: Manifest | None, taken_back: Collection[str], listed: Iterable[str]) -> frozenset[str]:
    """Return the ids that a store withdrew (`store drop`), without those `taken_back`; `listed` are the source's ids.

    Raises:
        UsageError: if an id that is to be taken back is neither withdrawn nor in the source.
    """
    withdrawn = frozenset(() if manifest is None else manifest.withdrawn)
    if (unknown := {*taken_back} - withdrawn) and (unknown := unknown.difference(listed)):
        raise UsageError(
            f"--take-back {min(unknown)!r}: the store has not withdrawn it, and the source does not have it; expected an id "
            "that `store drop` took: the path in the source, with its extension"
        )
    return withdrawn.difference(taken_back)


def leave_out_withdrawn(listing: Listing, manifest: Manifest | None, taken_back: Collection[str]) -> int:
    """Take the images out of a listing whose ids are withdrawn; return their number. Raises what `withdrawn_ids` does."""
    found, withdrawn = len(listing.items), withdrawn_ids(manifest, taken_back, (item.id for item in listing.items))
    if withdrawn:
        listing.items[:] = [item for item in listing.items if item.id not in withdrawn]
    return found - len(listing.items)


def hold_out_one(items: list[SourceItem], rule: HeldOut, store: Store | None) -> None:
    """Hold out the image with the smallest hash, or its folder, if a fraction above 0 would hold out none. Changes `items`.

    One that the store holds out is taken first, one that it trains on last. Nothing changes if they all have one hash, such as
    a single image.
    """
    if not rule.fraction or any(split_of(item, rule) == "val" for item in items):
        return
    stored = [None] * len(items) if store is None else PackedIndex(store).find_all([item.id for item in items])
    drawn = [split_draw(item.id, rule.by) for item in items]
    usable = {number for number, item in zip(drawn, items, strict=True) if item.caption_error is None}
    known = [(number, one.is_held_out) for number, one in zip(drawn, stored, strict=True) if one is not None]
    if len({*drawn}) > 1 and usable:
        held, new = {number for number, is_held_out in known if is_held_out}, usable.difference(number for number, _ in known)
        chosen = min(held or new or usable)
        items[:] = [replace(item, held_out=True) if at == chosen else item for at, item in zip(drawn, items, strict=True)]


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
