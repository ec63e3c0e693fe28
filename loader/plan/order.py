"""Keyed randomness without state: a bijection on [0, n), computed per index, and counter-based random numbers.

Up to n = 65,536 it is a true permutation, made by sorting keyed hashes; recent ones are cached, 64 MiB at most. Above that,
it is a Feistel network with cycle walking. Its two halves are numbers, not bits: an index is high x b + low, with high below
a = ceil(sqrt(n)) and low below b = ceil(n / a), and each half is added to a hash of the other, modulo a or b. a x b exceeds n
by less than a, so a value falls outside [0, n) and is sent through again with a probability below 1 / sqrt(n), for any n.
(With halves of whole bits, every second value is sent through again just above a power of two, at several times the cost.)

We use our own hash because numpy and torch do not guarantee that their permutations stay the same across versions.

Source: google/grain's `index_shuffle` for a shuffle as a function of the index; Black and Rogaway, "Ciphers with Arbitrary
Finite Domains", 2002, for Feistel networks over two halves of any size (the "generalized Feistel cipher") and cycle walking.
"""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from enum import IntEnum
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray
    from torch import Tensor


SORTED_BELOW = 1 << 16
_FEW = 1024  # numbers of a permutation
_KEPT_BYTES = 64 << 20  # of cached permutations: 512 of the largest, or 32,000 of a thousand rows
ROUNDS = 12  # small halves (at least 256 values) mix slowly; tests/property/test_permutation.py measures it
_MASK = (1 << 64) - 1
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash each 64-bit word to a 64-bit word, bijectively.

    Source: the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
    """
    values = values + np.uint64(_GAMMA)
    values ^= values >> np.uint64(30)
    values *= np.uint64(_FIRST)
    values ^= values >> np.uint64(27)
    values *= np.uint64(_SECOND)
    values ^= values >> np.uint64(31)
    return values


def mix_word(value: int) -> int:
    """Hash one word like `mix`; a numpy call on a single word costs ten times as much."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def key_of(*words: int) -> int:
    """Hash a sequence of integers to one 64-bit key."""
    key = 0
    for word in words:
        key = extend_key(key, word)
    return key


def extend_key(key: int, word: int) -> int:
    """Return the key of a sequence extended by one integer: `key_of(a, b)` is `extend_key(key_of(a), b)`."""
    return mix_word(key ^ mix_word(word & _MASK))


def permute(index: NDArray[np.int64], n: int, key: int) -> NDArray[np.int64]:
    """Return the image of each index under the bijection `key` on [0, n).

    >>> sorted(permute(np.arange(5), 5, key=7).tolist())
    [0, 1, 2, 3, 4]
    """
    return permute_all([(index, n, key)])


def permute_all(parts: Sequence[tuple[NDArray[np.int64], int, int]]) -> NDArray[np.int64]:
    """Return `permute` of each part, concatenated, with fewer numpy calls.

    A part is (indices `[P]`, n, key). All parts too large to sort go through one network together.
    """
    ends = np.cumsum([len(index) for index, _, _ in parts]).tolist()
    values = np.empty(ends[-1] if ends else 0, dtype=np.int64)
    large = []
    orders = _ORDERS.orders([(n, key) for _, n, key in parts if n <= SORTED_BELOW])
    for (index, n, key), end in zip(parts, ends, strict=True):
        if n <= SORTED_BELOW:
            values[end - len(index) : end] = orders[n, key][index]
        else:
            large.append((end, index, n, key))
    if not large:
        return values
    lengths = [len(index) for _, index, _, _ in large]
    indices = np.concatenate([index for _, index, _, _ in large])
    together = _feistel_walk(indices, lengths, [n for *_, n, _ in large], [key for *_, key in large])
    begin = 0
    for (end, *_), length in zip(large, lengths, strict=True):
        values[end - length : end] = together[begin : begin + length]
        begin += length
    return values


