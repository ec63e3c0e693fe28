"""The arguments with which every optimizer is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bucketline.train.rounding import Rounding

Groups = list[dict[str, Any]]
"""Groups of weights, each with its weight decay, as torch's optimizers take them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The settings of an optimizer."""

    learning_rate: float
    betas: tuple[float, float]
    rounding: Rounding
    rounds_weights: bool  # they are bf16
    compiled: bool
