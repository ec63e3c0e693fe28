"""AdamW with block-wise quantised 8-bit moments (Dettmers et al. 2021, arXiv 2110.02861), of torchao."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

from bucketline.train.config import WeightDtype
from bucketline.train.ema import Rounding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from bucketline.train.config import TrainConfig

_MOMENTS = ("exp_avg", "exp_avg_sq")  # the first has signs
_PARTS = ("codes", "scale", "qmap")  # the tensors of a quantised moment


def make_8bit(_model: nn.Module, groups: list[dict[str, Any]], config: TrainConfig, *, compiled: bool) -> torch.optim.Optimizer:
    """Return the optimizer; where it is compiled, which torchao does for each shape of weight, that is done here."""
    optimizer = PlainAdamW8bit(groups, config, compiled=compiled)
    if compiled:
        unlike = {
            (one.shape, one.stride(), group["weight_decay"]): (one, group)
            for group in optimizer.param_groups
            for one in group["params"]
        }
        for one, group in unlike.values():
            scratch = torch.zeros_like(one).requires_grad_()
            scratch.grad = torch.zeros_like(one)
            PlainAdamW8bit([{"params": [scratch], "weight_decay": group["weight_decay"]}], config, compiled=True).step()
    return optimizer


class PlainAdamW8bit(AdamW8bit):  # type: ignore[misc]
    """AdamW8bit whose state in a checkpoint is plain tensors, and whose random numbers follow from the step."""

    def __init__(self, groups: list[dict[str, Any]], config: TrainConfig, *, compiled: bool) -> None:
        self._compiled, self._rounds = compiled, config.weights is WeightDtype.BF16
        moments = {"betas": config.betas.pair, "eps": config.betas.eps}
        super().__init__(groups, lr=config.learning_rate, **moments, bf16_stochastic_round=self._rounds)
        self.rounding = Rounding(config.seed)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update the weights; what torchao compiles runs as it is if the run compiles nothing."""
        with torch.compiler.set_stance("default" if self._compiled else "force_eager"), self._seeded():
            super().step(closure)

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        """Seed torch's own random numbers, which torchao rounds with, while the body runs."""
        if not self._rounds:
            yield
            return
        device = self.param_groups[0]["params"][0].device
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
            torch.manual_seed(self.rounding.seed())
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the state with a quantised moment as its parts, such as `exp_avg.codes`."""
        found: dict[str, Any] = super().state_dict()
        return {**found, "state": {number: _flat(entry) for number, entry in found["state"].items()}}


def _flat(entry: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in entry.items():
        if isinstance(value, OptimState8bit):
            found |= {f"{name}.{part}": getattr(value, part) for part in _PARTS}
        else:
            found[name] = value
    return found
