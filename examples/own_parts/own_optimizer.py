"""Lion (Chen et al. 2023, arXiv 2302.06675) for the trainer: `--optimizer own_optimizer:Lion --learning-rate 1e-5`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class Lion(torch.optim.Optimizer):
    """Steps by the sign of a momentum, which is all that it keeps: 4 bytes a weight."""

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:  # noqa: ANN401 - as torch's
        """Take groups of weights, each with its weight decay."""
        super().__init__(groups, {"lr": lr, "betas": betas})

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
