"""Model kinds: each in a module of its own, behind one small protocol. Nothing else knows the kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bucketline.loader import Batch


class Family(Protocol):
    """How a model of one kind is called with a batch."""

    @property
    def folder(self) -> str:
        """The model's folder in diffusers' layout, such as `unet`."""

    def predict(self, model: nn.Module, noisy: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        """Give the model's prediction, [B, C, h, w]; noisy [B, C, h, w] float32, timesteps [B] int64."""
