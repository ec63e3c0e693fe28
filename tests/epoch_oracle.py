"""The batches that a loader delivers, written down from the plan's definition in plain Python: no plan, no loader, no arrays.

For `window=None` and buckets of at most 65,536 rows, whose order is a sort of hashes. Letters: n rows of a bucket, G its
global batch, E epochs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bucketline.loader import Batch, Loader, Remainder
from bucketline.store import Store

_WORD = (1 << 64) - 1
_PASS, _STEPS, _KEYS = 1, 2, 3  # purposes of keys


@dataclass(frozen=True, slots=True)
class Micro:
    """A micro-batch."""

    step: int
    micro_step: int
    epoch: int
    bucket: str
    ids: tuple[bytes, ...]
    weight: tuple[float, ...]
    keys: tuple[int, ...]


def as_micro(batch: Batch) -> Micro:
    return Micro(
        step=batch.step,
        micro_step=batch.micro_step,
        epoch=batch.epoch,
        bucket=batch.bucket,
        ids=tuple(row.tobytes() for row in batch.ids.numpy()),
        weight=tuple(batch.weight.tolist()),
        keys=tuple(batch.keys.tolist()),
    )


def micros(batches: Iterable[Batch]) -> list[Micro]:
    return [as_micro(batch) for batch in batches]


def rows_of(stores: Sequence[tuple[Store, int]], split: str = "train") -> dict[str, list[bytes]]:
    """Return each bucket's digests in the order of its rows, store after store and repeat after repeat, sorted by bucket."""
    found: dict[str, list[bytes]] = {}
    for store, repeats in stores:
        for bucket in store.buckets(split):
            rows = bucket.read(np.arange(bucket.num_rows), "id")
            found.setdefault(bucket.name, []).extend([row.tobytes() for row in rows] * repeats)
    return dict(sorted(found.items()))


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """The epochs of a loader."""

    rows: Mapping[str, Sequence[bytes]]  # by bucket
    batch_size: int  # of a rank's micro-batch
    accumulation: int = 1
    ranks: int = 1
    seed: int = 0
    remainder: Remainder = Remainder.CARRY
    epochs: int | None = None

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.accumulation * self.ranks

    def epoch(self, number: int, rank: int = 0) -> list[Micro]:
        first, each = sum(len(self._batches(before)) for before in range(number)), self.batch_size
        found = []
        for place, (bucket, batch) in enumerate(self._batches(number)):
            step = first + place
            rows = [self._row(bucket, batch, position) for position in range(self.global_batch)]
            of_step = _mix(_key(self.seed, _KEYS) ^ _mix(step))
            for micro in range(self.accumulation):
                begin = (rank * self.accumulation + micro) * each
                own = range(begin, begin + each)
                found.append(
                    Micro(
                        step=step,
                        micro_step=micro,
                        epoch=number,
                        bucket=bucket,
                        ids=tuple(rows[at][0] for at in own),
                        weight=tuple(rows[at][1] for at in own),
                        keys=tuple(_signed(_mix(_mix(at) ^ of_step)) for at in own),
                    )
                )
        return found

    def _batches(self, number: int) -> list[tuple[str, int]]:
        """Return (bucket, number of its batch) of an epoch's steps, in order."""
        listed = [
            (bucket, batch)
            for bucket, rows in self.rows.items()
            for batch in range(self._before(len(rows), number), self._before(len(rows), number + 1))
        ]
        ordered = [listed[place] for place in _order(len(listed), _key(self.seed, _STEPS, number))]
        if self.remainder is Remainder.CARRY and self.epochs == number + 1:
            size = self.global_batch
            ordered += [
                (bucket, self.epochs * len(rows) // size)
                for bucket, rows in self.rows.items()
                if self.epochs * len(rows) % size
            ]
        return ordered

    def _before(self, n: int, epoch: int) -> int:
        size = self.global_batch
        if self.remainder is Remainder.CARRY:
            return epoch * n // size
        return epoch * (n // size if self.remainder is Remainder.DROP else -(-n // size))

    def _row(self, bucket: str, batch: int, position: int) -> tuple[bytes, float]:
        """Return the digest and the weight of a position in a bucket's global batch."""
        rows, size = self.rows[bucket], self.global_batch
        n = len(rows)
        if self.remainder is Remainder.CARRY:
            place = batch * size + position
            weight = 1.0 if self.epochs is None or place < self.epochs * n else 0.0
            number, at = divmod(place - size if weight == 0 and n >= size else place, n)
        else:
            per_pass = self._before(n, 1)
            number, within = divmod(batch, per_pass)
            at = within * size + position
            weight, at = (1.0, at) if at < n else (0.0, (at - n) % n)
        name = int.from_bytes(hashlib.blake2b(bucket.encode(), digest_size=8).digest(), "little")
        return rows[_order(n, _key(self.seed, _PASS, name, number))[at]], weight


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def _key(*words: int) -> int:
    key = 0
    for word in words:
        key = _mix(key ^ _mix(word & _WORD))
    return key


_ORDERS: dict[tuple[int, int], list[int]] = {}


def _order(n: int, key: int) -> list[int]:
    """Return 0 to n - 1, sorted by the upper 48 bits of a keyed hash, then by the number."""
    if (n, key) not in _ORDERS:
        _ORDERS[n, key] = sorted(range(n), key=lambda number: (_mix(_mix(number) ^ key) >> 16, number))
    return _ORDERS[n, key]


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def epochs_of(loader: Loader, count: int) -> list[list[Micro]]:
    return [micros(loader) for _ in range(count)]
