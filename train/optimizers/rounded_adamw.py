"""AdamW of weights in bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.adamw import adamw

from bucketline.train.ema import Rounding
from bucketline.train.parallel import local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from bucketline.train.config import TrainConfig


CHUNK_VALUES = 1 << 24  # with 32-bit copies at a time: 64 MiB each of weights, gradients and random numbers


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW that computes in 32 bits by torch's fused step, keeps 32-bit moments, and rounds weights in bf16 stochastically.

    Weights are updated as many at a time as have `CHUNK_VALUES` values: only these have 32-bit copies, and it is the number of
    kernels that small weights cost. torchao's keeps moments in bf16 as well, rounded to the nearest: with a beta of 0.999 a
    second moment would never fall again.
    """

    _step_supports_amp_scaling = True  # torch's name for: the step itself looks up `found_inf`
    found_inf: torch.Tensor | None = None
    grad_scale: torch.Tensor | None = None  # what it divides gradients by

    def __init__(self, groups: list[dict[str, Any]], config: TrainConfig) -> None:
        super().__init__(groups, {"lr": config.learning_rate, "betas": config.betas.pair, "eps": config.betas.eps})
        self.rounding = Rounding(config.seed)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for chunk in _chunks(parameter for parameter in group["params"] if parameter.grad is not None):
                self._update(chunk, group)

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        return state

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        states = [self._state_of(parameter) for parameter in parameters]
        weights = [local(parameter.detach()) for parameter in parameters]  # norms of a model in bf16 can have 32 bits
        narrow = [weight for weight in weights if weight.dtype is not torch.float32]
        flat = torch.empty(sum(weight.numel() for weight in narrow), device=parameters[0].device)
        wide = _laid_out(flat, narrow)
        if narrow:
            torch._foreach_copy_(wide, narrow)
        wider = iter(wide)
        adamw(
            [weight if weight.dtype is torch.float32 else next(wider) for weight in weights],
            _in_32_bits([local(parameter.grad) for parameter in parameters if parameter.grad is not None]),
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
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
        if narrow:
            torch._foreach_copy_(narrow, _laid_out(self.rounding.rounded(flat), narrow))


def _chunks(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield weights in lists of up to `CHUNK_VALUES` values, or of one larger weight."""
    chunk: list[torch.Tensor] = []
    num_values = 0
    for parameter in parameters:
        num_values += parameter.numel()
        if chunk and num_values > CHUNK_VALUES:
            yield chunk
            chunk, num_values = [], parameter.numel()
        chunk.append(parameter)
    if chunk:
        yield chunk


def _in_32_bits(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors as float32, by one kernel for all."""
    if all(tensor.dtype is torch.float32 for tensor in tensors):
        return tensors
    wide = _laid_out(torch.empty(sum(map(torch.Tensor.numel, tensors)), device=tensors[0].device), tensors)
    torch._foreach_copy_(wide, tensors)
    return wide


def _laid_out(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return parts of a flat tensor, one after another, in the shapes and memory layouts of others."""
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.as_strided(tensor.shape, tensor.stride()) for part, tensor in zip(parts, like, strict=True)]
