"""Counter-based random numbers, keyed by (seed, step, position in the global batch), never by a rank's generator.

So two ranks draw what one rank draws, no random state has to be saved, and a resumed run is exact. The code is integer
arithmetic on 64-bit words and elementwise functions: it runs on any device, without a sync, and inside a compiled graph.

Letters: B rows of a batch.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from bucketline.loader.plan.permutation import key_of, mix

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

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
    own = int(mix(np.array([purpose], dtype=np.uint64)).view(np.int64)[0])
    return _mix(keys ^ own)


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
