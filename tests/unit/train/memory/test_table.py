"""The tables of memory: they have what a run really holds, and the page has what the command prints."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from bucketline.errors import ModelError, UsageError
from bucketline.families.family import Family, Padding, StoreFacts
from bucketline.families.registry import FAMILIES, family_of_model
from bucketline.train.commands.memory import DOCUMENTED_RANK, TrainMemory
from bucketline.train.compile import recompute
from bucketline.train.config import Base, Precision, WeightDtype
from bucketline.train.ema import Average
from bucketline.train.lowbit.frozen_base import quantise_base
from bucketline.train.lowbit.offload import frozen_bytes, offload_blocks
from bucketline.train.memory.activations import NORMS, example_batch, norms_in_32_bits, usual_sizes
from bucketline.train.memory.published import PUBLISHED_MODELS
from bucketline.train.memory.table import RANKS, CountedModel, as_tables, choices, label, run_of, savings
from bucketline.train.models.lora import add_adapters
from bucketline.train.optim import NAMED, make_optimizer
from bucketline.train.parallel import separate_blocks
from bucketline.train.values import EmaPlace
from tests.commands import ROOT
from tests.family_models import PIPELINES, RECENT_PIPELINES, tiny_model
from tests.unit.train.packed_families import FAMILIES as PACKED
from tests.unit.train.tiny_run import config

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from bucketline.train.config import TrainConfig

BILLIONS = {"SDXL": 2.567, "SD 3.5 large": 8.06, "FLUX.1-dev": 11.90}
"""Parameters of the published weights."""
NARROW = {"num_layers": 3, "num_attention_heads": 4, "cross_attention_dim": 288, "caption_channels": 256, "sample_size": 16}
NAMES = (*PIPELINES, *RECENT_PIPELINES, "dit")
ROUTED = {"hidream_image"}
"""Families whose tokens are routed to experts by their values."""
POSITIONS: dict[str, dict[str, Any]] = {"z_image": {"axes_lens": [1024, 64, 64]}, "auraflow": {"pos_embed_max_size": 64 * 64}}
"""For an image of 1,024 px."""
SMALL: dict[str, Any] = {**PUBLISHED_MODELS["PixArt-Σ"], **NARROW}
"""A narrow PixArt of three blocks."""
RANK = 4
ON_ONE = [options for options in choices(RANK) if "sharding" not in options]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def counting() -> CountedModel:
    return CountedModel(SMALL)


def num_bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def real(made: torch.nn.Module, asked: TrainConfig) -> tuple[Family, torch.nn.Module]:
    """Return a model as the trainer changes it, in memory."""
    fields: Any = made.config
    kind = family_of_model({**fields, "_class_name": type(made).__name__})
    assert kind is not None
    facts = StoreFacts(latent_channels=0, text={}, shows_padding=kind.padding is not Padding.VALID)
    family = kind(dict(fields), facts)
    family.prepare(made)
    if asked.weights is WeightDtype.BF16:
        torch.nn.Module.to(made, torch.bfloat16)
    if asked.lora_rank is not None:
        add_adapters(made, family, asked)
    if isinstance(asked.base, Base):
        quantise_base(made, asked.base, CPU)
    return family, made


@pytest.mark.parametrize("options", ON_ONE, ids=label)
def test_a_row_has_what_a_run_holds_after_a_step(tmp_path: Path, options: dict[str, Any], counting: CountedModel) -> None:
    import diffusers

    kind: Any = diffusers.PixArtTransformer2DModel
    asked = config(tmp_path, **{"precision": Precision.BF16, "learning_rate": 0.0, **options})
    _, model = real(kind.from_config(SMALL), asked)
    back = sum(sorted(map(frozen_bytes, separate_blocks(model)))[-2:]) if asked.offload_blocks else 0
    offload_blocks(model, asked.offload_blocks or 0, CPU, torch.contiguous_format)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = make_optimizer(asked, model, compiled=False)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    average = Average(model, asked.ema.decay)
    found = counting.memory(options)
    assert found.weights == back + num_bytes((*model.parameters(), *model.buffers()))
    assert found.gradients == num_bytes(parameter.grad for parameter in trained)
    assert found.moments == pytest.approx(num_bytes(value for entry in state.values() for value in entry.values()), rel=0.001)
    on_device = [] if asked.ema.place is EmaPlace.CPU else average._averages
    assert found.average == num_bytes(on_device)


def test_shards_are_an_eighth(counting: CountedModel) -> None:
    whole, shard = (counting.memory(options) for options in ({}, next(one for one in choices(RANK) if "sharding" in one)))
    padded = sum(4 * one[0].numel() * -(-len(one) // RANKS) for one in counting.made(run_of({}))[1].parameters())
    assert shard.gradients == pytest.approx(padded, rel=0.05)
    assert whole.gradients / shard.gradients == pytest.approx(RANKS, rel=0.001)


def test_the_tables_have_every_optimizer() -> None:
    assert {options["optimizer"] for options in choices(RANK) if "optimizer" in options} == {*NAMED} - {"adamw"}


def held_after(model: torch.nn.Module, family: Family, images: int) -> int:
    """Return the bytes that a forward pass has taken and not given back, as torch's profiler sees them."""
    batch = example_batch(family, usual_sizes(family, images))
    noisy, timesteps = torch.zeros_like(batch.latents), torch.zeros(images)
    seeing = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with seeing as seen, torch.autocast("cpu", torch.bfloat16), norms_in_32_bits():
        output = family.predict(model, noisy, timesteps, batch)
    assert output.grad_fn is not None  # which holds the activations
    return sum(event.self_cpu_memory_usage for event in seen.key_averages())


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one == "dit" else pytest.mark.slow) for one in NAMES if one not in ROUTED]
)
def test_activations_are_what_torch_keeps(tmp_path: Path, name: str) -> None:
    counting = None
    for options in savings(RANK) if name in PACKED else ({},):
        asked = config(tmp_path, **{"precision": Precision.BF16, **options})
        family, model = real(tiny_model(name, **POSITIONS.get(name, {})), asked)
        counting = counting or CountedModel({**family.config, "_class_name": type(model).__name__})
        recompute(model, asked, is_compiled=False)
        _, one, two = (held_after(model, family, images) for images in (1, 1, 2))  # the first keeps tables of positions
        assert counting.activations(options) == two - one, label(options)


