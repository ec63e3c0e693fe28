"""What a store knows of its live samples, so that an unchanged image is told from a new one without asking every shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import CorruptError
from bucketline.store.digests import DIGEST_BYTES, sample_digest
from bucketline.store.sealed_shard import KEY, as_keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bucketline.store import Store
    from bucketline.store.sealed_shard import SealedShard

_COLUMNS = ("source_bytes", "source_mtime_ns", "captions", "content")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """What tells whether an image is the one that was packed."""

    source_bytes: int
    source_mtime_ns: int
    captions: int  # checksum
    content: bytes  # digest of its file


class StoredSamples:
    """All live samples of a store's generation by id, 64 bytes of memory each; safe to use from several threads.

    One search takes a twentieth of what a look-up in a shard's index does, and a store may have hundreds of shards
    (`python -m bucketline.bench ingest_again`).
    """

    def __init__(self, store: Store) -> None:
        """Read the indexes.

        Raises:
            CorruptError: where one is damaged.
        """
        parts = [_live(shard) for shard in store.shards]
        keys = np.concatenate([as_keys([]), *(part["digest"] for part in parts)])
        empty = {name: np.empty((0, DIGEST_BYTES) if name == "content" else 0, dtype="u1") for name in _COLUMNS}
        columns = (np.concatenate([part[name] for part in parts or [empty]]) for name in _COLUMNS)
        self._bytes, self._mtime_ns, self._captions, self._content = columns
        # stable: of a sample that two shards have, the first shard's, as a look-up shard by shard finds it
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]

    def find(self, sample_id: str) -> StoredSample | None:
        """Look a sample up; None where the store has no live row of it."""
        key = as_keys([sample_digest(sample_id)])
        at = int(np.searchsorted(self._keys, key)[0])
        if at == len(self._keys) or self._keys[at] != key[0]:
            return None
        position = self._order[at]
        return StoredSample(
            source_bytes=int(self._bytes[position]),
            source_mtime_ns=int(self._mtime_ns[position]),
            captions=int(self._captions[position]),
            content=self._content[position].tobytes(),
        )


def _live(shard: SealedShard) -> dict[str, NDArray[Any]]:
    """Read the columns of a shard's live samples; digests as keys, contents `[samples, 16]` as bytes."""
    samples, groups = shard.entry.samples, shard.index.metadata["groups"]
    bucket, row = (shard.index.slice(name, 0, samples) for name in ("bucket", "row"))
    if samples and int(bucket.max()) >= len(groups):
        raise CorruptError(f"{shard.paths.index}: an entry names a bucket that the shard does not have; run `store verify`")
    is_live = np.ones(samples, dtype=bool)
    for number, name in enumerate(groups):
        dropped = shard.dropped_rows(name)
        if len(dropped):
            is_live &= ~((bucket == number) & np.isin(row, dropped))
    found = {name: shard.index.slice(name, 0, samples)[is_live] for name in ("digest", *_COLUMNS)}
    return {**found, "digest": np.ascontiguousarray(found["digest"]).reshape(-1).view(KEY)}
