"""A run's tensors at one step in host memory: each rank copies what it has of them, and rank 0 gathers it while it writes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from bucketline.train.host_copy import HostCopies
from bucketline.train.parallel import DISK_TIME, local

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from bucketline.train.ema import Average
    from bucketline.train.outputs.weights import Weights
    from bucketline.train.parallel import TrainRanks

MODEL, AVERAGE, OPTIMIZER = "model", "average", "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A tensor that rank 0 has whole, or several ranks in rows."""

    shape: torch.Size  # of the whole
    ranks: tuple[int, ...]  # in the order of the rows that they have; rank 0 is one of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The sections of a step that are saved."""

    config: str  # of the model, or of its adapters
    sections: Mapping[str, Mapping[str, _Part]]
    optimizer: dict[str, Any]  # its state, with parts in place of tensors
    copied: Future[dict[str, Tensor]]  # this rank's, by `section.name`; no tensor may change before they are there

    def optimizer_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the optimizer's state, given the whole tensors of its section."""
        parts = self.sections[OPTIMIZER]
        return copy.deepcopy(self.optimizer, {id(parts[name]): tensor for name, tensor in tensors.items()})


class Snapshots:
    """Copies of a run's state in the host memory of the ranks that write or share it, one step's at a time.

    Each snapshot overwrites the one before. Without FSDP, rank 0's host memory holds all that is saved: 16 bytes per trained
    weight with AdamW and a moving average. With FSDP each rank's holds its share of that, and rank 0 gathers one section at a
    time: 8 bytes per weight for the optimizer's.
    """

    def __init__(self, ranks: TrainRanks, weights: Weights, model: nn.Module, average: Average, optimizer: Optimizer) -> None:
        """Every rank must call this at the same point, and `reserve` and `take` at the same steps."""
        self._ranks, self._weights, self._model, self._average, self._optimizer = ranks, weights, model, average, optimizer
        # A group of its own, for the thread that writes: the collectives of two threads must not mix.
        self._group = dist.new_group(backend="gloo", timeout=DISK_TIME) if isinstance(model, FSDPModule) else None
        self.copies = HostCopies()

    def reserve(self, names: Sequence[str]) -> None:
        """Begin to make the host memory for snapshots of these sections; after the first step, which makes the optimizer's."""
        self.copies.reserve(self._tensors(names)[1])

    def take(self, names: Sequence[str]) -> Snapshot:
        """Begin to copy the sections of these names."""
        sections, own, optimizer = self._tensors(names)
        return Snapshot(
            config=self._weights.config(self._model), sections=sections, optimizer=optimizer, copied=self.copies.start(own)
        )

    def _tensors(self, names: Sequence[str]) -> tuple[dict[str, dict[str, _Part]], dict[str, Tensor], dict[str, Any]]:
        """Return the parts of each section, this rank's tensors by `section.name`, and the optimizer's state with parts."""
        sections: dict[str, dict[str, _Part]] = {section: {} for section in names}
        own: dict[str, Tensor] = {}
        state = self._optimizer.state_dict() if OPTIMIZER in names else {}
        parts: dict[int, Any] = {}
        for section in names:
            for name, tensor in (_of_state(state) if section == OPTIMIZER else self._weights.tensors(self._model)).items():
                part = parts[id(tensor)] = sections[section][name] = _Part(shape=tensor.shape, ranks=_ranks_of(tensor))
                if self._ranks.rank in part.ranks:
                    averaged = self._average.of(tensor) if section == AVERAGE else None
                    own[f"{section}.{name}"] = local(tensor.detach()) if averaged is None else averaged
        return sections, own, copy.deepcopy(state, parts)

    def gathered(self, taken: Snapshot, section: str) -> dict[str, Tensor]:
        """Return the whole tensors of a section on rank 0, and send this rank's rows there from the others.

        Raises:
            DistError: if a rank that shares a tensor is gone.
        """
        own = taken.copied.result()
        try:
            return {name: self._whole(part, own.get(f"{section}.{name}")) for name, part in taken.sections[section].items()}
        except RuntimeError as error:  # gloo's errors have no class
            raise dist.DistError(str(error)) from error

    def _whole(self, part: _Part, own: Tensor | None) -> Tensor:
        if own is None:
            return torch.empty(0)
        if len(part.ranks) == 1:
            return own
        if not self._ranks.is_main:
            if own.numel():
                dist.send(_bytes(own), dst=0, group=self._group)
            return torch.empty(0)
        full = torch.empty(part.shape, dtype=own.dtype)
        for rank, rows in zip(part.ranks, full.chunk(len(part.ranks)), strict=False):  # the last ranks may have none
            if rank == 0:
                rows.copy_(own)
            elif rows.numel():
                dist.recv(_bytes(rows), src=rank, group=self._group)
        return full


def _of_state(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of an optimizer's state by `number.name`."""
    entries = state["state"].items()
    return {f"{n}.{key}": value for n, entry in entries for key, value in entry.items() if isinstance(value, torch.Tensor)}


def _ranks_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the ranks that have a tensor's rows, in order; rank 0 for one that is whole on every rank."""
    if not isinstance(tensor, DTensor):
        return (0,)
    *replicated, rows = tensor.placements
    assert rows == Shard(0)
    assert all(placement.is_replicate() for placement in replicated), "FSDP shards rows, and HSDP also has replicas of them"
    mesh = tensor.device_mesh.mesh
    return tuple(mesh.view(-1, mesh.shape[-1])[0].tolist())  # rank 0 is in the first replica


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
