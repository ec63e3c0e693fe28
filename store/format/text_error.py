"""The error of quantised tokens, measured when they are quantised.

Shape letters: T tokens, D a token's width, N captions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TextError:
    """The error of the quantised tokens of a shard's captions, or of a store's, measured when they were quantised."""

    captions: int
    relative_mean: float
    relative_max: float
    cosine_mean: float
    cosine_min: float
    channel_mean: float
    channel_max: float

    def __post_init__(self) -> None:
        cosines = [self.cosine_mean, self.cosine_min]
        errors = [self.relative_mean, self.relative_max, self.channel_mean, self.channel_max]
        is_possible = all(-1.0 <= cosine <= 1.0 + 1e-6 for cosine in cosines) and all(0.0 <= error < np.inf for error in errors)
        if not is_possible or self.captions < 1:
            raise ValueError(f"the tokens of {self.captions} captions have the cosines {cosines} and errors {errors}")

    def __str__(self) -> str:
        return (
            f"relative {self.relative_mean:.2%} (at most {self.relative_max:.2%}), "
            f"cosine {self.cosine_mean:.5f} (at least {self.cosine_min:.5f}), "
            f"worst channel {self.channel_mean:.2%} (at most {self.channel_max:.2%})"
        )

    @classmethod
    def of(cls, errors: NDArray[np.float32]) -> TextError:
        """Return the error of captions from what `measured_error` returned of each, `[N, 3]`."""
        relative, cosine, channel = errors.astype(np.float64).T
        return cls(
            captions=len(errors),
            relative_mean=_short(relative.mean()),
            relative_max=_short(relative.max()),
            cosine_mean=_short(cosine.mean()),
            cosine_min=_short(cosine.min()),
            channel_mean=_short(channel.mean()),
            channel_max=_short(channel.max()),
        )

    @classmethod
    def joined(cls, errors: Iterable[TextError | None]) -> TextError | None:
        """Return the error of all captions of which it is known; None if it is known of none."""
        parts = [error for error in errors if error is not None]
        if not parts:
            return None
        count = sum(part.captions for part in parts)

        def mean(name: str) -> float:
            return _short(sum(part.captions * getattr(part, name) for part in parts) / count)

        return cls(
            captions=count,
            relative_mean=mean("relative_mean"),
            relative_max=max(part.relative_max for part in parts),
            cosine_mean=mean("cosine_mean"),
            cosine_min=min(part.cosine_min for part in parts),
            channel_mean=mean("channel_mean"),
            channel_max=max(part.channel_max for part in parts),
        )


def _short(value: float) -> float:
    return float(f"{value:.7g}")


def measured_error(tokens: NDArray[np.float32], delivered: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """Return the error of a caption's tokens, `[T, D]`, as three numbers.

    Relative: root mean square of the error over that of the tokens. Cosine: the smallest similarity of a token and what is
    delivered for it. Worst channel: the largest error of one of the D channels, relative to the channel's own values or to the
    median channel's, whichever are larger, so that a channel of nearly nothing does not count. Where all values are zero, the
    errors are 0 and the similarity is 1.
    """
    error = delivered.astype(np.float32) - tokens

    def by_token(one: NDArray[np.float32], two: NDArray[np.float32]) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = np.einsum("td,td->t", one, two).astype(np.float64)
        return sums

    given, change, shared = by_token(tokens, tokens), by_token(error, error), by_token(tokens, error)
    found = np.maximum(given + 2 * shared + change, 0)  # of what is delivered
    lengths, product = np.sqrt(given) + np.sqrt(found), np.sqrt(given * found)
    longer = np.divide(2 * shared + change, lengths, out=np.zeros_like(given), where=lengths > 0)
    # 1 - cosine, of which the difference of two numbers near 1 would leave nothing
    distance = np.divide(change - np.square(longer), 2 * product, out=(given > 0).astype(np.float64), where=product > 0)
    power = np.einsum("td,td->d", tokens, tokens)
    by_channel = _share(np.einsum("td,td->d", error, error), np.maximum(power, np.median(power)))
    relative = _share(change.sum(), given.sum())
    cosine = 1 - distance.clip(0, 2).max(initial=0.0)
    return np.array([relative, cosine, by_channel.max(initial=0.0)], dtype=np.float32)


def _share(error: Any, power: Any) -> NDArray[np.float64]:  # noqa: ANN401 - arrays or numbers
    error, power = np.asarray(error, dtype=np.float64), np.asarray(power, dtype=np.float64)
    share: NDArray[np.float64] = np.sqrt(np.divide(error, power, out=np.zeros_like(error), where=power > 0))
    return share
