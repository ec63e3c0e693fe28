"""Clipping within a fused step, which a run does on a GPU: the CPU's fused steps take the same factor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bucketline.train import step as of_step
from bucketline.train.config import WeightDtype
from bucketline.train.optim import make_adamw
from bucketline.train.step import begin_step, update
from tests.unit.train.tiny_run import config

CLIP_NORM = 1.0


def stepped(weights: WeightDtype, scale: float, *, in_step: bool) -> Tensor:
    """Return a weight after two steps by gradients of that scale, clipped by the step or before it."""
    draws = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 8, generator=draws))
    if weights is WeightDtype.BF16:
        weight.data = weight.data.bfloat16()
    groups = [{"params": [weight], "weight_decay": 0.01}]
    optimizer = make_adamw(torch.nn.Identity(), groups, config(Path(), weights=weights), compiled=False)
    for step in range(2):
        begin_step(optimizer, step, 1e-2)
        weight.grad = (scale * torch.randn(8, 8, generator=draws)).to(weight.dtype)
        update(optimizer, [weight], CLIP_NORM)
        assert (getattr(optimizer, "grad_scale", None) is not None) == in_step
    return weight.detach()


@pytest.mark.parametrize("weights", WeightDtype)
def test_a_step_that_clips_is_one_whose_gradients_were_clipped(weights: WeightDtype, monkeypatch: pytest.MonkeyPatch) -> None:
    scales = (1e-3, 10.0, float("inf"))  # not clipped, clipped, skipped
    expected = [stepped(weights, scale, in_step=False) for scale in scales]
    monkeypatch.setattr(of_step, "is_whole_on_gpu", lambda _: True)
    found = [stepped(weights, scale, in_step=True) for scale in scales]
    rtol = 1e-2 if weights is WeightDtype.BF16 else 1e-5
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-6)
    assert torch.equal(found[0], expected[0])
    assert not torch.equal(found[1], found[2])
