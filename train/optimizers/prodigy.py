"""Prodigy (Mishchenko and Defazio 2023, arXiv 2306.06101), of prodigyopt: AdamW that finds its learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prodigyopt import Prodigy

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from bucketline.train.optim import Groups, Options

SLICE = 11  # of a weight's values, every which one the rate is found from; its authors' choice where memory is short


def make(_model: nn.Module, groups: Groups, options: Options) -> Optimizer:
    """Return Prodigy as its authors recommend it for diffusion models; `learning_rate` multiplies the rate that it finds."""
    prodigy: Optimizer = Prodigy(
        groups,
        lr=options.learning_rate or 1.0,  # it takes no 0; each step sets the rate
        use_bias_correction=True,
        safeguard_warmup=True,
        slice_p=SLICE,
    )
    return prodigy
