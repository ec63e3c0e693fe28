"""Check that the spread of unscaled latents is that of their VAE.

Letters: C latent channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import SourceError
from bucketline.ingest.importers.cache import Scaling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MAX_FACTOR = 2.0  # of a source's spread, over or under its VAE's; scaling factors make it 2.8 to 7.7 but for SD3's 1.5
MAX_FACTOR_OF_ONE = 4.0  # of one sample over its VAE's, or of one channel either way if only the mean over all is published


@dataclass(frozen=True, kw_only=True)
class ExpectedLatents:
    """Mean and spread of a VAE's latents."""

    name: str  # the VAE, as the user names it
    mean: NDArray[np.float64]  # [C] or [1]
    std: NDArray[np.float64]  # [C] or [1]

    @cached_property
    def _weights(self) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
        """Factors of the mean square and of the mean of each channel, and the rest, in the square of `factor_of`."""
        weights = self.std**-2.0
        return weights, -2.0 * self.mean * weights, float((self.mean**2 * weights).mean())

    def factor_of(self, moments: Moments) -> float:
        """Return what `overall(moments.factors(self))` does, in a few operations: it is called for each sample."""
        of_squares, of_sums, rest = self._weights
        each = of_squares * moments.squares + of_sums * moments.sums  # [C]
        found = float(each.sum()) / (moments.number * len(moments.squares)) + rest
        return math.sqrt(max(found, 0.0)) if math.isfinite(found) else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpread:
    """Mean and standard deviation of a source's latents by channel, next to those of the VAE."""

    samples: int
    mean: list[float]  # [C]
    std: list[float]  # [C]
    expected_mean: list[float]  # [C] or [1]
    expected_std: list[float]  # [C] or [1]
    factor: float  # root mean square around the expected mean, over the expected standard deviation

    def __str__(self) -> str:
        return (
            f"per channel mean {numbers(self.mean)} and spread {numbers(self.std)}, those of the VAE are "
            f"{numbers(self.expected_mean)} and {numbers(self.expected_std)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Sums over the positions of latents, by channel."""

    number: int
    sums: NDArray[np.float64]  # [C]
    squares: NDArray[np.float64]  # [C]

    @classmethod
    def of(cls, latent: NDArray[Any]) -> Moments:
        """Return the sums of one latent, `[C, …]`."""
        flat = latent.reshape(len(latent), -1)
        # not by BLAS, whose own threads would compete with those that read
        with np.errstate(all="ignore"):  # what is not finite is seen in the sums
            squares, sums = np.einsum("ij,ij->i", flat, flat), flat.sum(axis=1)
        return cls(number=flat.shape[1], sums=sums.astype(np.float64), squares=squares.astype(np.float64))

    def __add__(self, other: Moments) -> Moments:
        return Moments(number=self.number + other.number, sums=self.sums + other.sums, squares=self.squares + other.squares)

    @property
    def mean(self) -> NDArray[np.float64]:
        return self.sums / self.number

    @property
    def std(self) -> NDArray[np.float64]:
        found: NDArray[np.float64] = np.sqrt(np.maximum(self.squares / self.number - self.mean**2, 0.0))
        return found

    def factors(self, expected: ExpectedLatents) -> NDArray[np.float64]:
        """Return the root mean square around the VAE's mean, over its spread, `[C]`."""
        centred = self.squares - 2 * expected.mean * self.sums + self.number * expected.mean**2
        found: NDArray[np.float64] = np.sqrt(np.maximum(centred, 0.0) / self.number) / expected.std
        return found


def refuse_wrong_scale(
    latents: Sequence[NDArray[Any]], expected: ExpectedLatents, scaling: Scaling, source: str
) -> LatentSpread:
    """Check the spread of a source's unscaled latents, `[C, …]` each, against the VAE's.

    Raises:
        SourceError: if it is off by a factor of two; the message has both.
    """
    whole = reduce(add, map(Moments.of, latents))
    each = whole.factors(expected)
    found = LatentSpread(
        samples=len(latents),
        mean=whole.mean.tolist(),
        std=whole.std.tolist(),
        expected_mean=expected.mean.tolist(),
        expected_std=expected.std.tolist(),
        factor=overall(each),
    )
    limit = MAX_FACTOR if len(found.expected_std) > 1 else MAX_FACTOR_OF_ONE
    worst = farthest_from_1(each)
    if not 1 / MAX_FACTOR < found.factor < MAX_FACTOR or not 1 / limit < worst < limit:
        undone = "nothing was undone" if scaling is Scaling.NONE else "the VAE's scale and shift were undone"
        raise SourceError(
            f"{source}: its latents are not scaled as this format scales them, or not from the VAE of {expected.name} "
            f"({undone}): in {found.samples} of them their spread is {found.factor:.3g} times the VAE's, "
            f"in one channel {worst:.3g} times: "
            f"{found}. Name the model that made them, or import them as they are by --trust-scale"
        )
    return found


def overall(each: NDArray[np.float64]) -> float:
    """Return the root mean square over all channels, of those by channel; infinite if it is not a number."""
    found = float(np.sqrt(np.mean(each**2)))
    return found if np.isfinite(found) else float("inf")


def farthest_from_1(factors: NDArray[np.float64]) -> float:
    """Return the factor that is the largest, up or down."""
    return float(max(factors.tolist(), key=lambda factor: max(factor, 1 / max(factor, 1e-9))))


def numbers(values: Sequence[float]) -> str:
    """Return values as a message shows them, 16 at most."""
    shown = [f"{value:.3g}" for value in values[:16]]
    return ", ".join(shown) if len(shown) > 1 else shown[0]