class _SortedOrders:
    """An LRU cache of sorted permutations, limited in bytes."""

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._orders: OrderedDict[tuple[int, int], NDArray[Any]] = OrderedDict()
        self.num_bytes = 0
        self.renew_lock()

    def renew_lock(self) -> None:
        """Replace the lock: in a forked child, a thread that no longer exists may hold it."""
        self._lock = threading.Lock()

    def orders(self, wanted: Sequence[tuple[int, int]]) -> dict[tuple[int, int], NDArray[Any]]:
        """Return the permutation of each (n, key), `[n]`."""
        with self._lock:
            found = {one: self._orders[one] for one in wanted if one in self._orders}
            for one in found:
                self._orders.move_to_end(one)
        made = _sorted_orders(dict.fromkeys(one for one in wanted if one not in found))
        with self._lock:
            for one in made.keys() - self._orders.keys():
                self._orders[one] = made[one]
                self.num_bytes += made[one].nbytes + _OVERHEAD_BYTES
            while self.num_bytes > self._kept_bytes:
                self.num_bytes -= self._orders.popitem(last=False)[1].nbytes + _OVERHEAD_BYTES
        return found | made


_OVERHEAD_BYTES = 512  # per entry, in addition to the numbers themselves
_ORDERS = _SortedOrders(_KEPT_BYTES)
os.register_at_fork(after_in_child=_ORDERS.renew_lock)


def _sorted_orders(wanted: Collection[tuple[int, int]]) -> dict[tuple[int, int], NDArray[Any]]:
    """Sort [0, n) of each (n, key) by a 48-bit hash, then by the number. Both are packed into one word, which sorts fastest.

    Those of few numbers are hashed together: the calls for one would take as long as sorting a thousand numbers.
    """
    orders = {}
    few = [one for one in wanted if one[0] <= _FEW]
    for own in filter(None, [few, *([one] for one in wanted if one[0] > _FEW)]):
        sizes = [n for n, _ in own]
        numbers = np.concatenate([np.arange(n, dtype=np.uint64) for n in sizes])
        words = mix(mix(numbers) ^ np.repeat(np.array([key for _, key in own], dtype=np.uint64), sizes))
        words &= np.uint64(_MASK ^ 0xFFFF)
        words |= numbers
        for one, end in zip(own, accumulate(sizes), strict=True):
            order = words[end - one[0] : end]
            order.sort()
            orders[one] = order.astype(np.uint16)
    return orders


def _feistel_walk(
    index: NDArray[np.int64], lengths: Sequence[int], sizes: Sequence[int], keys: Sequence[int]
) -> NDArray[np.int64]:
    """Apply `_feistel` to runs of indices, each with a size and a key, until every value is below its size."""
    n, high, low = (
        np.repeat(np.array(column, dtype=np.uint64), lengths)
        for column in (sizes, *zip(*(_halves(size) for size in sizes), strict=True))
    )
    rounds = mix(np.array(keys, dtype=np.uint64) ^ np.arange(ROUNDS, dtype=np.uint64)[:, None])
    round_keys = np.repeat(rounds, lengths, axis=1)
    values = _feistel(index.astype(np.uint64), high, low, round_keys)
    while (outside := values >= n).any():
        values[outside] = _feistel(values[outside], high[outside], low[outside], round_keys[:, outside])
    return values.view(np.int64)


