"""LMDB with one value per sample, read through torch's `DataLoader`: the fastest common setup.

Follows py-lmdb's documentation: one environment per process, opened in the process that uses it and never inherited across a
fork; `buffers=True`, so that a value is not copied before it is stacked; `lock=False` for a file that nobody writes; one read
transaction that stays open. Keys have 8 bytes and are written in order.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import lmdb
import torch
from torch.utils.data import Dataset

from bucketline.bench.peers.formats.raw_value import pack, unpack
from bucketline.bench.peers.formats.torch_dataloader import as_torch, through_torch
from bucketline.bench.peers.samples import sample

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.bench.peers.formats.torch_dataloader import TorchSample
    from bucketline.bench.peers.peer import Opened, Way
    from bucketline.bench.peers.samples import SetShape

NO_READAHEAD = "no readahead"
_NAME = "samples.lmdb"
_A_TRANSACTION = 256  # samples per transaction


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
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # it is only stacked
        env = lmdb.open(self._path, subdir=False, readonly=True, lock=False, create=False, readahead=self._readahead)
        self._pid, self._transaction = os.getpid(), env.begin(buffers=True)


class Lmdb:
    """One LMDB file."""

    def write(self, shape: SetShape, folder: Path) -> None:
        size = 2 * shape.delivered_bytes + (64 << 20)
        with lmdb.open(str(folder / _NAME), subdir=False, map_size=size) as env:
            for first in range(0, shape.num_samples, _A_TRANSACTION):
                with env.begin(write=True) as transaction:
                    for number in range(first, min(first + _A_TRANSACTION, shape.num_samples)):
                        transaction.put(number.to_bytes(8, "big"), pack(sample(shape, number)), append=True)

    def open(self, shape: SetShape, folder: Path, way: Way) -> Opened:
        if way.threads:
            torch.set_num_threads(way.threads)
        return through_torch(_Values(folder / _NAME, shape, readahead=way.option != NO_READAHEAD), shape, way)
