"""AdamW with moments, weights or both in bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.adamw import adamw

from bucketline.train.parallel import local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

    from bucketline.train.ema import Rounding
    from bucketline.train.optim import Groups, Options


CHUNK_VALUES = 1 << 24  # with 32-bit copies at a time: 64 MiB each of weights, gradients, both moments and random numbers
_MOMENTS = ("exp_avg", "exp_avg_sq")


def make_fp32(_model: nn.Module, groups: Groups, options: Options) -> torch.optim.Optimizer:
    """Return AdamW with 32-bit moments of bf16 weights."""
    return RoundedAdamW(groups, options, moments=torch.float32)


def make_bf16(_model: nn.Module, groups: Groups, options: Options) -> torch.optim.Optimizer:
    """Return AdamW with bf16 moments."""
    return RoundedAdamW(groups, options, moments=torch.bfloat16)


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW that computes in 32 bits by torch's fused step and keeps moments, weights or both in bf16.

    All are rounded stochastically: rounded to the nearest, as torchao's AdamW does, a second moment with a beta of 0.999 would
    never fall again. Weights are updated as many at a time as have `CHUNK_VALUES` values: only these have 32-bit copies, and
    it is the number of kernels that small weights cost.
    """

    _step_supports_amp_scaling = True  # torch's name for: the step itself looks up `found_inf`
    found_inf: torch.Tensor | None = None
    grad_scale: torch.Tensor | None = None  # what it divides gradients by

    def __init__(self, groups: Groups, options: Options, *, moments: torch.dtype) -> None:
        """`moments`: their dtype; the weights keep theirs."""
        super().__init__(groups, {"lr": options.learning_rate, "betas": options.betas.pair, "eps": options.betas.eps})
        self.rounding: Rounding = options.rounding
        self._moments = moments

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
            for name in _MOMENTS:
                state[name] = torch.zeros_like(parameter, dtype=self._moments, requires_grad=False)
        return state

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        states = [self._state_of(parameter) for parameter in parameters]
        each = [
            [local(tensor) for tensor in (parameter.detach(), *(state[name] for name in _MOMENTS))]
            for parameter, state in zip(parameters, states, strict=True)
        ]
        narrow = [tensor for tensors in each for tensor in tensors if tensor.dtype is not torch.float32]
        flat = torch.empty(sum(tensor.numel() for tensor in narrow), device=parameters[0].device)
        wide = _laid_out(flat, narrow)
        if narrow:  # not of weights and moments in 32 bits only
            torch._foreach_copy_(wide, narrow)
        wider = iter(wide)
        computed = [[tensor if tensor.dtype is torch.float32 else next(wider) for tensor in tensors] for tensors in each]
        weights, first, second = map(list, zip(*computed, strict=True))
        adamw(
            weights,
            _in_32_bits([local(parameter.grad) for parameter in parameters if parameter.grad is not None]),
            first,
            second,
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state as it is; torch would cast it to the weights' dtype."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, entry in state_dict["state"].items():
            device = parameters[number].device
            self.state[parameters[number]] = {name: value.to(device) for name, value in entry.items()}


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