def _halves(n: int) -> tuple[int, int]:
    """Return the number of values (a, b) of each half of an index: a x b is at least n and exceeds it by less than a."""
    high = math.isqrt(n - 1) + 1
    return high, -(-n // high)


def _feistel(
    values: NDArray[np.uint64],
    num_high: NDArray[np.uint64],
    num_low: NDArray[np.uint64],
    keys: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """Apply the network: add to each half in turn a hash of the other. `keys`: `[R, B]`."""
    high = values // num_low
    low = values - high * num_low
    for number in range(0, ROUNDS, 2):
        high = (high + _hash(low, keys[number])) % num_high
        low = (low + _hash(high, keys[number + 1])) % num_low
    return high * num_low + low


def _hash(values: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash words with a key to 48 bits: the two multiplications of `mix`, keeping the upper bits, which mix best."""
    values = values ^ key
    values ^= values >> np.uint64(30)
    values *= np.uint64(_FIRST)
    values ^= values >> np.uint64(27)
    values *= np.uint64(_SECOND)
    values >>= np.uint64(16)
    return values


# ------------------------------------------------------------------------------------------------------------------------- rng
# Counter-based random numbers, keyed by (seed, step, position in the global batch), never by a rank's generator.
#
# So two ranks draw what one rank draws, no random state has to be saved, and a resumed run is exact. The code is integer
# arithmetic on 64-bit words and elementwise functions: it runs on any device, without a sync, and inside a compiled graph.
#
# Letters: B rows of a batch.

_KEYS = 3  # purpose of a key; the plan uses 1 and 2


class Purpose(IntEnum):
    """Purpose of a draw. Draws for different purposes are independent."""

    CAPTION = 1
    CAPTION_DROPOUT = 2
    FLIP = 3
    NOISE = 4
    TIMESTEP = 5
    POSTERIOR = 6
    NOISE_OFFSET = 7


def keys_of_rows(seed: int, steps: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the key of each row, `[B]`. `steps` and `positions` in the step's global batch: `[B]` each."""
    of_step = mix(np.uint64(key_of(seed, _KEYS)) ^ mix(steps.view(np.uint64)))  # `key_of(seed, _KEYS, step)` of each
    return mix(mix(positions.astype(np.uint64)) ^ of_step).view(np.int64)


def uniform_on_host(keys: NDArray[np.int64], purpose: Purpose) -> NDArray[np.float64]:
    """Draw one number in [0, 1) per key, `[B]`, equal to the result of `uniform`."""
    words = mix(keys.view(np.uint64) ^ mix(np.array([purpose], dtype=np.uint64)))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform(keys: Tensor, purpose: Purpose) -> Tensor:
    """Draw one number in [0, 1) per key: `[B]` float64, on the keys' device. `keys`: `[B]` int64."""
    import torch

    return (_shift(_words(keys, purpose), 11)).to(torch.float64) * 2.0**-53


def normal(keys: Tensor, purpose: Purpose, shape: tuple[int, ...]) -> Tensor:
    """Draw standard normals: `[B, *shape]` float32, on the keys' device. `keys`: `[B]` int64.

    Element i of a row depends only on its key and i.

    Source: Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958.
    """
    import torch

    num = math.prod(shape)
    pairs = torch.arange(-(-num // 2), device=keys.device, dtype=torch.int64)
    words = _mix(_words(keys, purpose)[:, None] + pairs * _signed(0x9E3779B97F4A7C15))
    first = (_shift(words, 32).to(torch.float32) + 0.5) * 2.0**-32
    second = (words & 0xFFFFFFFF).to(torch.float32) * (2.0 * math.pi * 2.0**-32)
    radius = torch.sqrt(-2.0 * torch.log(first.clamp(max=1.0)))
    values = torch.stack([radius * torch.cos(second), radius * torch.sin(second)], dim=-1)
    return values.flatten(1)[:, :num].reshape(-1, *shape)


def _words(keys: Tensor, purpose: Purpose) -> Tensor:
    word = int(mix(np.array([purpose], dtype=np.uint64)).view(np.int64)[0])
    return _mix(keys ^ word)


def _mix(values: Tensor) -> Tensor:
    """Apply `permutation.mix` to int64 tensors, whose arithmetic wraps."""
    values = values + _signed(0x9E3779B97F4A7C15)
    values = (values ^ _shift(values, 30)) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ _shift(values, 27)) * _signed(0x94D049BB133111EB)
    return values ^ _shift(values, 31)


def _shift(values: Tensor, bits: int) -> Tensor:
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
