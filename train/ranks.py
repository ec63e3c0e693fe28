"""The processes of one run: who this one is, what rank 0 decides for all, and one agreed moment to stop."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from bucketline.errors import TrainError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

T = TypeVar("T")

DISK_TIME = timedelta(hours=2)
"""How long ranks wait for one another: rank 0 may be at its disk, with a checkpoint of 190 GB, for longer than the usual ten
minutes."""


class OtherRankFailedError(TrainError):
    """Another rank failed and has said why; this one only has to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One process among those of the run, as torchrun numbers them."""

    rank: int
    world_size: int
    local_rank: int

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes files and talks."""
        return self.rank == 0


def from_rank_zero(ranks: Ranks, make: Callable[[], T]) -> T:
    """Run `make` on rank 0 alone and give its result to every rank.

    Raises:
        OtherRankFailedError: on the other ranks, where `make` raised on rank 0 (which raises what it raised).
    """
    if ranks.world_size == 1:
        return make()
    message: list[tuple[bool, T | None]] = [(False, None)]
    if not ranks.is_main:
        dist.broadcast_object_list(message, src=0)
        good, result = message[0]
        if not good:
            raise OtherRankFailedError("rank 0 failed")
        return result  # type: ignore[return-value] # None only where `make` gives None
    try:
        message = [(True, make())]
    finally:
        dist.broadcast_object_list(message, src=0)
    return message[0][1]  # type: ignore[return-value]


def expect_equal(ranks: Ranks, name: str, value: str) -> None:
    """Check that every rank has the same `value`.

    Raises:
        TrainError: naming two ranks and their values.
    """
    if ranks.world_size == 1:
        return
    values: list[str | None] = [None] * ranks.world_size
    dist.all_gather_object(values, value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise TrainError(f"{name} is {other} on rank {rank} and {values[0]} on rank 0; do all ranks see the same files?")


class StopRequest:
    """SIGTERM or SIGINT, turned into one step at which every rank stops.

    A signal reaches the ranks at different moments, so a rank that stopped at once would leave the others waiting.
    The flags are combined over a gloo group by an all-reduce started after one step and read after the next:
    no rank waits for another, nothing touches the accelerator, and all read the same answer at the same step.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Listen from now on; call it on every rank at the same place."""
        self._asked = 0
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None
        self._group = dist.new_group(backend="gloo", timeout=DISK_TIME) if ranks.world_size > 1 else None
        self._before = {number: signal.signal(number, self._listen) for number in (signal.SIGTERM, signal.SIGINT)}

    def agreed(self) -> str | None:
        """Give the name of the signal that every rank stops for, if any; each rank calls this once after each step."""
        if self._group is None:
            return signal.Signals(self._asked).name if self._asked else None
        if self._work is not None:
            self._work.wait()
        seen = int(self._flag)
        self._flag = torch.tensor([self._asked], dtype=torch.int32)
        self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return signal.Signals(seen).name if seen else None

    def close(self) -> None:
        """Leave signals as they were found."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _listen(self, number: int, _frame: FrameType | None) -> None:
        self._asked = number
