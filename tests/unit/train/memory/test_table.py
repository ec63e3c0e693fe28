"""The table of memory: what it computes is what torch counts, and the page has what the command prints."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bucketline.errors import ModelError
from bucketline.train.commands.memory import DOCUMENTED_RANK
from bucketline.train.commands.memory import main as memory
from bucketline.train.config import Ema, OptimizerName, Precision, WeightDtype
from bucketline.train.ema import Average
from bucketline.train.memory.frozen_base import quantise_base
from bucketline.train.memory.offload import Offload
from bucketline.train.memory.published import PUBLISHED
from bucketline.train.memory.table import Memory, choices, memory_of, on_meta
from bucketline.train.models.lora import add_adapters
from bucketline.train.optimizers.choice import make_optimizer
from bucketline.train.parallel import repeated_blocks
from tests.commands import ROOT
from tests.unit.train.tiny_run import config

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bucketline.train.memory.table import Choice

BILLIONS = {"SDXL": 2.567, "SD 3.5 large": 8.06, "FLUX.1-dev": 11.90}
"""Parameters of the published weights."""
SMALL = "a PixArt of two layers"
META = torch.device("meta")


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def counted(family: Any, plain: torch.nn.Module, choice: Choice) -> Memory:
    """Return what torch counts of a model on the meta device after a step; the trainer adapts and quantises it."""
    model = copy.deepcopy(plain)
    if choice.lora_rank is not None:
        add_adapters(model, family, config(Path("unused"), lora_rank=choice.lora_rank, precision=Precision.BF16))
    if choice.base is not None:
        quantise_base(model, choice.base, META)
    trained: list[torch.Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if choice.num_shards > 1:  # along the first dimension, the last shard padded
        trained = [one.new_empty(-(-len(one) // choice.num_shards), *one.shape[1:]).requires_grad_() for one in trained]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    average = copy.deepcopy(trained) if choice.ema is Ema.DEVICE else []
    assert choice.num_shards > 1 or num_bytes(Average(model, 0.9)._averages) == num_bytes(trained)
    frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
    return Memory(
        weights=num_bytes((*trained, *frozen, *model.buffers())),
        gradients=num_bytes(parameter.grad for parameter in trained if parameter.grad is not None),
        moments=num_bytes(value for state in optimizer.state.values() for value in state.values() if value.dim()),
        average=num_bytes(average),
    )


@pytest.mark.parametrize("name", [SMALL, *(pytest.param(one, marks=pytest.mark.slow) for one in BILLIONS)])
def test_the_table_is_within_five_percent_of_what_torch_counts(name: str) -> None:
    if name == SMALL:
        family, model = on_meta({**PUBLISHED["PixArt-Σ"], "num_layers": 2})
    else:
        family, model = on_meta(PUBLISHED[name])
        assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(BILLIONS[name], rel=0.005)
        fewer = {key: 2 if key in ("num_layers", "num_single_layers") else value for key, value in PUBLISHED[name].items()}
        family, model = on_meta(fewer)  # a transformer's layers are alike
    for choice in choices(DOCUMENTED_RANK):
        if choice.offloads or choice.optimizer is not OptimizerName.ADAMW:
            continue  # below
        computed, wanted = memory_of(model, family.lora_targets, choice), counted(family, model, choice)
        for part in ("weights", "gradients", "moments", "average", "total"):
            assert getattr(computed, part) == pytest.approx(getattr(wanted, part), rel=0.05), (choice.label, part)


def test_eight_bit_moments_are_within_five_percent_of_those_of_a_step(tmp_path: Path) -> None:
    narrow = {"num_layers": 2, "num_attention_heads": 4, "cross_attention_dim": 288, "caption_channels": 256}
    family, model = on_meta({**PUBLISHED["PixArt-Σ"], **narrow})
    choice = next(one for one in choices(8) if one.weights is WeightDtype.BF16)
    computed = memory_of(model, family.lora_targets, choice)
    model = model.to_empty(device="cpu").to(torch.bfloat16)
    asked = config(tmp_path, optimizer=choice.optimizer, weights=choice.weights, learning_rate=0.0)
    optimizer = make_optimizer(asked, model, compiled=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
    moments = sum(value.nbytes for value in state if isinstance(value, torch.Tensor))
    assert computed.moments == pytest.approx(moments, rel=0.05)
    assert computed.weights - 2 * num_bytes(model.buffers()) == pytest.approx(num_bytes(model.parameters()), rel=0.05)
    assert (computed.gradients, computed.average) == (num_bytes(model.parameters()), 0)


def test_offloaded_blocks_count_as_two() -> None:
    family, model = on_meta({**PUBLISHED["PixArt-Σ"], "num_layers": 4})
    everything, offloading = (
        memory_of(model, family.lora_targets, choice).weights for choice in choices(8) if choice.lora_rank and not choice.base
    )
    model = torch.nn.Module.to(model.to_empty(device="cpu").requires_grad_(requires_grad=False), torch.bfloat16)
    offload = Offload(repeated_blocks(model), torch.device("cpu"), torch.contiguous_format)
    assert everything - offloading == pytest.approx(offload.num_bytes / 2, rel=0.01)


@pytest.mark.slow
def test_the_page_has_the_table_that_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert memory((), prog="bucketline train memory") == 0
    assert capsys.readouterr().out in (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


def test_a_models_own_folder_is_a_column(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert memory((str(folder / "model"), "--lora-rank", "4"), prog="bucketline train memory") == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "| GB without activations | model |"
    assert last.startswith("| `--lora-rank 4 --base nf4 --offload-blocks all` |")
    (folder / "model" / "unet" / "config.json").write_text(json.dumps({"_class_name": "Other"}), encoding="utf-8")
    with pytest.raises(ModelError, match="_class_name is 'Other', expected one of"):
        memory((str(folder / "model"),), prog="bucketline train memory")
