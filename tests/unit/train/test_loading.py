"""The inputs of each family, and what it refuses with the field named."""

from __future__ import annotations

import json
import logging
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from safetensors.torch import save_file

from bucketline.errors import ModelError, UsageError
from bucketline.families.family import StoreFacts
from bucketline.families.packing import image_ids, pack, unpack
from bucketline.model_file import INDEX
from bucketline.train.config import Objective
from bucketline.train.noise import FlowSchedule, load_schedule
from bucketline.typed_json import Json
from tests.family_models import tiny_model
from tests.unit.train.tiny_run import SCHEDULER, facts, load, make_batch, write_unet

CPU = torch.device("cpu")
FLOW: dict[str, Json] = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
WIDE = ("train/16x24", 8, 12)


def write_model(folder: Path, family: str, **changes: Any) -> Path:
    part = "unet" if family in ("sd", "sdxl") else "transformer"
    tiny_model(family).save_config(folder / part)
    path = folder / part / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")
    return folder


def offered(family: str) -> StoreFacts:
    text = {
        "sdxl": {"tokens": 20, "pooled": 12},
        "dit": {"class_labels": 1},
        "sd3": {"tokens": 24, "pooled": 20},
        "flux": {"tokens": 24, "pooled": 8},
    }
    is_dit = family == "dit"
    return StoreFacts(
        latent_channels=4,
        text=text.get(family, {"tokens": 24}),
        num_classes=3 if is_dit else None,
        shows_padding=not family.startswith("pixart"),
        latent_sizes=(("train/16x16", 8, 8),) if is_dit else (WIDE,),
    )


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
    first, again, other = (load(folder, facts(), seed=seed)[1] for seed in (1, 1, 2))
    weights = [model.get_parameter("conv_in.weight") for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_weights_are_read_where_there_are_some_and_never_replaced_by_random_ones(
    tmp_path: Path, ending: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """And diffusers says nothing of its own."""
    _, made = load(write_unet(tmp_path), facts(), seed=3)
    path, tensors = tmp_path / "unet" / f"diffusion_pytorch_model.{ending}", made.state_dict()

    def write() -> None:
        save_file(tensors, path, metadata={"format": "pt"}) if ending == "safetensors" else torch.save(tensors, path)

    write()
    _, loaded = load(tmp_path, facts(), seed=0)
    assert torch.equal(loaded.get_parameter("conv_in.weight"), made.get_parameter("conv_in.weight"))
    del tensors["conv_in.weight"]
    write()
    with pytest.raises(ModelError, match=r"missing_keys .*conv_in\.weight"):
        load(tmp_path, facts(), seed=0)
    caplog.clear()
    path.write_bytes(b"\x10" * 100)
    advice = "expected safetensors .*: download the model again" + ("" if ending == "safetensors" else ", or convert it")
    with pytest.raises(ModelError, match=rf"model\.{ending}\) cannot be loaded: .*{advice}"):
        load(tmp_path, facts(), seed=0)
    assert (caplog.text, capfd.readouterr().err) == ("", "")


@pytest.mark.parametrize("shown", [False, True])
def test_padding_tokens_reach_the_model_only_where_its_pipeline_shows_them(tmp_path: Path, *, shown: bool) -> None:
    family, model = load(write_unet(tmp_path), facts(shows_padding=shown), seed=0)
    batch = make_batch()
    batch.token_mask[:, 2:] = False
    noisy, timesteps = torch.ones(3, 2, 8, 8), torch.tensor([1, 2, 3])
    with torch.no_grad():
        before = family.predict(model, noisy, timesteps, batch)
        batch.tokens[:, 2:] += 1.0
        after = family.predict(model, noisy, timesteps, batch)
    assert torch.equal(before, after) is not shown


def test_the_objective_is_the_schedulers_if_it_is_supported(tmp_path: Path) -> None:
    folder = write_unet(tmp_path, scheduler={**SCHEDULER, "prediction_type": "v_prediction"})
    assert load_schedule(folder, CPU).objective is Objective.V_PREDICTION
    write_unet(tmp_path, scheduler={**SCHEDULER, "prediction_type": "sample"})
    with pytest.raises(ModelError, match="prediction_type is 'sample', expected epsilon or v_prediction"):
        load_schedule(folder, CPU)


def test_a_flows_scheduler_makes_a_flow_with_its_shift(tmp_path: Path) -> None:
    folder = write_unet(tmp_path, scheduler=FLOW)
    schedule = load_schedule(folder, CPU)
    assert schedule.objective is Objective.FLOW
    assert schedule == FlowSchedule(num_timesteps=1000, shift=3.0, patch_size=1)
    write_unet(tmp_path, scheduler={**FLOW, "use_dynamic_shifting": True, "max_shift": 1.2})
    by_size = load_schedule(folder, CPU, patch_size=2)
    assert isinstance(by_size, FlowSchedule)
    assert by_size.factor(32, 32) == pytest.approx(math.exp(0.5))
    assert by_size.factor(128, 128) == pytest.approx(math.exp(1.2))


def test_what_the_run_asks_for_goes_before_what_the_scheduler_says(tmp_path: Path) -> None:
    folder = write_unet(tmp_path)
    asked = load_schedule(folder, CPU, objective=Objective.V_PREDICTION)
    assert (asked.objective, asked.config["prediction_type"]) == (Objective.V_PREDICTION, "v_prediction")
    asked = load_schedule(folder, CPU, objective=Objective.FLOW, shift=2.0)
    assert asked == FlowSchedule(num_timesteps=1000, shift=2.0, patch_size=1)
    write_unet(tmp_path, scheduler={**FLOW, "use_dynamic_shifting": True})
    assert load_schedule(folder, CPU, shift=2.0) == asked
    with pytest.raises(UsageError, match=r"--objective is epsilon, and .* is a FlowMatchEulerDiscreteScheduler"):
        load_schedule(folder, CPU, objective=Objective.EPSILON)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("sdxl", {}, None),
        ("sdxl", {"projection_class_embeddings_input_dim": 32}, "projection_class_embeddings_input_dim is 32, expected 36"),
        ("dit", {"num_embeds_ada_norm": 10}, "num_embeds_ada_norm is 10, expected 3"),
        ("dit", {"out_channels": 12}, "out_channels is 12, expected none or 4 or 8"),
        ("dit", {"dropout": 0.1}, "dropout is 0.1, expected 0"),
        ("pixart_alpha", {"caption_channels": 4096}, "caption_channels is 4096, expected 24"),
        ("pixart_sigma", {"patch_size": 3}, "patch_size is 3, expected a divisor of 8 and 12"),
        ("sd3", {"joint_attention_dim": 4096}, "joint_attention_dim is 4096, expected 24"),
        ("sd3", {"pooled_projection_dim": 2048}, "pooled_projection_dim is 2048, expected 20"),
        ("sd3", {"pos_embed_max_size": 4}, "pos_embed_max_size is 4, expected 6 or more, since train/16x24"),
        ("auraflow", {"pos_embed_max_size": 25}, "pos_embed_max_size is 25, expected 36 or more, since train/16x24"),
        ("anima", {"max_size": (4, 8, 8)}, "max_size is 4, expected 6 or more, since train/16x24"),
        ("flux", {"in_channels": 64}, "in_channels is 64, expected 16"),
        ("flux", {"_class_name": "SanaTransformer2DModel"}, "_class_name is 'SanaTransformer2DModel', expected one of"),
    ],
)
def test_a_model_of_any_family_is_held_against_the_store(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str | None
) -> None:
    folder = write_model(tmp_path, family, **changes)
    if message is None:
        found, _ = load(folder, offered(family), seed=0)
        assert found.patch_size >= 1
        return
    with pytest.raises(ModelError, match=re.escape(message)):
        load(folder, offered(family), seed=0)


