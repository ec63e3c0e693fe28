"""Ranks that wait for one another, in processes forked from this one."""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from bucketline.train.models.load import load
from bucketline.train.parallel import (
    DISK_TIME,
    TrainRanks,
    fill_from_rank_zero,
    first_of_each_machine_first,
    from_rank_zero,
    host_group,
    repeated_blocks,
    shard,
    tensors_of,
)
from bucketline.train.parallel import whole as whole_tensor
from tests.unit.train.tiny_run import facts, make_batch, write_unet

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
                dist.init_process_group("gloo", store=FileStore(str(folder / "ranks"), 2), rank=rank, world_size=2)
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
        plain: Any = dist.broadcast_object_list

        def noting(*given: Any, group: object, **named: Any) -> None:
            groups.append(group)
            plain(*given, group=group, **named)

        dist.broadcast_object_list = noting  # type: ignore[assignment]
        assert from_rank_zero(ranks, lambda: "rank 0's") == "rank 0's"
        assert groups == [host_group()]

    fork_ranks(tmp_path, body)


def test_rank_zero_fills_a_sharded_model_that_the_other_has_no_weights_of(tmp_path: Path) -> None:
    """Weights are gathered in 16 bits; their shards keep 32. No rank but 0 makes a tensor that holds the model."""

    def body(ranks: TrainRanks) -> None:
        family, model = load(tmp_path / "model", facts(), 0, on_meta=not ranks.is_main)
        assert all(tensor.is_meta is not ranks.is_main for tensor in tensors_of(model).values())
        whole = tensors_of(model) if ranks.is_main else None
        torch.nn.Module.to(model, "meta")
        shard(model, torch.device("cpu"), torch.bfloat16)
        model.to_empty(device="cpu")
        fill_from_rank_zero(model, whole)
        _, expected = load(tmp_path / "model", facts(), 0)
        for name, tensor in tensors_of(model).items():
            assert tensor.dtype is torch.float32
            assert torch.equal(whole_tensor(tensor), tensors_of(expected)[name])
        seen: set[torch.dtype] = set()
        for block in repeated_blocks(model):
            block.register_forward_pre_hook(lambda one, _: seen.update(p.dtype for p in one.parameters()), prepend=False)
        batch = make_batch()
        with torch.autocast("cpu", torch.bfloat16):
            found = family.predict(model, batch.latents.float(), batch.keys % 1000, batch)
            wanted = family.predict(expected, batch.latents.float(), batch.keys % 1000, batch)
        assert seen == {torch.bfloat16}
        torch.testing.assert_close(found.float(), wanted.float(), rtol=0.05, atol=0.02)
        found.float().square().mean().backward()  # type: ignore[no-untyped-call]
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}

    write_unet(tmp_path / "model")
    fork_ranks(tmp_path, body)
