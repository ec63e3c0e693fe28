"""Ranks that wait for one another, in processes forked from this one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bucketline.errors import ModelError
from bucketline.loader.ranks import DISK_TIME, OtherRankFailedError, fail_together, host_group
from bucketline.train.parallel import (
    TrainRanks,
    first_of_each_machine_first,
    from_rank_zero,
)
from tests.unit.train.forked import fork_ranks


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
        plain: Any = dist.all_gather_object

        def noting(*given: Any, group: object, **named: Any) -> None:
            groups.append(group)
            plain(*given, group=group, **named)

        dist.all_gather_object = noting  # type: ignore[assignment]
        assert from_rank_zero(ranks, lambda: "rank 0's") == "rank 0's"
        assert set(groups) == {host_group()}

    fork_ranks(tmp_path, body)


def test_what_fails_on_one_rank_ends_the_other_as_well(tmp_path: Path) -> None:
    """Only rank 0 reads a model's weights, so only it sees that they are damaged."""

    def body(ranks: TrainRanks) -> None:
        @fail_together()
        def read(failing: int) -> None:
            if ranks.rank == failing:
                raise ModelError("damaged")

        for failing in (0, 1):
            with pytest.raises(ModelError if ranks.rank == failing else OtherRankFailedError):
                read(failing)
        with pytest.raises(ZeroDivisionError if ranks.is_main else OtherRankFailedError):
            from_rank_zero(ranks, lambda: 1 // 0)
        read(2)

    fork_ranks(tmp_path, body)
