"""What the UNet family takes, and what it refuses with the field named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from bucketline.errors import ModelError
from bucketline.train.families.loading import load
from bucketline.train.objectives import Objective
from bucketline.train.schedule import load_schedule
from tests.unit.train.tiny_run import SCHEDULER, facts, make_batch, write_unet

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_channels": 4}, "in_channels is 4, expected 2"),
        ({"out_channels": 4}, "out_channels is 4, expected 2"),
        ({"cross_attention_dim": 768}, "cross_attention_dim is 768, expected 5"),
        ({"addition_embed_type": "image"}, "addition_embed_type is image, expected none"),
        ({"addition_embed_type": "text_time"}, "needs the text column pooled, and the store has tokens"),
        ({"dropout": 0.1}, "dropout is 0.1, expected 0"),
        ({"_class_name": "DiTTransformer2DModel"}, "_class_name is 'DiTTransformer2DModel'"),
    ],
)
def test_a_model_that_does_not_suit_the_store_is_refused_naming_the_field(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load(write_unet(tmp_path, **changes), facts(), seed=0)


def test_a_folder_without_a_unet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither unet/config\.json nor transformer/config\.json"):
        load(tmp_path, facts(), seed=0)


def test_a_model_without_weights_starts_at_random_from_the_seed(tmp_path: Path) -> None:
    folder = write_unet(tmp_path)
    first, again, other = (load(folder, facts(), seed=seed) for seed in (1, 1, 2))
    assert first.at_random
    weights = [loaded.model.get_parameter("conv_in.weight") for loaded in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_weights_are_taken_where_there_are_some(tmp_path: Path) -> None:
    made = load(write_unet(tmp_path), facts(), seed=3).model
    made.save_pretrained(tmp_path / "unet")  # type: ignore[operator]
    loaded = load(tmp_path, facts(), seed=0)
    assert not loaded.at_random
    assert torch.equal(loaded.model.get_parameter("conv_in.weight"), made.get_parameter("conv_in.weight"))


def test_damaged_weights_are_refused_and_never_replaced_by_random_ones(tmp_path: Path) -> None:
    folder = write_unet(tmp_path)
    (folder / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"\x10" * 100)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(folder, facts(), seed=0)


def test_weights_that_lack_a_tensor_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    load(write_unet(tmp_path), facts(), seed=3).model.save_pretrained(tmp_path / "unet")  # type: ignore[operator]
    path = tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    del tensors["conv_in.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"conv_in\.weight"):
        load(tmp_path, facts(), seed=0)


@pytest.mark.parametrize("shown", [False, True])
def test_padding_tokens_reach_the_model_only_where_its_pipeline_shows_them(tmp_path: Path, *, shown: bool) -> None:
    loaded = load(write_unet(tmp_path), facts(shows_padding=shown), seed=0)
    batch = make_batch()
    batch.token_mask[:, 2:] = False
    noisy, timesteps = torch.ones(3, 2, 8, 8), torch.tensor([1, 2, 3])
    with torch.no_grad():
        before = loaded.family.predict(loaded.model, noisy, timesteps, batch)
        batch.tokens[:, 2:] += 1.0
        after = loaded.family.predict(loaded.model, noisy, timesteps, batch)
    assert torch.equal(before, after) is not shown


def test_the_objective_is_the_schedulers(tmp_path: Path) -> None:
    folder = write_unet(tmp_path, scheduler={**SCHEDULER, "prediction_type": "v_prediction"})
    assert load_schedule(folder, torch.device("cpu")).objective is Objective.V_PREDICTION


def test_an_objective_that_is_not_supported_is_refused(tmp_path: Path) -> None:
    folder = write_unet(tmp_path, scheduler={**SCHEDULER, "prediction_type": "sample"})
    with pytest.raises(ModelError, match="prediction_type is 'sample', expected epsilon or v_prediction"):
        load_schedule(folder, torch.device("cpu"))


def test_without_a_scheduler_stable_diffusions_is_assumed_and_said(tmp_path: Path) -> None:
    schedule = load_schedule(write_unet(tmp_path, scheduler=None), torch.device("cpu"))
    assert schedule.assumed
    assert schedule.noise.num_timesteps == 1000
