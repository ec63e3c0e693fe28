"""AdamW, and the update of weights by any optimizer: learning rate, clipping, and no step by a gradient that is not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from bucketline.train.parallel import whole
from bucketline.train.rounding import Rounding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from bucketline.train.optim import Groups, Options


def make_adamw(model: nn.Module, groups: Groups, options: Options) -> Optimizer:
    """Return AdamW with 32-bit moments."""
    if options.rounds_weights:
        from bucketline.train.optimizers.rounded_adamw import make_fp32

        return make_fp32(model, groups, options)
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=options.betas.pair, eps=options.betas.eps, fused=True)


def begin_step(optimizer: Optimizer, step: int, learning_rate: float) -> None:
    """Set the learning rate and the random numbers of optimizer step `step` (from 0)."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate
    if isinstance(rounding := getattr(optimizer, "rounding", None), Rounding):
        rounding.begin(step)


def update(optimizer: Optimizer, trained: Sequence[nn.Parameter], clip_norm: float | None) -> Tensor:
    """Clip the gradients, update the weights by them, and free them; return their norm before clipping, [] float32.

    A norm that is not finite changes neither weights nor state. torch's fused steps look that up on the device; for those of
    other libraries, which cannot, the host waits for the norm. On a GPU a fused step also clips gradients as it reads them,
    which saves a pass: it divides by `grad_scale`, the inverse of what `clip_grads_with_norm_` multiplies by, so the last bit
    can differ.
    """
    # Of shards, it is reduced over the ranks here, once, whatever uses it.
    norm = whole(torch.nn.utils.get_total_norm([one.grad for one in trained if one.grad is not None]))
    is_fused = takes_found_inf(optimizer)
    if clip_norm is not None and is_fused and is_whole_on_gpu(trained[0]):
        optimizer.grad_scale = ((norm.float() + 1e-6) / clip_norm).clamp(min=1.0)  # type: ignore[attr-defined]
    elif clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(trained, clip_norm, norm)
    if is_fused:
        optimizer.found_inf = norm.isfinite().logical_not().float()  # type: ignore[attr-defined]
    if is_fused or bool(norm.isfinite()):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step is skipped on the device where its `found_inf` is 1; torch's scaler asks the same."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def is_whole_on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on a GPU and not one of FSDP's."""
    return tensor.is_cuda and not isinstance(tensor, DTensor)
