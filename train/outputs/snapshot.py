"""A run's tensors at one step in host memory: each rank copies what it has of them, and rank 0 gathers it while it writes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from bucketline.train.outputs.host_copy import HostCopies
from bucketline.train.parallel import DISK_TIME, local, whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from bucketline.train.ema import Average
    from bucketline.train.outputs.weights import Weights
    from bucketline.train.parallel import TrainRanks

MODEL, AVERAGE, OPTIMIZER = "model", "average", "optimizer"


@dataclass(slots=True, kw_only=True)
class _Part:
    """A tensor in host memory, or this rank's rows of it."""

    shape: torch.Size  # of the whole
    dtype: torch.dtype
    sharing: tuple[int, ...]  # the ranks that have its rows, in order; (): rank 0 has it whole
    host: Tensor | None = None  # None: nothing of it is on this rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The sections of a step that are saved, complete when the snapshots' `wait` has returned."""

    config: str  # of the model, or of its adapters
    sections: Mapping[str, Mapping[str, _Part]]
    optimizer: Mapping[str, Any]  # its state without the tensors


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
        self._copies = HostCopies()

    def reserve(self, names: Sequence[str]) -> None:
        """Begin to make the host memory for snapshots of these sections; after the first step, which makes the optimizer's."""
        self._copies.reserve(self._parts(names)[1])

    def take(self, names: Sequence[str]) -> Snapshot:
        """Begin to copy the sections of these names; no tensor may change before `wait` has returned."""
        sections, to_copy = self._parts(names)
        for key, host in self._copies.start(to_copy).items():
            section, _, name = key.partition(".")
            sections[section][name].host = host
        saved = self._optimizer.state_dict() if OPTIMIZER in names else {"state": {}, "param_groups": []}
        others = {
            number: {key: copy.deepcopy(value) for key, value in entry.items() if not _is_tensor(value)}
            for number, entry in saved["state"].items()
        }
        groups = copy.deepcopy(saved["param_groups"])
        return Snapshot(
            config=self._weights.config(self._model),
            sections=sections,
            optimizer={**saved, "state": others, "param_groups": groups},
        )

    def _parts(self, names: Sequence[str]) -> tuple[dict[str, dict[str, _Part]], dict[str, Tensor]]:
        """Return what this rank keeps of each section's tensors, and by `section.name` what is copied for that."""
        sections: dict[str, dict[str, _Part]] = {section: {} for section in names}
        to_copy: dict[str, Tensor] = {}
        for section in names:
            tensors = _states(self._optimizer) if section == OPTIMIZER else self._weights.tensors(self._model)
            for name, tensor in tensors.items():
                averaged = self._average.of(tensor) if section == AVERAGE else None
                part, own = self._part(tensor.detach(), averaged)
                sections[section][name] = part
                if own is not None:
                    to_copy[f"{section}.{name}"] = own
        return sections, to_copy

    def wait(self) -> None:
        """Wait until the latest snapshot is complete."""
        self._copies.wait()

    def close(self) -> None:
        """Wait for the copies and end their thread."""
        self._copies.close()

    def gathered(self, parts: Mapping[str, _Part]) -> dict[str, Tensor]:
        """Return the whole tensors of a section on rank 0, and send this rank's rows there from the others.

        Raises:
            DistError: if a rank that shares a tensor is gone.
        """
        try:
            return {name: self._whole(part) for name, part in parts.items()}
        except RuntimeError as error:  # gloo's errors have no class
            raise dist.DistError(str(error)) from error

    def _part(self, tensor: Tensor, averaged: Tensor | None) -> tuple[_Part, Tensor | None]:
        """Return what this rank keeps of a tensor, or of its average, and what is copied for that in the background."""
        sharing = _sharing(tensor)
        if sharing:
            own = averaged if averaged is not None else local(tensor)
            part = _Part(shape=tensor.shape, dtype=own.dtype, sharing=sharing)
            return part, own if self._ranks.rank in sharing else None
        full = whole(tensor) if averaged is None else averaged  # on every rank
        part = _Part(shape=full.shape, dtype=full.dtype, sharing=())
        if not self._ranks.is_main:
            return part, None
        if type(full) is torch.Tensor:
            return part, full
        part.host = full.to("cpu", copy=True)  # a quantised tensor, which consists of several
        return part, None

    def _whole(self, part: _Part) -> Tensor:
        if part.host is None or not part.sharing:
            return torch.empty(0) if part.host is None else part.host
        if not self._ranks.is_main:
            if part.host.numel():
                dist.send(_bytes(part.host), dst=0, group=self._group)
            return torch.empty(0)
        full = torch.empty(part.shape, dtype=part.dtype)
        rows = -(-len(full) // len(part.sharing))
        for rank, target in zip(part.sharing, torch.split(full, rows), strict=False):  # the last ranks may have none
            if rank == self._ranks.rank:
                target.copy_(part.host)
            elif target.numel():
                dist.recv(_bytes(target), src=rank, group=self._group)
        return full


def _states(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the tensors of an optimizer's state by `number.name`."""
    entries = optimizer.state_dict()["state"].items()
    return {f"{number}.{key}": value for number, entry in entries for key, value in entry.items() if _is_tensor(value)}


def with_tensors(optimizer: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return an optimizer's state dict, from a snapshot's `optimizer` and the tensors of its section."""
    state: dict[int, dict[str, Any]] = {number: dict(entry) for number, entry in optimizer["state"].items()}
    for name, tensor in tensors.items():
        number, _, key = name.partition(".")
        state[int(number)][key] = tensor
    return {**optimizer, "state": state}


def _sharing(tensor: Tensor) -> tuple[int, ...]:
    """Return the ranks that have a tensor's rows, in order; () if it is whole, or of several tensors (quantised)."""
    if not isinstance(tensor, DTensor) or type(local(tensor)) is not torch.Tensor:
        return ()
    *replicated, rows = tensor.placements
    assert rows == Shard(0)
    assert all(placement.is_replicate() for placement in replicated), "FSDP shards rows, and HSDP also has replicas of them"
    ranks = tensor.device_mesh.mesh
    while ranks.ndim > 1:  # rank 0 is in the first replica
        ranks = ranks[0]
    return tuple(ranks.tolist())


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
