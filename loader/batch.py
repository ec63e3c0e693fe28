"""A batch: rows of one bucket, one shape, one device.

Letters: B rows, C latent channels, h and w the latent's height and width, L tokens (padded), D a token's width.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rank's micro-batch of a step. `accumulation` of them, all of one bucket, make the rank's share of a step.

    The tensors stay valid for as long as any of them is held.
    """

    step: int  # optimizer step, from 0
    micro_step: int  # 0 to accumulation - 1
    epoch: int
    bucket: str  # `train/256x192`, height first
    latents: Tensor  # [B, C, h, w] as stored (float16, bfloat16 or float32), unscaled
    tokens: Tensor  # [B, L, D] as stored; zeros beyond a caption's own tokens
    token_mask: Tensor  # [B, L] bool, True where there is a token
    original_size: Tensor  # [B, 2] int32, height and width of the source picture in px
    crop: Tensor  # [B, 2] int32, top and left of the crop in the resized picture in px
    weight: Tensor  # [B] float32, 1, or 0 where a row only fills the shape
    keys: Tensor  # [B] int64, of (seed, step, position in the global batch); see `draws`
    ids: Tensor  # [B, 16] uint8, digests of the samples' ids

    def __post_init__(self) -> None:
        devices = {tensor.device for tensor in self.tensors()}
        if len(devices) != 1:
            raise AssertionError(
                f"a batch of {self.bucket} has tensors on {sorted(map(str, devices))}; they must share one device"
            )
        lengths = {len(tensor) for tensor in self.tensors()}
        if len(lengths) != 1:
            raise AssertionError(f"a batch of {self.bucket} has tensors of {sorted(lengths)} rows; they must have the same")

    def tensors(self) -> Iterator[Tensor]:
        """Give every tensor of the batch."""
        return (value for field in dataclasses.fields(self) if isinstance(value := getattr(self, field.name), Tensor))

    @property
    def device(self) -> torch.device:
        return self.latents.device
