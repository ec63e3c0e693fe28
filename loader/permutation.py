"""A keyed bijection on [0, n), computed per index, so that shuffling n rows takes no memory that grows with n.

Up to 65,536 it is a true permutation, made by sorting keyed hashes. Beyond, it is an unbalanced Feistel network over
ceil(log2 n) bits with cycle walking: a value that falls outside [0, n) is sent through again, which happens less than
once per index on average, since the domain is less than twice n.

The hash is our own because numpy's and torch's permutations are not promised to stay the same across versions.

Source: the idea of a shuffle as a function of the index is google/grain's `index_shuffle`; Feistel networks over two
halves of unequal width and cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

SORTED_BELOW = 1 << 16
ROUNDS = 12  # small halves (8 and 9 bits at the least) mix slowly; tests/property/test_permutation.py measures it
_MASK = (1 << 64) - 1
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash each 64-bit word to a 64-bit word, bijectively.

    Source: the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
    """
    values = values + np.uint64(_GAMMA)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))


def key_of(*words: int) -> int:
    """Hash a sequence of integers to one 64-bit key."""
    key = np.zeros(1, dtype=np.uint64)
    for word in words:
        key = mix(key ^ mix(np.array([word & _MASK], dtype=np.uint64)))
    return int(key[0])


def permute(index: NDArray[np.int64], n: int, key: int) -> NDArray[np.int64]:
    """Give where the bijection `key` on [0, n) sends each index.

    >>> sorted(permute(np.arange(5), 5, key=7).tolist())
    [0, 1, 2, 3, 4]
    """
    if n <= SORTED_BELOW:
        return _sorted_order(n, key)[index].astype(np.int64)
    return _feistel_walk(index, n, key)


@functools.lru_cache(maxsize=512)  # 128 KiB each at most: a bucket needs two passes at a time
def _sorted_order(n: int, key: int) -> NDArray[Any]:
    hashes = mix(mix(np.arange(n, dtype=np.uint64)) ^ np.uint64(key))
    return np.argsort(hashes, kind="stable").astype(np.uint16)


def _feistel_walk(index: NDArray[np.int64], n: int, key: int) -> NDArray[np.int64]:
    bits = (n - 1).bit_length()
    low_bits = bits // 2
    keys = mix(np.uint64(key) ^ np.arange(ROUNDS, dtype=np.uint64))
    values = index.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], bits - low_bits, low_bits, keys)
        outside = values >= np.uint64(n)
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], high_bits: int, low_bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Send each value of `high_bits + low_bits` bits through the network: the halves hash into one another in turn."""
    low_mask, high_mask = np.uint64((1 << low_bits) - 1), np.uint64((1 << high_bits) - 1)
    low, high = values & low_mask, values >> np.uint64(low_bits)
    for number, key in enumerate(keys):
        if number % 2 == 0:
            high = high ^ (mix(low ^ key) & high_mask)
        else:
            low = low ^ (mix(high ^ key) & low_mask)
    return (high << np.uint64(low_bits)) | low
