"""Prodigy (Mishchenko and Defazio 2023, arXiv 2306.06101), of prodigyopt: AdamW that finds its learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prodigyopt import Prodigy

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from bucketline.train.config import TrainConfig

SLICE = 11  # of a weight's values, every which one the rate is found from; its authors' choice where memory is short


def make_prodigy(_model: nn.Module, groups: list[dict[str, Any]], config: TrainConfig, *, compiled: bool) -> Optimizer:
    """Return Prodigy as its authors set it for diffusion; `config.learning_rate` multiplies the rate that it finds."""
    del compiled
    prodigy: Optimizer = Prodigy(
        groups,
        lr=config.learning_rate or 1.0,  # it takes no 0; each step sets the rate
        use_bias_correction=True,
        safeguard_warmup=True,
        slice_p=SLICE,
    )
    return prodigy