def test_a_class_of_several_models_is_trained_only_as_that_of_the_family(tmp_path: Path) -> None:
    """Anima's transformer is that of Cosmos, which predicts something else; without an index it is taken for Anima's."""
    folder = write_model(tmp_path, "anima")
    load(folder, offered("anima"), seed=0)
    (folder / INDEX).write_text('{"_class_name": "Cosmos2TextToImagePipeline"}', encoding="ascii")
    found = "names the pipeline Cosmos2TextToImagePipeline, and a CosmosTransformer3DModel can be trained as that of Anima"
    with pytest.raises(ModelError, match=found):
        load(folder, offered("anima"), seed=0)


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_a_model_without_a_mask_is_refused_on_captions_without_their_padding(tmp_path: Path, family: str) -> None:
    with pytest.raises(ModelError, match=r"encoders\.text_encoder\.padding is valid, expected max_length"):
        load(write_model(tmp_path, family), replace(offered(family), shows_padding=False), seed=0)


@pytest.mark.parametrize(("family", "column"), [("sdxl", "pooled"), ("dit", "class_labels"), ("flux", "pooled")])
def test_a_store_without_a_column_that_the_model_needs_is_refused_by_it(tmp_path: Path, family: str, column: str) -> None:
    store = replace(offered(family), text={"tokens": 24})
    with pytest.raises(ModelError, match=f"needs the text column {column}, and the store has tokens"):
        load(write_model(tmp_path, family), store, seed=0)


def test_labels_are_dropped_by_the_loader_alone(tmp_path: Path) -> None:
    """A DiT in training draws from torch's generator which labels to drop; were it so, two ranks would not equal one."""
    _, model = load(write_model(tmp_path, "dit"), offered("dit"), seed=0)
    assert model.training
    noisy, timesteps, labels = torch.randn(64, 4, 8, 8), torch.arange(64), torch.arange(64) % 4
    with torch.no_grad():
        first, second = (model(noisy, timestep=timesteps, class_labels=labels)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["DiTTransformer2DModel", "Transformer2DModel"])
def test_a_dit_takes_only_square_buckets(tmp_path: Path, name: str) -> None:
    """The control: diffusers' turns what is not square into a square, without a word; were it fixed, the refusal could go."""
    with torch.no_grad():
        labels = torch.zeros(1).long()
        out = tiny_model("dit", patch_size=1)(torch.zeros(1, 4, 4, 16), timestep=labels, class_labels=labels).sample
    assert out.shape[-2:] == (8, 8)
    folder, store = write_model(tmp_path, "dit", _class_name=name), offered("dit")
    assert load(folder, store, seed=0)[0].model_class == "DiTTransformer2DModel"
    with pytest.raises(UsageError, match="the store has the size train/16x24, and the model is a DiTTransformer2DModel"):
        load(folder, replace(store, latent_sizes=(*store.latent_sizes, WIDE)), seed=0)


def test_latents_are_packed_as_fluxs_pipeline_packs_them() -> None:
    pipeline: Any = FluxPipeline
    latents = torch.randn(2, 4, 6, 10)
    packed = pack(latents)
    assert torch.equal(packed, pipeline._pack_latents(latents, 2, 4, 6, 10))
    assert torch.equal(unpack(packed, 6, 10), latents)
    assert torch.equal(image_ids(latents), pipeline._prepare_latent_image_ids(2, 3, 5, "cpu", torch.float32))


def test_without_a_scheduler_stable_diffusions_is_assumed_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        schedule = load_schedule(write_unet(tmp_path, scheduler=None), CPU)
    assert "has no scheduler/: using the schedule published with the model's kind" in caplog.text
    assert schedule.num_timesteps == 1000
