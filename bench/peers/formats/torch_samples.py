"""Formats of which torch's `DataLoader` reads a sample at a time, as today's trainers do; and batches of one bucket from it.

LMDB is the fastest common setup. It follows py-lmdb's documentation: one environment per process, opened in the process that
uses it and never inherited across a fork; `buffers=True`, so that a value is not copied before it is stacked; `lock=False` for
a file that nobody writes; one read transaction that stays open. Keys have 8 bytes and are written in order.

Runs in a peer's environment, which has torch.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from bucketline.bench.peers.registry import Importing, Opened
from bucketline.bench.peers.samples import PeerBatch, pack, sample, unpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from bucketline.bench.peers.registry import Remote, Way
    from bucketline.bench.peers.samples import Sample, SetShape

    TorchSample = Mapping[str, Any]  # number, latent [C, h, w], tokens [L, D], original_size [2], crop [2]

_LMDB = "samples.lmdb"
_A_TRANSACTION = 256  # samples per transaction


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

    def __init__(self, shape: SetShape) -> None:
        self._max_tokens = shape.max_tokens

    def __call__(self, samples: Sequence[TorchSample]) -> dict[str, Tensor]:
        names = ("number", "latent", "original_size", "crop")
        batch: dict[str, Tensor] = {name: default_collate([sample[name] for sample in samples]) for name in names}
        own = [sample["tokens"] for sample in samples]
        tokens = torch.zeros((len(own), self._max_tokens, own[0].shape[1]), dtype=own[0].dtype)
        mask = torch.zeros((len(own), self._max_tokens), dtype=torch.bool)
        for row, caption in enumerate(own):
            tokens[row, : len(caption)] = caption
            mask[row, : len(caption)] = True
        return {**batch, "tokens": tokens, "mask": mask}


class StackArrays(Stack):
    """The same of samples with numpy arrays and sizes that may be lists."""

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


def opened(batches: Iterable[Mapping[str, Tensor]]) -> Opened:
    """Return an `Opened` from an iterable of torch batches, whose arrays share their memory."""
    return Opened(begin=lambda: (PeerBatch(**{name: one[name].numpy() for name in PeerBatch._fields}) for one in batches))


def through_torch(dataset: Dataset[TorchSample], shape: SetShape, way: Way) -> Opened:
    """Read a data set, indexed by sample number, through torch's `DataLoader`."""
    loader = DataLoader(
        dataset,
        batch_sampler=BucketBatches(shape),
        collate_fn=Stack(shape),
        num_workers=way.workers,
        persistent_workers=way.workers > 0,
    )
    return opened(loader)


class _Files(Dataset[Any]):
    def __init__(self, peer: Pt, folder: Path | Remote) -> None:
        self._peer, self._folder = peer, str(folder)

    def __getitem__(self, number: int) -> TorchSample:
        return self._peer.load(self._peer.path(self._folder, number))


class Pt(Importing):
    """One file per sample: a dict of tensors written by `torch.save` and loaded with `weights_only`."""

    suffix = "pt"

    def write(self, shape: SetShape, folder: Path) -> None:
        for number in range(shape.num_samples):
            self.save(sample(shape, number), self.path(str(folder), number))

    def open(self, shape: SetShape, place: Path | Remote, way: Way) -> Opened:
        return through_torch(_Files(self, place), shape, way)

    def path(self, folder: str, number: int) -> str:
        return f"{folder}/{number:08d}.{self.suffix}"

    def save(self, sample: Sample, path: str) -> None:
        torch.save(as_torch(sample), path)

    def load(self, path: str) -> TorchSample:
        loaded: TorchSample = torch.load(path, weights_only=True)
        return loaded


class Npz(Pt):
    """One uncompressed file per sample, written by `numpy.savez`."""

    suffix = "npz"

    def save(self, sample: Sample, path: str) -> None:
        np.savez(path, allow_pickle=False, **{name: np.asarray(value) for name, value in sample._asdict().items()})

    def load(self, path: str) -> TorchSample:
        with np.load(path) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays}


class Safetensors(Pt):
    """One file per sample, through `safetensors.torch`."""

    suffix = "safetensors"
    needs = ("safetensors.torch",)

    def save(self, sample: Sample, path: str) -> None:
        from safetensors.torch import save_file

        save_file({**as_torch(sample), "number": torch.tensor(sample.number)}, path)

    def load(self, path: str) -> TorchSample:
        from safetensors.torch import load_file

        loaded: TorchSample = load_file(path)
        return loaded


class Lmdb(Importing):
    """One LMDB file with one value per sample."""

    needs = ("lmdb",)

    def write(self, shape: SetShape, folder: Path) -> None:
        import lmdb

        with lmdb.open(str(folder / _LMDB), subdir=False, map_size=2 * shape.delivered_bytes + (64 << 20)) as env:
            for first in range(0, shape.num_samples, _A_TRANSACTION):
                with env.begin(write=True) as transaction:
                    for number in range(first, min(first + _A_TRANSACTION, shape.num_samples)):
                        transaction.put(number.to_bytes(8, "big"), pack(sample(shape, number)), append=True)

    def open(self, shape: SetShape, place: Path | Remote, way: Way) -> Opened:
        assert isinstance(place, Path)
        if way.threads:
            torch.set_num_threads(way.threads)
        return through_torch(_Values(place / _LMDB, shape, readahead=way.option != "no readahead"), shape, way)


class _Values(Dataset[Any]):
    def __init__(self, path: Path, shape: SetShape, *, readahead: bool) -> None:
        self._path, self._shape, self._readahead = str(path), shape, readahead
        self._pid = -1
        self._transaction: Any = None

    def __getitem__(self, number: int) -> TorchSample:
        if self._pid != os.getpid():
            self._begin()
        return as_torch(unpack(self._transaction.get(number.to_bytes(8, "big")), self._shape))

    def _begin(self) -> None:
        import lmdb

        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # it is only stacked
        env = lmdb.open(self._path, subdir=False, readonly=True, lock=False, create=False, readahead=self._readahead)
        self._pid, self._transaction = os.getpid(), env.begin(buffers=True)