@pytest.mark.slow
def test_the_activations_of_each_familys_model_are_counted_or_refused_with_the_reason_and_another_way() -> None:
    counted, refused = set[str](), dict[str, str]()
    for name in NAMES:
        model = tiny_model(name)
        counting = CountedModel({**dict(model.config), "_class_name": type(model).__name__})
        family, _ = counting.made(run_of({}))
        try:
            assert counting.activations({}) > 0, name
            counted.add(family.name)
        except UsageError as error:
            refused[family.name] = str(error)
    assert refused.keys() == ROUTED
    words = r"activations of a HiDreamImage\w+ cannot be counted without a run, since .* depend on values; train a few steps"
    assert re.search(words, refused["hidream_image"])
    assert counted == {family.name for family in FAMILIES} - ROUTED - {"pixart_sigma"}  # of the transformer of pixart_alpha


def test_norms_are_those_of_autocast_on_a_gpu() -> None:
    for norm in NORMS:
        has = [torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{norm}", f"Autocast{on}") for on in ("CUDA", "CPU")]
        assert has == [True, False]
    with norms_in_32_bits():
        assert torch.nn.GroupNorm(1, 2)(torch.zeros(1, 2, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("name", BILLIONS)
def test_a_published_model_has_its_number_of_weights(name: str) -> None:
    assert CountedModel(PUBLISHED_MODELS[name]).memory({}).gradients == pytest.approx(4e9 * BILLIONS[name], rel=0.005)


@pytest.mark.slow
def test_the_page_has_what_the_command_prints() -> None:
    name = "DiT-XL/2"
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    shown = [line.split("|") for line in page[page.index("| GB without activations |") :].splitlines() if line.startswith("|")]
    printed = [line.split("|") for line in as_tables({name: PUBLISHED_MODELS[name]}, DOCUMENTED_RANK).splitlines() if line]
    column = [cell.strip() for cell in shown[0]].index(name)
    assert [(row[1], row[column]) for row in shown[: len(printed)]] == [(row[1], row[2]) for row in printed]


@pytest.mark.slow
def test_a_models_own_folder_is_a_column(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert TrainMemory(models=(folder / "model",), lora_rank=4).run() == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == f"| GB without activations | {folder.name}/model |"
    assert last.startswith("| `--lora-rank 4 --recompute 1` |")


def test_a_folder_of_another_class_is_refused(folder: Path) -> None:
    (folder / "model" / "unet" / "config.json").write_text(json.dumps({"_class_name": "Other"}), encoding="utf-8")
    with pytest.raises(ModelError, match="_class_name is 'Other', expected one of"):
        TrainMemory(models=(folder / "model",)).run()
