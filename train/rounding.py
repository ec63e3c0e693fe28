"""Stochastic rounding of 32-bit values to bf16, with random numbers that depend only on the seed and the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

LOW_BITS = 16  # of a 32-bit float that a bf16 lacks


class Rounding:
    """Round up or down at random, so that updates smaller than a bf16's last bit are right on average instead of lost.

    A resumed run draws the same numbers, and so do all ranks of DDP.
    """

    def __init__(self, seed: int, purpose: int = 0) -> None:
        """`purpose` tells several users of one seed apart."""
        self._key = (seed, purpose)
        self._step = self._seeds = 0
        self._generators: dict[torch.device, torch.Generator] = {}

    def begin(self, step: int) -> None:
        """Start the random numbers of an optimizer step (from 0)."""
        self._step, self._seeds = step, 0
        self._generators.clear()

    def seed(self) -> int:
        """Return another seed of the step's random numbers, 32 bits."""
        self._seeds += 1
        return int(np.random.SeedSequence((*self._key, self._step, self._seeds)).generate_state(1)[0])

    def rounded(self, values: Tensor) -> Tensor:
        """Return float32 values as ones that a bf16 can hold; those that are such stay as they are."""
        generator = self._generators.get(values.device)
        if generator is None:
            generator = self._generators[values.device] = torch.Generator(values.device).manual_seed(self.seed())
        noise = torch.empty_like(values, dtype=torch.int32).random_(0, 1 << LOW_BITS, generator=generator)
        # Adding to the bits of a float moves it away from 0, by one bf16 if the low bits carry; then they are cut off.
        return noise.add_(values.view(torch.int32)).bitwise_and_(-1 << LOW_BITS).view(torch.float32)
