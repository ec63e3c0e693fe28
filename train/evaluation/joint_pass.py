"""Work on a device that may have no memory for it; passes of a sharded model, which every rank then gives up together."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from bucketline.allocator import is_out_of_memory
from bucketline.train.parallel import host_group

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

T = TypeVar("T")


class NoRoom(Exception):  # noqa: N818 - a result: nothing is wrong with the run
    """Device memory has ended, in the words of torch or of a library of CUDA."""


class NoRoomElsewhere(NoRoom):
    """Only another rank's memory has ended."""


def attempt(make: Callable[[], T]) -> T | NoRoom:
    """Return what `make` returns, or that memory has ended: then it has left no tensor."""
    try:
        return make()
    except NoRoom as error:
        found = error.with_traceback(None)  # the traceback would keep the tensors of the failed call alive
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        found = NoRoom(str(error))
    torch.cuda.empty_cache()
    return found


def attempt_jointly(model: nn.Module, make: Callable[[], T]) -> T | NoRoom:
    """Attempt forward passes of a model; of a sharded one, the same passes on every rank, which all have room or all have not.

    Sharded blocks are gathered from all ranks when they run, so a rank that left alone would keep the others waiting there.
    Before each gathering the ranks therefore tell each other whether all still have memory, and else leave at that point: a
    rank that has failed finishes the gathering that it was in, and then joins the exchange. It is gloo's, in host memory.

    Raises:
        RuntimeError: as `make`; also if memory ends on a rank and torch is older than 2.13, which cannot leave a sharded model.
    """
    if not isinstance(model, FSDPModule):
        return attempt(make)
    if not hasattr(model, "reset_iter_state"):
        return make()
    gathering: list[FSDPModule] = []  # the module whose weights this rank has begun to gather, if any

    def begin(module: nn.Module, _: object) -> None:
        _expect_room()
        assert isinstance(module, FSDPModule)
        gathering.append(module)

    def end(_module: nn.Module, _: object) -> None:
        gathering.clear()

    def make_and_agree() -> T:
        result = make()
        _expect_room()
        return result

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    hooks = [module.register_forward_pre_hook(begin, prepend=True) for module in sharded]  # FSDP gathers between the two
    hooks += [module.register_forward_pre_hook(end) for module in sharded]
    try:
        result = attempt(make_and_agree)
    finally:
        for hook in hooks:
            hook.remove()
    if isinstance(result, NoRoom):
        if not isinstance(result, NoRoomElsewhere):
            for module in gathering:
                module.unshard()  # as the other ranks do; in training, there was room for more
            _agree(has_room=False)
        model.reset_iter_state()
    return result


def _expect_room() -> None:
    """Agree with the other ranks that all have memory.

    Raises:
        NoRoomElsewhere: if one has not.
    """
    if failed := _agree(has_room=True):
        raise NoRoomElsewhere(f"rank {failed - 1} has no more")


def _agree(*, has_room: bool) -> int:
    """Return 0 if every rank has memory, else 1 and the number of one that has not."""
    failed = torch.tensor(0 if has_room else 1 + dist.get_rank())
    dist.all_reduce(failed, dist.ReduceOp.MAX, group=host_group())
    return int(failed)
