"""In-memory index of a store's live samples, to detect unchanged images without a look-up in every shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.store.format.hashing import DIGEST_BYTES, sample_digest
from bucketline.store.shard.reader import as_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bucketline.ingest.parallel.shares import Share
    from bucketline.store import Store
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
    of shards (`python -m bucketline.bench scale --listing`).
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
    samples, is_kept, digests = shard.entry.samples, shard.live_entries(), shard.keys()
    if share is not None:
        is_kept &= share.of(digests)
    is_val = np.array([name.startswith("val/") for name in shard.index.metadata["groups"]], dtype=bool)
    derived: dict[str, NDArray[Any]] = {"digest": digests, _HELD_OUT: is_val[shard.index.slice("bucket", 0, samples)]}
    return {name: (derived[name] if name in derived else shard.index.slice(name, 0, samples))[is_kept] for name in names}
