"""A batch: rows of one bucket, one shape, one device.

Letters: B rows, C latent channels, h and w the latent's height and width, L tokens (padded), D a token's width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bucketline.loader.numpy_batch import NumpyBatch

FIXED_PREFIX = "text_fixed."  # before a fixed text column's name, where a batch's tensors are listed by name


class LatentKind(StrEnum):
    """What a store holds of a VAE's answer."""

    MODE = "mode"  # the most likely latent
    SAMPLE = "sample"  # one draw, the same for ever
    MOMENTS = "moments"  # C means, then C log-variances, to be drawn from at every step


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rank's micro-batch of a step. `accumulation` of them, all of one bucket, make the rank's share of a step.

    The tensors stay valid for as long as any of them is held.
    """

    step: int  # optimizer step, from 0
    micro_step: int  # 0 to accumulation - 1
    epoch: int
    bucket: str  # `train/256x192`, height first
    latents: Tensor  # [B, C, h, w] as stored (float16, bfloat16 or float32), unscaled; [B, 2C, h, w] where they are moments
    tokens: Tensor  # [B, L, D] as stored; zeros beyond a caption's own tokens
    token_mask: Tensor  # [B, L] bool, True where there is a token
    original_size: Tensor  # [B, 2] int32, height and width of the source picture in px
    crop: Tensor  # [B, 2] int32, top and left of the crop in the resized picture in px, of a flipped row in the mirrored one
    target_size: Tensor  # [B, 2] int32, height and width of the bucket in px
    weight: Tensor  # [B] float32, 1, or 0 where a row only fills the shape
    keys: Tensor  # [B] int64, of (seed, step, position in the global batch); see `draws`
    ids: Tensor  # [B, 16] uint8, digests of the samples' ids
    flipped: Tensor  # [B] bool, True where the latents are of the mirror image
    text_fixed: Mapping[str, Tensor] = field(default_factory=dict)  # what is stored once a caption, by column: [B, …]
    class_labels: Tensor | None = None  # [B] int64, of a class-conditional store, whose `tokens` are the same numbers
    latent_kind: LatentKind = LatentKind.MODE

    def __post_init__(self) -> None:
        tensors = self.by_name().values()
        if len({tensor.device for tensor in tensors}) != 1:
            devices = sorted({str(tensor.device) for tensor in tensors})
            raise AssertionError(f"a batch of {self.bucket} has tensors on {devices}; they must share one device")
        # not len(tensor), which is Python's own work
        if len(lengths := {tensor.shape[0] for tensor in tensors}) != 1:
            raise AssertionError(f"a batch of {self.bucket} has tensors of {sorted(lengths)} rows; they must have the same")

    @property
    def pooled(self) -> Tensor | None:
        """The captions' pooled embeddings, `[B, D']`; None where the store has none."""
        return self.text_fixed.get("pooled")

    @property
    def device(self) -> torch.device:
        return self.latents.device

    def tensors(self) -> Iterator[Tensor]:
        """Give every tensor of the batch."""
        return iter(self.by_name().values())

    def by_name(self) -> dict[str, Tensor]:
        """Give every tensor of the batch by its field's name; a fixed text column's as `text_fixed.NAME`."""
        found = {name: getattr(self, name) for name in _TENSORS}
        for name, tensor in self.text_fixed.items():
            found[FIXED_PREFIX + name] = tensor
        if self.class_labels is not None:
            found["class_labels"] = self.class_labels
        return found

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Give the batch with every tensor on a device: this one, if they are there. Frameworks call it by this name."""
        if self.device == torch.device(device):
            return self
        moved = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.by_name().items()}
        return replace(self, **as_fields(moved))

    def numpy(self) -> NumpyBatch:
        """See the batch as numpy arrays, which share its memory.

        Raises:
            UsageError: where it is not in the host's memory.
        """
        from bucketline.loader.numpy_batch import as_numpy

        return as_numpy(self)


_TENSORS = (
    *("latents", "tokens", "token_mask", "original_size", "crop", "target_size"),
    *("weight", "keys", "ids", "flipped"),
)


def as_fields(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Give a batch's fields from what `by_name` lists: the fixed text columns under `text_fixed`, the others as they are."""
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(FIXED_PREFIX)}
    fixed = {name.removeprefix(FIXED_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(FIXED_PREFIX)}
    return {**own, "text_fixed": fixed}
