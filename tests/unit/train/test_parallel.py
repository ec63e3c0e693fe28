"""Ranks that wait for one another, in processes forked from this one."""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import TYPE_CHECKING

import torch.distributed as dist

from bucketline.train.parallel import DISK_TIME, TrainRanks, first_of_each_machine_first, from_rank_zero, host_group

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def fork_ranks(folder: Path, body: Callable[[TrainRanks], None]) -> None:
    """Run `body` in two ranks of one machine, to their ends."""
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                os.environ["LOCAL_RANK"] = str(rank)
                dist.init_process_group("gloo", store=dist.FileStore(str(folder / "ranks"), 2), rank=rank, world_size=2)
                host_group()
                body(TrainRanks(rank=rank, world_size=2))
            except BaseException:  # noqa: BLE001 - a forked process must not return into pytest
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]


def test_the_first_rank_of_a_machine_goes_first(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def body(ranks: TrainRanks) -> None:
        with first_of_each_machine_first(ranks):
            if ranks.is_main:
                time.sleep(0.2)  # long enough for the other one to overtake
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{ranks.rank} ")

    fork_ranks(tmp_path, body)
    assert log.read_text(encoding="utf-8") == "0 1 "


def test_decisions_and_waits_go_over_a_group_of_their_own_that_waits_for_disks(tmp_path: Path) -> None:
    def body(ranks: TrainRanks) -> None:
        (backend,) = {host_group()._get_backend(device) for device in host_group()._device_types}
        assert (dist.get_backend(host_group()), backend.options._timeout) == ("gloo", DISK_TIME)
        groups: list[object] = []
        plain = dist.broadcast_object_list
        dist.broadcast_object_list = lambda *given, **named: groups.append(named["group"]) or plain(*given, **named)
        assert from_rank_zero(ranks, lambda: "rank 0's") == "rank 0's"
        assert groups == [host_group()]

    fork_ranks(tmp_path, body)
