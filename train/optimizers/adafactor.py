"""Adafactor (Shazeer and Stern 2018, arXiv 1804.04235), of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

    from bucketline.train.optim import Groups, Options


def make(_model: nn.Module, groups: Groups, options: Options) -> torch.optim.Optimizer:
    """Return Adafactor; its learning rate is the largest step relative to a weight's root mean square."""
    return torch.optim.Adafactor(groups, lr=options.learning_rate)
