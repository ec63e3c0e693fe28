"""Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682), of schedulefree: an average in place of a schedule."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from schedulefree import AdamWScheduleFree

from bucketline.train.ema import Average
from bucketline.train.parallel import local, sharded_like
from bucketline.train.values import EmaPlace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from bucketline.train.optim import Groups, Options


def make(_model: nn.Module, groups: Groups, options: Options) -> Optimizer:
    """Return the optimizer in its training mode; its warm-up is that of the run's learning rate."""
    optimizer: Optimizer = AdamWScheduleFree(groups, lr=options.learning_rate)
    optimizer.train()  # type: ignore[attr-defined]
    return optimizer


class OwnAverage(Average):
    """The optimizer's own average, in place of an EMA: nothing is kept between evaluations."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, place: EmaPlace | None) -> None:
        """`place`: of the weights while the average stands in for them."""
        super().__init__(model, None)
        self.is_kept = True
        self._optimizer, self._place = optimizer, place or EmaPlace.DEVICE
        self._sources = [tensor for group in optimizer.param_groups for tensor in group["params"]]

    def update(self, step: int) -> None:
        """Do nothing: the optimizer's step has updated it."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return the average of a trained parameter in memory of its own, as the library's `eval` computes it."""
        if (z := self._optimizer.state.get(tensor, {}).get("z")) is None:
            return tensor
        beta = self._optimizer.param_groups[0]["betas"][0]
        return sharded_like(local(tensor.detach()).lerp(local(z), 1 - 1 / beta), tensor)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the weights by their average while the body runs, then put them back to the bit.

        The library's way back computes them from the average, which rounds.
        """
        weights = [local(tensor.detach()) for tensor in self._sources]
        kept = [weight.to("cpu" if self._place is EmaPlace.CPU else weight.device, copy=True) for weight in weights]
        self._optimizer.eval()  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for weight, before in zip(weights, kept, strict=True):
                weight.copy_(before)
            for group in self._optimizer.param_groups:
                group["train_mode"] = True
