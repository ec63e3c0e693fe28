"""Several stores as one: their shards side by side, their rows one after the other, each store's as often as asked for.

A bucket's rows are numbered store after store, in the order given, and repeat after repeat within a store: with 10 rows of
`a` once and 4 of `b` twice, rows 0 to 9 are a's, 10 to 13 b's, and 14 to 17 the same four again. So a pass reads a store's
rows as often as its repeats say, and every other promise of the plan holds as for one store. One store by itself is not
wrapped, and costs nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from bucketline.errors import FingerprintError, UsageError
from bucketline.store import Bucket, Store
from bucketline.store.json_difference import first_difference
from bucketline.store.reader import OpenShards
from bucketline.store.typed_json import encode

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bucketline.store.manifest import BucketEntry

# Rules that say which pictures are taken, into which bucket, and which are held out; not how a row's values come about.
_FREE_RULES = ("grid", "max_upscale", "min_size_px", "split")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreShare:
    """A store, and how often a pass reads its rows."""

    store: Store
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise UsageError(f"{self.store.path} is to be repeated {self.repeats} times, expected 1 or more")


StoreLike: TypeAlias = "Store | StoreShare | Path | str"
Stores: TypeAlias = "StoreLike | Sequence[StoreLike]"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreArgument:
    """What a command line says of a store: `photos.store`, or `photos.store:3` to read its rows three times a pass."""

    path: Path
    repeats: int


def parse_store(text: str) -> StoreArgument:
    """Read a command line's word for a store; a path that is there wins over what looks like repeats.

    Raises:
        UsageError: where the repeats are 0.
    """
    path, colon, number = text.rpartition(":")
    if not colon or not path or not (number.isascii() and number.isdecimal()) or Path(text).exists():
        return StoreArgument(path=Path(text), repeats=1)
    if int(number) < 1:
        raise UsageError(f"{text} asks for {int(number)} repeats, expected 1 or more")
    return StoreArgument(path=Path(path), repeats=int(number))


def open_shares(stores: Stores) -> tuple[StoreShare, ...]:
    """Open what is not open yet: each store, in the order given. A path may end in its repeats, as `parse_store` reads it.

    Raises:
        UsageError: where there is no store, or one is given twice.
        StoreError: where one cannot be opened.
    """
    every = stores if isinstance(stores, Sequence) and not isinstance(stores, str) else [stores]
    shares = tuple(map(_open_share, every))
    if not shares:
        raise UsageError("no store is given, expected one or more")
    seen: dict[str, StoreShare] = {}
    for share in shares:
        before = seen.setdefault(share.store.manifest.store_id, share)
        if before is not share:
            raise UsageError(
                f"{before.store.path} and {share.store.path} are the same store ({share.store.manifest.store_id}); give it "
                f"once, with repeats: {before.store.path}:{before.repeats + share.repeats}"
            )
    return shares


def _open_share(store: StoreLike) -> StoreShare:
    if isinstance(store, StoreShare):
        return store
    if isinstance(store, Store):
        return StoreShare(store=store)
    asked = parse_store(str(store))
    return StoreShare(store=Store.open(asked.path), repeats=asked.repeats)


def join(shares: Sequence[StoreShare]) -> OpenShards:
    """Give one view over the shares: the store itself, where there is one and its rows come once.

    Raises:
        FingerprintError: where two stores were made differently; it names the field, both stores and both values.
    """
    first = shares[0]
    if len(shares) == 1 and first.repeats == 1:
        return first.store
    for share in shares[1:]:
        _expect_alike(first.store, share.store)
    return JoinedStores(shares)


class JoinedStores(OpenShards):
    """The shards of several stores, numbered one after the other, and their buckets joined by name."""

    def __init__(self, shares: Sequence[StoreShare]) -> None:
        """Join stores that were made alike; see `join`, which checks it.

        Raises:
            FingerprintError: where a bucket's columns differ between two stores.
        """
        self.shares = tuple(shares)
        stores = [share.store for share in shares]
        super().__init__(
            where=" and ".join(store.where for store in stores),
            generations=",".join(f"{share.store.generations}x{share.repeats}" for share in shares),
            shards=[shard for store in stores for shard in store.shards],
            buckets=_joined_buckets(stores),
            specs={name: spec for store in reversed(stores) for name, spec in store.specs.items()},
            text=stores[0].text,
            encoders=stores[0].encoders,
        )

    def _open_bucket(self, entry: BucketEntry) -> Bucket:
        return _RepeatedBucket(self, entry, [(len(share.store.shards), share.repeats) for share in self.shares])


class _RepeatedBucket(Bucket):
    """A bucket of several stores: a row's number is first made one of the rows without repeats, which are found as ever."""

    def __init__(self, stores: JoinedStores, entry: BucketEntry, shares: Sequence[tuple[int, int]]) -> None:
        super().__init__(stores, entry)
        num_shards, repeats = np.array(shares, dtype=np.int64).T
        ends = np.concatenate([[0], self._ends])[np.cumsum(num_shards)]  # of each store's rows, without repeats
        self._own_rows = np.diff(ends, prepend=0)
        self._own_starts = ends - self._own_rows
        self._repeated_ends = np.cumsum(self._own_rows * repeats)
        self._repeated_starts = self._repeated_ends - self._own_rows * repeats

    @property
    def num_rows(self) -> int:
        """Rows that a pass reads: live rows, over all shards, as often as their store is repeated."""
        return int(self._repeated_ends[-1])

    def _live(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        store = np.searchsorted(self._repeated_ends, rows, side="right")
        within = (rows - self._repeated_starts[store]) % self._own_rows[store]
        live: NDArray[np.int64] = self._own_starts[store] + within
        return live


def _expect_alike(one: Store, other: Store) -> None:
    """Refuse two stores whose rows cannot come in one run: other encoders, other text columns, pictures made otherwise."""
    made = [
        {
            "encoders": manifest.encoders,
            "rules": {name: rule for name, rule in manifest.rules.items() if name not in _FREE_RULES},
            "text": encode(manifest.text),
        }
        for manifest in (one.manifest, other.manifest)
    ]
    if difference := first_difference(made[0], made[1], ""):
        _refuse(one, other, *difference)


def _joined_buckets(stores: Sequence[Store]) -> list[BucketEntry]:
    """Give every bucket once, by name, after comparing its columns in all stores that have it."""
    holders: dict[str, tuple[Store, BucketEntry]] = {}
    for store in stores:
        for entry in store.manifest.buckets:
            holder, held = holders.setdefault(entry.name, (store, entry))
            if difference := first_difference(encode(held.columns), encode(entry.columns), f"buckets.{entry.name}.columns"):
                _refuse(holder, store, *difference)
    return [entry for _, (_, entry) in sorted(holders.items())]


def _refuse(one: Store, other: Store, field: str, value: object, other_value: object) -> None:
    raise FingerprintError(
        f"{one.path} and {other.path} cannot be read together: {field} is {value!s:.200} in the first and {other_value!s:.200} "
        "in the second; pack one of them anew with the other's settings, or train on one"
    )
