"""Determine the live rows of a merged store: each id is live once.

Shards are identified by id, so that copies of one store share them. Letters: n live samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.store.format.hashing import DIGEST_BYTES
from bucketline.store.format.text_block import is_bucket
from bucketline.store.shard.reader import KEY

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.read.store import Store
    from bucketline.store.shard.reader import SealedShard

_NAMED = 5  # ids that an error lists by name


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedShard:
    """A shard of the merged store."""

    shard: SealedShard  # from the first store that lists it
    dropped: dict[str, NDArray[np.uint32]]  # sorted row numbers by bucket; buckets without dropped rows are left out
    record_bytes: int  # of live rows
    samples: int  # live rows


@dataclass(slots=True)
class _Samples:
    """Live samples sorted by digest, with the number of each one's shard."""

    keys: NDArray[np.bytes_]  # [n]
    shard: NDArray[np.int64]  # [n]
    store: NDArray[np.int64]  # [n] ordinal of the sample's store


def merged_parts(stores: Sequence[Store], *, replace: bool) -> tuple[list[MergedShard], int]:
    """Return the shards to merge, in store order, and how many rows are replaced by a later store's.

    If two stores list the same shard, a row is live if it is live in either. Shards without live rows are left out.

    Raises:
        StoreError: if two stores have a sample of the same id, without `replace`.
        CorruptError: if two stores have different files of one shard.
    """
    numbers: dict[str, int] = {}
    shards: list[SealedShard] = []
    merged = _Samples(keys=np.empty(0, dtype=KEY), shard=np.empty(0, dtype=np.int64), store=np.empty(0, dtype=np.int64))
    num_replaced = 0
    for ordinal, store in enumerate(stores):
        for shard in store.shards:
            number = numbers.setdefault(shard.entry.shard_id, len(shards))
            if number == len(shards):
                shards.append(shard)
            elif len(shard.entry.added) > len(shards[number].entry.added):  # a copy to which a column was added
                shards[number] = shard
            _refuse_other_files(shards[number], shard)
        own = _samples_of(store, ordinal, numbers)
        num_replaced += _join(merged, own, stores, replace=replace)
    parts = [part_of(shard, merged.keys[merged.shard == number]) for number, shard in enumerate(shards)]
    return [part for part in parts if part.samples], num_replaced


def _refuse_other_files(first: SealedShard, other: SealedShard) -> None:
    one, two = first.entry, other.entry
    if (one.lmdb, one.extents, one.index) != (two.lmdb, two.extents, two.index):
        raise CorruptError(
            f"{first.paths.lmdb} and {other.paths.lmdb} have the same shard id, {one.shard_id}, and different content; "
            "run `store verify` on both stores"
        )


def _samples_of(store: Store, ordinal: int, numbers: dict[str, int]) -> _Samples:
    keys, places = [np.empty(0, dtype=KEY)], [np.empty(0, dtype=np.int64)]
    for shard in store.shards:
        own = shard.keys()[shard.live_entries()]
        keys.append(own)
        places.append(np.full(len(own), numbers[shard.entry.shard_id], dtype=np.int64))
    joined = np.concatenate(keys)
    order = np.argsort(joined, kind="stable")
    return _Samples(
        keys=joined[order], shard=np.concatenate(places)[order], store=np.full(len(joined), ordinal, dtype=np.int64)
    )


def _join(merged: _Samples, own: _Samples, stores: Sequence[Store], *, replace: bool) -> int:
    """Add a store's samples to those merged so far. Return how many of these are replaced."""
    at = np.searchsorted(merged.keys, own.keys)
    known = np.zeros(len(own.keys), dtype=bool)
    inside = at < len(merged.keys)
    known[inside] = merged.keys[at[inside]] == own.keys[inside]
    clash = known.copy()
    clash[known] = merged.shard[at[known]] != own.shard[known]
    if clash.any() and not replace:
        _refuse(own.keys[clash], stores, merged.store[at[clash]], own.store[clash])
    merged.shard[at[clash]] = own.shard[clash]
    merged.store[at[known]] = own.store[known]
    keys = np.concatenate([merged.keys, own.keys[~known]])
    order = np.argsort(keys, kind="stable")
    merged.keys = keys[order]
    merged.shard = np.concatenate([merged.shard, own.shard[~known]])[order]
    merged.store = np.concatenate([merged.store, own.store[~known]])[order]
    return int(np.count_nonzero(clash))


def _refuse(keys: NDArray[np.bytes_], stores: Sequence[Store], first: NDArray[np.int64], second: NDArray[np.int64]) -> None:
    def name(store: Store, key: bytes) -> str:
        digest = key.ljust(DIGEST_BYTES, b"\0")
        return next((shard.record(entry).id for shard in store.shards if (entry := shard.find(digest))), digest.hex())

    def place(n: int) -> tuple[Path | str, Path | str]:
        return stores[int(first[n])].place, stores[int(second[n])].place

    named = [
        f"{name(stores[int(second[n])], key)!r} is in {place(n)[0]} and in {place(n)[1]}" for n, key in enumerate(keys[:_NAMED])
    ]
    more = f", and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    raise StoreError(
        f"{len(keys)} samples are in two stores: {'; '.join(named)}{more}; "
        "drop them from one of the stores, or use --replace to keep the later store's"
    )


def part_of(shard: SealedShard, keys: NDArray[np.bytes_]) -> MergedShard:
    """Return a shard in which only the given samples are live."""
    live = np.zeros(shard.entry.samples, dtype=bool)
    live[shard.positions(keys)] = True
    rows = shard.index.slice("row", 0, shard.entry.samples)
    buckets = shard.index.slice("bucket", 0, shard.entry.samples)
    dropped = {
        group: np.sort(rows[(buckets == number) & ~live])
        for number, group in enumerate(shard.index.metadata["groups"])
        if is_bucket(group)
    }
    return MergedShard(
        shard=shard,
        dropped={group: gone for group, gone in dropped.items() if len(gone)},
        record_bytes=int(shard.index.slice("record_bytes", 0, shard.entry.samples)[live].sum(dtype=np.int64)),
        samples=int(np.count_nonzero(live)),
    )
