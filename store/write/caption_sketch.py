"""Compare the embeddings of a caption that comes again, within an encoder's rounding, which differs from batch to batch.

Of each array of floats a few sums with fixed random signs are kept. The distance of two such sketches estimates the distance of
the arrays (Alon, Matias and Szegedy 1996, "The space complexity of approximating the frequency moments"), so that the
embeddings of a shard's captions need not stay in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.store.format.hashing import checksum
from bucketline.store.write.arrays import bits_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUM_SUMS = 64
_SAME = 0.1  # of the larger norm: rounding in 16 bits gives some 0.01, another caption 0.3 and more


@dataclass(frozen=True, slots=True)
class CaptionSketch:
    """A few numbers of a caption's arrays, to compare them with others."""

    exact: int  # checksum of names, dtypes and shapes, and of values that are not finite floats
    sums: NDArray[np.float32]  # [arrays of floats, NUM_SUMS]

    @classmethod
    def of(cls, given: object) -> CaptionSketch:
        """Return the sketch of a caption's arrays as they were given to `add`."""
        exact: list[bytes | memoryview] = []
        sums: list[NDArray[np.float32]] = []
        for name, value in sorted(given.items()) if isinstance(given, Mapping) else [("", given)]:
            for own, one in value.items() if isinstance(value, Mapping) else [("", value)]:
                kind, data = bits_of(one)
                floats = _floats(one)
                summed = None if floats is None else _sums(floats)
                is_summed = summed is not None and bool(np.isfinite(summed).all())
                exact += [f"{name}/{own}:{kind}".encode(), b"" if is_summed else data]
                if summed is not None and is_summed:
                    sums.append(summed)
        return cls(checksum(*exact), np.array(sums, np.float32).reshape(-1, NUM_SUMS))

    def is_like(self, other: CaptionSketch) -> bool:
        """Return whether two sketches are of the same embedding."""
        if self.exact != other.exact:
            return False
        one, two = (own.sums.astype(np.float64) for own in (self, other))  # whose squares may be beyond 32 bits
        norms = np.maximum(np.linalg.norm(one, axis=1), np.linalg.norm(two, axis=1))
        return bool((np.linalg.norm(one - two, axis=1) <= _SAME * norms).all())


def _floats(value: Any) -> NDArray[np.float32] | None:  # noqa: ANN401 - as `bits_of`
    if hasattr(value, "detach"):
        return value.detach().float().cpu().numpy().reshape(-1) if value.is_floating_point() else None
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind != "f":
        return None
    if value.dtype.itemsize <= np.dtype(np.float32).itemsize:  # no number is out of range, and no microsecond spent on it
        return np.asarray(value, np.float32).reshape(-1)
    with np.errstate(over="ignore"):
        return np.asarray(value, np.float32).reshape(-1)


def _sums(values: NDArray[np.float32]) -> NDArray[np.float32]:
    rows = -(-len(values) // NUM_SUMS)
    padded = np.zeros(rows * NUM_SUMS, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is compared exactly
        np.multiply(values, _signs(len(values)), out=padded[: len(values)])
        summed: NDArray[np.float32] = padded.reshape(rows, NUM_SUMS).sum(axis=0)
    return summed


@lru_cache(maxsize=8)
def _signs(count: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).choice(np.array([-1, 1], np.float32), count)
