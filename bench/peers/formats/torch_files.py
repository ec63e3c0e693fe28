"""One file per sample (`.pt`, `.npz` or `.safetensors`), read through torch's `DataLoader`, as today's trainers do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import Dataset

from bucketline.bench.peers.formats.torch_dataloader import as_torch, through_torch
from bucketline.bench.peers.samples import sample

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.bench.peers.formats.torch_dataloader import TorchSample
    from bucketline.bench.peers.peer import Opened, Way
    from bucketline.bench.peers.samples import SetShape


class _Files(Dataset[Any]):
    def __init__(self, folder: Path, suffix: str, load: Callable[[str], TorchSample]) -> None:
        self._folder, self._suffix, self._load = str(folder), suffix, load

    def __getitem__(self, number: int) -> TorchSample:
        return self._load(f"{self._folder}/{number:08d}.{self._suffix}")


class Pt:
    """One `.pt` file per sample: a dict of tensors written by `torch.save` and loaded with `weights_only`."""

    def write(self, shape: SetShape, folder: Path) -> None:
        for number in range(shape.num_samples):
            torch.save(as_torch(sample(shape, number)), folder / f"{number:08d}.pt")

    def open(self, shape: SetShape, folder: Path, way: Way) -> Opened:
        return through_torch(_Files(folder, "pt", _load_pt), shape, way)


def _load_pt(path: str) -> TorchSample:
    loaded: TorchSample = torch.load(path, weights_only=True)
    return loaded


class Npz:
    """One uncompressed `.npz` file per sample, written by `numpy.savez`."""

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
    """One safetensors file per sample, through `safetensors.torch`."""

    def write(self, shape: SetShape, folder: Path) -> None:
        for number in range(shape.num_samples):
            tensors = as_torch(sample(shape, number))
            save_file({**tensors, "number": torch.tensor(number)}, folder / f"{number:08d}.safetensors")

    def open(self, shape: SetShape, folder: Path, way: Way) -> Opened:
        return through_torch(_Files(folder, "safetensors", _load_safetensors), shape, way)


def _load_safetensors(path: str) -> TorchSample:
    loaded: TorchSample = load_file(path)
    return loaded
