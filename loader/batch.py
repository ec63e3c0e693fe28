"""A batch: rows of one bucket, one shape, one device.

Letters: B rows, C latent channels, h and w the latent's height and width, L tokens (padded), D token width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bucketline.errors import UsageError
from bucketline.loader.dequantise import dequantised
from bucketline.store.format.columns import POOLED, TOKENS_SCALE, LatentKind
from bucketline.torch_dtypes import as_stored

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

FIXED_PREFIX = "text_fixed."  # prefix of a fixed text column's name when a batch's tensors are listed by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rank's micro-batch of a step. `accumulation` of them, all of one bucket, make up the rank's share of the step.

    The tensors stay valid as long as any of them is held.
    """

    step: int  # optimizer step, from 0
    micro_step: int  # 0 to accumulation - 1
    epoch: int
    bucket: str  # `train/256x192`, height first
    latents: Tensor  # [B, C, h, w] as stored (float16, bfloat16 or float32), unscaled; [B, 2C, h, w] if they are moments
    tokens: Tensor  # [B, L, D] as stored, or float16 if that is quantised; zeros after a caption's own tokens
    token_mask: Tensor  # [B, L] bool, True for a caption's own tokens
    original_size: Tensor  # [B, 2] int32, height and width of the source image in px
    crop: Tensor  # [B, 2] int32, top and left of the crop in the resized image in px (mirrored for a flipped row)
    target_size: Tensor  # [B, 2] int32, height and width of the bucket in px
    weight: Tensor  # [B] float32, 1, or 0 for a padding row
    keys: Tensor  # [B] int64, of (seed, step, position in the global batch); see `plan.rng`
    ids: Tensor  # [B, 16] uint8, digests of the samples' ids
    flipped: Tensor  # [B] bool, True if the latents are of the mirror image
    text_fixed: Mapping[str, Tensor] = field(default_factory=dict)  # per-caption values by column: [B, …]
    class_labels: Tensor | None = None  # [B] int64; only in a class-conditional store, where `tokens` holds the same numbers
    tokens_scale: Tensor | None = None  # [B, L, S]; only with `text="stored"` of a store whose `tokens` are quantised
    latent_kind: LatentKind = LatentKind.MODE

    def __post_init__(self) -> None:
        tensors = self.by_name().values()
        if len({tensor.device for tensor in tensors}) != 1:
            devices = sorted({str(tensor.device) for tensor in tensors})
            raise AssertionError(f"a batch of {self.bucket} has tensors on {devices}; they must share one device")
        # not len(tensor), which runs in Python
        if len(lengths := {tensor.shape[0] for tensor in tensors}) != 1:
            raise AssertionError(
                f"a batch of {self.bucket} has tensors of {sorted(lengths)} rows; all must have the same number"
            )

    @property
    def pooled(self) -> Tensor | None:
        """The captions' pooled embeddings, `[B, D']`; None if the store has none."""
        return self.text_fixed.get(POOLED)

    @property
    def device(self) -> torch.device:
        return self.latents.device

    def tensors(self) -> Iterator[Tensor]:
        """Iterate over the tensors of the batch."""
        return iter(self.by_name().values())

    def by_name(self) -> dict[str, Tensor]:
        """Return the batch's tensors by field name; a fixed text column is `text_fixed.NAME`."""
        found = {name: getattr(self, name) for name in _TENSORS}
        for name, tensor in self.text_fixed.items():
            found[FIXED_PREFIX + name] = tensor
        if self.class_labels is not None:
            found["class_labels"] = self.class_labels
        if self.tokens_scale is not None:
            found[TOKENS_SCALE] = self.tokens_scale
        return found

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch on a device, or this batch if it is there already. Frameworks expect this name."""
        if self.device == torch.device(device):
            return self
        moved = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.by_name().items()}
        return replace(self, **as_fields(moved))

    def dequantised(self) -> Batch:
        """Return the batch with quantised tokens as float16, computed on its device; this batch if they are not quantised."""
        if self.tokens_scale is None:
            return self
        return replace(self, tokens=dequantised(self.tokens, self.tokens_scale), tokens_scale=None)

    def numpy(self) -> NumpyBatch:
        """Return the batch as numpy arrays that share its memory.

        Raises:
            UsageError: if the batch is not in host memory.
        """
        from bucketline.loader.batch import as_numpy

        return as_numpy(self)


_TENSORS = (
    *("latents", "tokens", "token_mask", "original_size", "crop", "target_size"),
    *("weight", "keys", "ids", "flipped"),
)


def as_fields(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch's fields from the tensors of `by_name`, with the fixed text columns grouped under `text_fixed`."""
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(FIXED_PREFIX)}
    fixed = {name.removeprefix(FIXED_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(FIXED_PREFIX)}
    return {**own, "text_fixed": fixed}


_BF16 = "BF16"


@dataclass(frozen=True, slots=True, kw_only=True)
class NumpyBatch:
    """A batch as numpy arrays over the same memory, valid as long as any of them is held.

    Numpy has no bfloat16: such an array holds the bits as uint16, and its entry in `dtypes` is `BF16`. `float32` converts it.
    """

    step: int
    micro_step: int
    epoch: int
    bucket: str
    latent_kind: LatentKind
    arrays: Mapping[str, NDArray[Any]]  # by field of `Batch`; a fixed text column is `text_fixed.NAME`
    dtypes: Mapping[str, str]  # by the same names: `BF16`, or numpy's name

    def float32(self, name: str) -> NDArray[np.float32]:
        """Return a float32 copy of an array. bfloat16 and float16 convert exactly."""
        values = self.arrays[name]
        if self.dtypes[name] == _BF16:
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)


def numpy_batches(batches: Iterable[Batch]) -> Iterator[NumpyBatch]:
    """Iterate over batches, such as a loader's, as numpy arrays, without copying.

    Raises:
        UsageError: if a batch is not in host memory.
    """
    return map(as_numpy, batches)


def as_numpy(batch: Batch) -> NumpyBatch:
    """Return a batch as numpy arrays that share its memory.

    Raises:
        UsageError: if the batch is not in host memory.
    """
    if batch.device.type != "cpu":
        raise UsageError(f"a batch on {batch.device} has no numpy arrays; make the loader with device=torch.device('cpu')")
    tensors = batch.by_name()
    halves = {name for name, tensor in tensors.items() if tensor.dtype is torch.bfloat16}
    arrays = {name: as_stored(tensor) for name, tensor in tensors.items()}
    return NumpyBatch(
        step=batch.step,
        micro_step=batch.micro_step,
        epoch=batch.epoch,
        bucket=batch.bucket,
        latent_kind=batch.latent_kind,
        arrays=arrays,
        dtypes={name: _BF16 if name in halves else array.dtype.name for name, array in arrays.items()},
    )
