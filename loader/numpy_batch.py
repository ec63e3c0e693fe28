"""Batches as numpy arrays, for those who are not on torch.

with Loader("photos.store", LoaderConfig(batch_size=8)) as loader:
    for batch in numpy_batches(loader):
        batch.arrays["latents"]

Letters as in `batch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bucketline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from bucketline.loader.batch import Batch, LatentKind

_BF16 = "BF16"


@dataclass(frozen=True, slots=True, kw_only=True)
class NumpyBatch:
    """A batch whose tensors are numpy arrays over the same memory, valid for as long as any of them is held.

    Numpy has no bfloat16: such an array has its bits, uint16, and its entry in `dtypes` is `BF16`; `float32` gives numbers.
    """

    step: int
    micro_step: int
    epoch: int
    bucket: str
    latent_kind: LatentKind
    arrays: Mapping[str, NDArray[Any]]  # by `Batch`'s field; a fixed text column's as `text_fixed.NAME`
    dtypes: Mapping[str, str]  # by the same names: `BF16`, or numpy's own name

    def float32(self, name: str) -> NDArray[np.float32]:
        """Give an array's numbers in 32 bits, exactly, in memory of their own."""
        values = self.arrays[name]
        if self.dtypes[name] == _BF16:
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)


def numpy_batches(batches: Iterable[Batch]) -> Iterator[NumpyBatch]:
    """Give batches, such as a loader's, as numpy arrays; nothing is copied.

    Raises:
        UsageError: where they are not in the host's memory.
    """
    return map(as_numpy, batches)


def as_numpy(batch: Batch) -> NumpyBatch:
    """See a batch as numpy arrays, which share its memory.

    Raises:
        UsageError: where it is not in the host's memory.
    """
    if batch.device.type != "cpu":
        raise UsageError(f"a batch on {batch.device} has no numpy arrays; make the loader with device=torch.device('cpu')")
    tensors = batch.by_name()
    halves = {name for name, tensor in tensors.items() if tensor.dtype is torch.bfloat16}
    arrays = {name: (tensor.view(torch.uint16) if name in halves else tensor).numpy() for name, tensor in tensors.items()}
    return NumpyBatch(
        step=batch.step,
        micro_step=batch.micro_step,
        epoch=batch.epoch,
        bucket=batch.bucket,
        latent_kind=batch.latent_kind,
        arrays=arrays,
        dtypes={name: _BF16 if name in halves else array.dtype.name for name, array in arrays.items()},
    )
