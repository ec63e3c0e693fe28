"""One file per sample, read through torch's `DataLoader`: what today's trainers do. `.pt`, `.npz` or `.safetensors`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import Dataset

from bucketline.bench.peers.samples import sample
from bucketline.bench.peers.torch_batches import as_torch, through_torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.bench.peers.peer import Opened, Way
    from bucketline.bench.peers.samples import SetShape
    from bucketline.bench.peers.torch_batches import TorchSample


class _Files(Dataset[Any]):
    def __init__(self, folder: Path, suffix: str, load: Callable[[str], TorchSample]) -> None:
        self._folder, self._suffix, self._load = str(folder), suffix, load

    def __getitem__(self, number: int) -> TorchSample:
        return self._load(f"{self._folder}/{number:08d}.{self._suffix}")


class Pt:
    """A `.pt` file each, as `torch.save` writes a dict of tensors; loaded with `weights_only`."""

    def write(self, shape: SetShape, folder: Path) -> None:
        for number in range(shape.num_samples):
            torch.save(as_torch(sample(shape, number)), folder / f"{number:08d}.pt")

    def open(self, shape: SetShape, folder: Path, way: Way) -> Opened:
        return through_torch(_Files(folder, "pt", _load_pt), shape, way)


def _load_pt(path: str) -> TorchSample:
    loaded: TorchSample = torch.load(path, weights_only=True)
    return loaded


class Npz:
    """An `.npz` file each, as `numpy.savez` writes it: not compressed."""

    def write(self, shape: SetShape, folder: Path) -> None:
        for number in range(shape.num_samples):
            own = sample(shape, number)._asdict()
            np.savez(folder / f"{number:08d}.npz", allow_pickle=False, **{k: np.asarray(v) for k, v in own.items()})

    def open(self, shape: SetShape, folder: Path, way: Way) -> Opened:
        return through_torch(_Files(folder, "npz", _load_npz), shape, way)


def _load_npz(path: str) -> TorchSample:
    with np.load(path) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


class Safetensors:
    """A safetensors file each, by `safetensors.torch`."""

    def write(self, shape: SetShape, folder: Path) -> None:
        for number in range(shape.num_samples):
            tensors = as_torch(sample(shape, number))
            save_file({**tensors, "number": torch.tensor(number)}, folder / f"{number:08d}.safetensors")

    def open(self, shape: SetShape, folder: Path, way: Way) -> Opened:
        return through_torch(_Files(folder, "safetensors", _load_safetensors), shape, way)


def _load_safetensors(path: str) -> TorchSample:
    loaded: TorchSample = load_file(path)
    return loaded
