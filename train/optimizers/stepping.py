"""The options of all optimizers, the learning rate and random numbers of a step, and the skip of infinite gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from bucketline.train.rounding import Rounding

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


Groups = list[dict[str, Any]]
"""Groups of weights, each with its weight decay, as torch's optimizers take them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments with which every optimizer is made; the betas are Adam's own, 0.9 and 0.999."""

    learning_rate: float
    rounding: Rounding
    rounds_weights: bool  # they are bf16
    compiled: bool


def begin_step(optimizer: Optimizer, step: int, learning_rate: float) -> None:
    """Set the learning rate and the random numbers of optimizer step `step` (from 0)."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate
    if isinstance(rounding := getattr(optimizer, "rounding", None), Rounding):
        rounding.begin(step)


def update_weights(optimizer: Optimizer, norm: Tensor) -> None:
    """Update the weights unless the gradient's norm, [], is not finite, which changes neither weights nor state.

    torch's fused steps look that up on the device. The libraries' other steps cannot, so that the host waits for the norm.
    """
    if takes_found_inf(optimizer):
        optimizer.found_inf = norm.isfinite().logical_not().float()  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(norm.isfinite()):
        optimizer.step()


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step is skipped on the device where its `found_inf` is 1; torch's scaler asks the same."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def clips_in_step(optimizer: Optimizer, norm: Tensor, clip_norm: float) -> bool:
    """Have a fused step on a GPU clip gradients of a norm, [], as it reads them, which saves a pass; return whether it does.

    It divides by `grad_scale`, the inverse of what `clip_grads_with_norm_` multiplies by: the last bit can differ.
    """
    if not (takes_found_inf(optimizer) and is_whole_on_gpu(optimizer.param_groups[0]["params"][0])):
        return False
    optimizer.grad_scale = ((norm.float() + 1e-6) / clip_norm).clamp(min=1.0)  # type: ignore[attr-defined]
    return True


def is_whole_on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on a GPU and not one of FSDP's."""
    return tensor.is_cuda and not isinstance(tensor, DTensor)


class StepInBackward:
    """Update each weight within the backward pass, as soon as its gradient is there, and free that gradient."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Add hooks to the weights, which do nothing until `begin`, as in a warm-up."""
        self._optimizer = optimizer
        self._groups = [(group, list(group["params"])) for group in optimizer.param_groups]
        self._norms: list[Tensor] | None = None
        for number, (_, parameters) in enumerate(self._groups):
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(lambda one, number=number: self._update(one, number))

    def begin(self) -> None:
        """Step in the next backward pass."""
        self._norms = []

    def finish(self) -> Tensor:
        """Return the norm of all gradients of the pass, [], which is not finite if a weight was skipped; stop stepping."""
        assert self._norms
        norms, self._norms = self._norms, None
        norm: Tensor = torch.stack(norms).norm()
        return norm

    def _update(self, parameter: Tensor, number: int) -> None:
        if self._norms is None:
            return
        assert parameter.grad is not None
        norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
        self._norms.append(norm)
        for other, (group, _) in enumerate(self._groups):
            group["params"] = [parameter] if other == number else []
        try:
            update_weights(self._optimizer, norm)
        finally:
            for group, parameters in self._groups:
                group["params"] = parameters
        parameter.grad = None
