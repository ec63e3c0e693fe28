"""Models of real sizes on the meta device: what one of 64 ranks holds of them, whatever the sharding. Nothing is allocated."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from bucketline.families.family import StoreFacts
from bucketline.train.config import Precision
from bucketline.train.lora import add_adapters
from bucketline.train.optim import Average
from bucketline.train.parallel import TrainRanks, local, repeated_blocks, shard, tensors_of
from tests.models import write_files
from tests.requirements_page import OF, PUBLISHED
from tests.unit.train.tiny_run import config, load

pytestmark = pytest.mark.slow

RANKS = TrainRanks(rank=13, world_size=64)
CPU = torch.device("cpu")

# of each model: the name of its published configuration, what its store offers, and its billions of weights.
REAL: dict[str, tuple[str, StoreFacts, float]] = {
    "sdxl": ("SDXL", StoreFacts(latent_channels=4, text={"tokens": 2048, "pooled": 1280}), 2.567),
    "sd3.5-large": ("SD 3.5 large", StoreFacts(latent_channels=16, text={"tokens": 4096, "pooled": 2048}), 8.057),
    "flux": ("FLUX.1-dev", StoreFacts(latent_channels=16, text={"tokens": 4096, "pooled": 768}), 11.901),
}


class HostBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that are made in host memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not isinstance(result, DTensor) and result.device.type == "cpu":
            self.made += num_bytes([result])
        return result


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """One process that takes itself for a rank of many."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANKS.rank, world_size=RANKS.world_size)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("lora_rank", [None, 16])
@pytest.mark.parametrize("name", REAL)
def test_a_rank_holds_its_share_and_nothing_on_its_host(tmp_path: Path, name: str, lora_rank: int | None) -> None:
    model_name, facts, billions = REAL[name]
    published, kind = PUBLISHED[model_name], OF[PUBLISHED[model_name].family]
    fields = {"_class_name": kind.model_class, **(published.config or {})}
    write_files(tmp_path, {f"{kind.folder}/config.json": json.dumps(fields)})
    asked = config(tmp_path, precision=Precision.BF16, lora_rank=lora_rank)
    with HostBytes() as on_host:
        family, unsharded = load(tmp_path, facts, 0, on_meta=True)
        if lora_rank is not None:
            add_adapters(unsharded, family, asked)
        whole = num_bytes(unsharded.parameters())
        assert whole == pytest.approx((4 if lora_rank is None else 2) * 1e9 * billions, rel=0.02)
        for sharding, parts in (("ddp", 1), ("fsdp", RANKS.world_size)):
            model = copy.deepcopy(unsharded)
            if sharding != "ddp":
                shard(model, CPU, torch.bfloat16)
            expect_shards(model, parts)
            assert num_bytes(map(local, model.parameters())) == pytest.approx(whole / parts, rel=0.03)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            if lora_rank is not None:
                assert num_bytes(trained) < 0.05 * whole
            average = Average(model, 0.9)
            assert num_bytes(average._averages) == num_bytes(map(local, trained))  # and so are gradients and moments
            assert all(tensor.is_meta for tensor in (*tensors_of(model).values(), *average._averages))
    assert on_host.made < 4 << 20  # the states of generators, numbers, and the like


def expect_shards(model: nn.Module, parts: int) -> None:
    """Expect a share of each parameter, and only small parts of the model to be whole at a time."""
    for parameter in model.parameters():
        if parts == 1:
            assert not isinstance(parameter, DTensor)
            continue
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Shard(0),)
        assert local(parameter).numel() <= -(-parameter.shape[0] // parts) * parameter[0].numel()
    if parts > 1:
        blocks = [num_bytes(block.parameters()) for block in repeated_blocks(model)]
        rest = num_bytes(model.parameters()) - sum(blocks)
        assert max(*blocks, rest) < 0.1 * num_bytes(model.parameters())
