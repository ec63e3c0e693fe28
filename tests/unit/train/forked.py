"""Ranks of one machine that wait for one another, in processes forked from this one."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from bucketline.loader.ranks import host_group
from bucketline.train.parallel import TrainRanks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def fork_ranks(folder: Path, body: Callable[[TrainRanks], None], num: int = 2) -> None:
    """Run `body` in `num` ranks, to their ends."""
    pids = []
    for rank in range(num):
        pid = os.fork()
        if pid == 0:
            try:
                os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num)}
                torch.set_num_threads(1)
                dist.init_process_group("gloo", store=FileStore(str(folder / "ranks"), num), rank=rank, world_size=num)
                host_group()
                body(TrainRanks(rank=rank, world_size=num))
            except BaseException:  # noqa: BLE001 - a forked process must not return into pytest
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * num
