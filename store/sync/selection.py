"""Some rows of a store: by split, bucket, or pattern of the id."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import UsageError
from bucketline.store.format.hashing import sample_digest
from bucketline.store.shard.reader import KEY, as_keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.shard.reader import SealedShard

_WILD = re.compile(r"[*?]")


@dataclass(frozen=True)
class PullSelection:
    """Rows that satisfy every condition given: of one split, of some buckets, with an id that matches a pattern."""

    split: str | None = None
    buckets: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()  # ids, or patterns of * and ?, `boats/*.png`; brackets are themselves, as in many files' names

    @property
    def is_all(self) -> bool:
        return self.split is None and not self.buckets and not self.ids

    @property
    def reads_records(self) -> bool:
        """True if ids have to be read from the shards' files: for patterns, since the index has only digests of ids."""
        return any(map(_WILD.search, self.ids))

    def refuse_unknown(self, manifest: Manifest, where: str) -> None:
        """Check that the buckets exist.

        Raises:
            UsageError: if one does not, or no bucket is of the split.
        """
        names = [bucket.name for bucket in manifest.buckets]
        for name in self.buckets:
            if name not in names:
                raise UsageError(f"{where} has no bucket {name!r}; it has {', '.join(names) or 'none'}")
        if self.split is not None and not any(bucket.split == self.split for bucket in manifest.buckets):
            raise UsageError(f"{where} has no rows of the split {self.split!r}")

    def has_bucket(self, name: str) -> bool:
        """Return whether rows of a bucket may be selected."""
        return (not self.buckets or name in self.buckets) and self.split in (None, name.partition("/")[0])

    def keys(self, shard: SealedShard) -> NDArray[np.bytes_]:
        """Return the digests of a shard's selected live rows, as `as_keys` does. Reads the shard's file for patterns."""
        keys, samples = shard.keys(), shard.entry.samples
        groups = shard.index.metadata["groups"]
        of_bucket = np.array([self.has_bucket(name) for name in groups], dtype=bool)
        chosen = shard.live_entries() & of_bucket[shard.index.slice("bucket", 0, samples)]
        if self.ids and not self.reads_records:
            chosen &= np.isin(keys, self._exact)
        elif self.ids:
            for position in np.flatnonzero(chosen).tolist():
                sample_id = shard.record(shard.index_entry(position)).id
                chosen[position] = any(pattern.fullmatch(sample_id) for pattern in self._patterns)
        found: NDArray[np.bytes_] = keys[chosen]
        return found

    @cached_property
    def _exact(self) -> NDArray[np.bytes_]:
        return as_keys([sample_digest(sample_id) for sample_id in self.ids]).astype(KEY)

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        return [re.compile(fnmatch.translate(pattern.replace("[", "[[]"))) for pattern in self.ids]
