"""Lion (Chen et al. 2023, arXiv 2302.06675) as an optimizer of the trainer: `--optimizer lion`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bucketline.train.optim import OptimizerKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from bucketline.train.optim import Groups, Options

LION = OptimizerKind(make="own_optimizer:make", learning_rate=1e-5, shards=True)


def make(_model: nn.Module, groups: Groups, options: Options) -> torch.optim.Optimizer:
    """Return Lion for the groups, each with its weight decay."""
    return Lion(groups, {"lr": options.learning_rate, "betas": (0.9, 0.99)})


class Lion(torch.optim.Optimizer):
    """Steps by the sign of a momentum, which is all that it keeps: 4 bytes a weight."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            of_update, of_momentum = group["betas"]
            for weight in (one for one in group["params"] if one.grad is not None):
                momentum = self.state[weight].setdefault("exp_avg", torch.zeros_like(weight))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(group["lr"] * momentum.lerp(weight.grad, 1 - of_update).sign())
                momentum.lerp_(weight.grad, 1 - of_momentum)
