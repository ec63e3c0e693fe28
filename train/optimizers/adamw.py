"""AdamW of torch, and the same with moments, weights or both in bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.adamw import adamw

from bucketline.train.parallel import local

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from bucketline.train.optimizers.stepping import Groups, Options
    from bucketline.train.rounding import Rounding


def make(_model: nn.Module, groups: Groups, options: Options) -> torch.optim.Optimizer:
    """Return AdamW with 32-bit moments."""
    if options.rounds_weights:
        return RoundedAdamW(groups, options, moments=torch.float32)
    return torch.optim.AdamW(groups, lr=options.learning_rate, fused=True)


def make_bf16(_model: nn.Module, groups: Groups, options: Options) -> torch.optim.Optimizer:
    """Return AdamW with bf16 moments."""
    return RoundedAdamW(groups, options, moments=torch.bfloat16)


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW that computes in 32 bits by torch's fused step and keeps moments, weights or both in bf16.

    All are rounded stochastically: rounded to the nearest, a second moment with a beta of 0.999 would never fall again.
    """

    _step_supports_amp_scaling = True  # torch's name for: the step itself looks up `found_inf`
    found_inf: torch.Tensor | None = None
    grad_scale: torch.Tensor | None = None  # what it divides gradients by

    def __init__(self, groups: Groups, options: Options, *, moments: torch.dtype) -> None:
        """`moments`: their dtype; the weights keep theirs."""
        super().__init__(groups, {"lr": options.learning_rate, "betas": (0.9, 0.999), "eps": 1e-8})
        self.rounding: Rounding = options.rounding
        self._moments = moments

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient, one at a time: only one has 32-bit copies."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=self._moments, requires_grad=False)
        kept = [local(tensor) for tensor in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"])]
        wide = [tensor.float() for tensor in kept]
        assert parameter.grad is not None
        adamw(
            [wide[0]],
            [local(parameter.grad).float()],
            [wide[1]],
            [wide[2]],
            [],
            [state["step"]],
            fused=True,
            found_inf=self.found_inf,
            grad_scale=self.grad_scale,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for tensor, result in zip(kept, wide, strict=True):
            if tensor is not result:
                self.rounding.round_(tensor, result)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state as it is; torch would cast it to the weights' dtype."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, entry in state_dict["state"].items():
            device = parameters[number].device
            self.state[parameters[number]] = {name: value.to(device) for name, value in entry.items()}
