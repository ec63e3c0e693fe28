"""The host memory of each rank of a sharded model, counted by the kernel: what grows with the model, and by how much of it."""

from __future__ import annotations

import ctypes
import functools
import gc
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel

from bucketline.train.checkpoint import copied, layout_of
from bucketline.train.config import Precision
from bucketline.train.lora import add_adapters
from bucketline.train.model import place_model
from tests.process_memory import forget_highest, in_memory
from tests.unit.train.forked import fork_ranks
from tests.unit.train.test_loading import offered
from tests.unit.train.tiny_run import config, load

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.train.config import TrainConfig
    from bucketline.train.parallel import TrainRanks

pytestmark = pytest.mark.slow

NUM_RANKS = 4
NUM_BLOCKS = (2, 8)
SLACK = 0.15  # of the model's weights
ATTEMPTS = 3  # as long as other processes disturb
M_MMAP_THRESHOLD = -3  # of mallopt(3)


def write_transformer(folder: Path, num_blocks: int) -> int:
    """Write a transformer with weights; return their bytes. Its tensors have the same sizes whatever its number of blocks."""

    def write(_: TrainRanks) -> None:
        model: Any = FluxTransformer2DModel
        model(
            in_channels=16,
            num_layers=0,
            num_single_layers=num_blocks,
            attention_head_dim=64,
            num_attention_heads=8,
            joint_attention_dim=24,
            pooled_projection_dim=8,
            axes_dims_rope=(16, 24, 24),
        ).save_pretrained(folder / "transformer")

    folder.mkdir(parents=True)
    fork_ranks(folder, write, num=1)  # else the ranks, which are forked from here, begin with memory to spare
    return sum(path.stat().st_size for path in (folder / "transformer").glob("*.safetensors"))


def begin_again() -> None:
    """Return free memory to the kernel, and have it forget the highest value so far."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    forget_highest()


def measure(ranks: TrainRanks, folder: Path, asked: TrainConfig) -> None:
    """Place a model, take an optimizer step and a checkpoint's copies; write the highest host memory of each part, in bytes."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # what is freed goes back to the kernel at once
    begin_again()
    before = in_memory("VmRSS")
    dtype = torch.float32 if asked.lora_rank is None else torch.bfloat16
    family, model = load(asked.model, offered("flux"), 0, dtype=dtype, on_meta=not ranks.is_main)
    if asked.lora_rank is not None:
        add_adapters(model, family, asked)
    weights = layout_of(family, adapters=asked.lora_rank is not None)
    average = place_model(model, asked, ranks, torch.device("cpu"), weights, None)
    placed = in_memory("VmHWM") - before
    begin_again()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], fused=True)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    stepped = in_memory("VmHWM") - before
    begin_again()
    copies = copied(weights, model, average, optimizer, keeps=ranks.is_main)
    saved = in_memory("VmHWM") - before
    assert copies
    (folder / f"{ranks.rank}.json").write_text(json.dumps([placed, stepped, saved]), encoding="ascii")


Peaks = tuple[float, float, float]

# of each part, in models of 32-bit weights: rank 0's peak and the others'
CASES: dict[str, tuple[dict[str, Any], Peaks, Peaks]] = {
    # a quarter of weights, average, gradients and two moments; of a checkpoint, rank 0 has weights and average whole, and each
    # rank copies of its moments
    "fsdp": ({"sharding": "fsdp"}, (1 + 1 / 4, 5 / 4, 4 / 4 + 2 + 2 / 4), (2 / 4, 5 / 4, 4 / 4 + 2 / 4)),
    # weights in 16 bits, which hardly train; rank 0 reads them whole as 32 and has them whole as 16 before they are sharded
    "adapters": (
        {"sharding": "fsdp", "lora_rank": 2, "precision": Precision.BF16},
        (1.5, 1 / 4, 1 / 4),
        (1 / 4, 1 / 4, 1 / 4),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_memory_grows_by_shards_and_on_rank_zero_alone_by_whole_models(tmp_path: Path, case: str) -> None:
    changes, of_rank_zero, of_others = CASES[case]
    roots = [tmp_path / str(num_blocks) for num_blocks in NUM_BLOCKS]
    sizes = [write_transformer(root / "model", num_blocks) for root, num_blocks in zip(roots, NUM_BLOCKS, strict=True)]
    most = np.array([of_rank_zero, *[of_others] * (NUM_RANKS - 1)]) + SLACK
    lowest = np.full(most.shape, np.inf)
    for attempt in range(ATTEMPTS):
        peaks = []
        for root in roots:
            folder = root / str(attempt)
            folder.mkdir()
            fork_ranks(folder, functools.partial(measure, folder=folder, asked=config(root, **changes)), num=NUM_RANKS)
            peaks.append([json.loads((folder / f"{rank}.json").read_bytes()) for rank in range(NUM_RANKS)])
        lowest = np.minimum(lowest, np.subtract(*reversed(peaks)) / (sizes[1] - sizes[0]))
        if (lowest < most).all():
            break
    assert (lowest < most).all(), (lowest, most)
