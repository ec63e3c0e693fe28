"""Shared by the peers that use torch: batches of one bucket, and stacking with padding.

Runs in a peer's environment, which has torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from bucketline.bench.peers.gate import PeerBatch
from bucketline.bench.peers.peer import Opened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.utils.data import Dataset

    from bucketline.bench.peers.peer import Way
    from bucketline.bench.peers.samples import Sample, SetShape

    TorchSample = Mapping[str, Any]  # number, latent [C, h, w], tokens [L, D], original_size [2], crop [2]


class BucketBatches:
    """A batch sampler: batches of one bucket each, with rows and batches reshuffled in each pass."""

    def __init__(self, shape: SetShape) -> None:
        self._shape = shape
        self._random = np.random.default_rng(0)

    def __iter__(self) -> Iterator[list[int]]:
        size = self._shape.batch_size
        batches: list[list[int]] = []
        for bucket in range(len(self._shape.buckets)):
            rows = self._random.permutation(np.array(self._shape.numbers(bucket))).tolist()
            batches += [rows[at : at + size] for at in range(0, len(rows), size)]
        for at in self._random.permutation(len(batches)).tolist():
            yield batches[at]

    def __len__(self) -> int:
        return self._shape.num_batches


class Stack:
    """A collate function: stacks latents with torch's default, and pads tokens with zeros to one length."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens

    def __call__(self, samples: Sequence[TorchSample]) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = {
            name: default_collate([sample[name] for sample in samples])
            for name in ("number", "latent", "original_size", "crop")
        }
        own = [sample["tokens"] for sample in samples]
        tokens = torch.zeros((len(own), self._max_tokens, own[0].shape[1]), dtype=own[0].dtype)
        mask = torch.zeros((len(own), self._max_tokens), dtype=torch.bool)
        for row, caption in enumerate(own):
            tokens[row, : len(caption)] = caption
            mask[row, : len(caption)] = True
        return {**batch, "tokens": tokens, "mask": mask}


def stack_arrays(shape: SetShape) -> Callable[[Sequence[Mapping[str, Any]]], dict[str, Tensor]]:
    """Return a collate function for samples with numpy arrays and sizes that may be lists."""
    return _StackArrays(shape.max_tokens)


class _StackArrays(Stack):
    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        return super().__call__([_as_tensors(sample) for sample in samples])


def _as_tensors(sample: Mapping[str, Any]) -> dict[str, Any]:
    tensors: dict[str, Any] = {name: torch.from_numpy(sample[name]) for name in ("latent", "tokens")}
    sizes = {name: torch.as_tensor(sample[name], dtype=torch.int32) for name in ("original_size", "crop")}
    return {"number": int(sample["number"]), **tensors, **sizes}


def as_torch(sample: Sample) -> dict[str, Any]:
    """Return a sample as tensors that share its memory, in the form that a trainer stores."""
    names = ("latent", "tokens", "original_size", "crop")
    return {"number": sample.number, **{name: torch.from_numpy(getattr(sample, name)) for name in names}}


def as_peer_batch(batch: Mapping[str, Tensor]) -> PeerBatch:
    """Return a batch's tensors as arrays that share their memory."""
    return PeerBatch(**{name: batch[name].numpy() for name in PeerBatch._fields})


def opened(batches: Callable[[], Iterable[Mapping[str, Tensor]]]) -> Opened:
    """Return an `Opened` from a function that starts an iteration over torch batches."""
    return Opened(begin=lambda: map(as_peer_batch, batches()))


def through_torch(dataset: Dataset[TorchSample], shape: SetShape, way: Way) -> Opened:
    """Read a data set, indexed by sample number, through torch's `DataLoader`."""
    loader = DataLoader(
        dataset,
        batch_sampler=BucketBatches(shape),
        collate_fn=Stack(shape.max_tokens),
        num_workers=way.workers,
        persistent_workers=way.workers > 0,
    )
    return opened(lambda: loader)
