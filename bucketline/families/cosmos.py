"""diffusers' Cosmos transformer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def do_without_torchvision() -> None:
    """Provide the one function that the transformer takes of torchvision, if that is not installed.

    It brings the mask of borders to the size of the latents by the nearest values.
    """
    from diffusers.models.transformers import transformer_cosmos
    from torch.nn.functional import interpolate

    def resize(mask: Tensor, size: list[int], interpolation: str) -> Tensor:
        return interpolate(mask, size, mode=interpolation)

    found = SimpleNamespace(functional=SimpleNamespace(resize=resize), InterpolationMode=SimpleNamespace(NEAREST="nearest"))
    vars(transformer_cosmos).setdefault("transforms", found)
