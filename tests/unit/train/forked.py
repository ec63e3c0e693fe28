"""Ranks of one machine that wait for one another, in processes forked from this one."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from bucketline.loader.ranks import host_group
from bucketline.train.parallel import TrainRanks


def forked(body: Callable[[TrainRanks], None], ranks: TrainRanks) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        body(ranks)
    except BaseException:  # noqa: BLE001 - a forked process must not return into pytest
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def ended(*pids: int) -> None:
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * len(pids)


def fork_ranks(folder: Path, body: Callable[[TrainRanks], None], num: int = 2, *, has_host_group: bool = True) -> None:
    def begin(ranks: TrainRanks) -> None:
        os.environ |= {"LOCAL_RANK": str(ranks.rank), "LOCAL_WORLD_SIZE": str(num)}
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=FileStore(str(folder / "ranks"), num), rank=ranks.rank, world_size=num)
        if has_host_group:
            host_group()
        body(ranks)

    ended(*[forked(begin, TrainRanks(rank=rank, world_size=num)) for rank in range(num)])
