"""docs/diffusers-scripts.md: each setting that gives theirs, against their formulas written out."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SanaPipeline, SD3Transformer2DModel

from bucketline.coming_from import answer
from bucketline.families.flux import Flux
from bucketline.families.flux2 import Flux2
from bucketline.families.krea2 import Krea2
from bucketline.families.lumina2 import Lumina2
from bucketline.families.qwenimage import QwenImage
from bucketline.families.registry import family_of_pipeline
from bucketline.families.sana import Sana
from bucketline.loader.batch import LatentScale
from bucketline.loader.plan.order import Purpose, normal
from bucketline.options import options_of
from bucketline.train.config import LossWeight, ObjectiveOptions, Timesteps, TrainConfig
from bucketline.train.lora import adapted_layers
from bucketline.train.noise import FlowSchedule, Prep, draw_timesteps, load_schedule, squared_error
from bucketline.train.step import loss_of
from tests.commands import ROOT
from tests.family_models import FORMS, tiny_model
from tests.unit.train.tiny_run import config, facts, make_batch, make_training

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
KEYS = torch.arange(4000) * 7919 + 1
ALIKE = {"--learning-rate", "--noise-offset", "--lora-alpha", "--lora-dropout"}  # called the same


def rows() -> list[list[str]]:
    text = (ROOT / "docs" / "diffusers-scripts.md").read_text(encoding="utf-8")
    table = text[text.index("| theirs | ours |") :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table]


@pytest.mark.parametrize("cells", rows(), ids=lambda cells: cells[0])
def test_a_command_line_with_their_option_is_answered_with_the_one_in_the_table(cells: list[str]) -> None:
    known = {word for one in options_of(TrainConfig) for word in one.names}
    theirs, ours = (re.findall(r"--[a-z0-9_-]+", cell) for cell in cells[:2])
    in_file = re.findall(r"`([a-z_]+)` \(run file\)", cells[1])
    assert {*in_file} <= {*TrainConfig.__dataclass_fields__}
    assert ours or in_file
    assert {*ours, *re.findall(r"--[a-z0-9-]+(?= )", cells[-1].partition(" for ")[0])} <= known
    for option in (one.replace("_", "-") for one in theirs):
        if option in known:
            assert option in ALIKE, "the table says which of ours it is"
            assert option in ours
        else:
            answered = answer("train", option, known)
            assert answered
            assert any(one in answered for one in (*ours, *in_file)), answered


@pytest.mark.parametrize("given", re.findall(r"`((?:--[a-z-]+ [^`\s]+ ?)+)`", " ".join(cells[-1] for cells in rows())))
def test_the_settings_of_the_table_are_options(given: str, tmp_path: Path) -> None:
    words = given.split()
    pairs = [(name[2:].replace("-", "_"), value) for name, value in zip(words[::2], words[1::2], strict=True)]
    if any("_" in word for word in words):
        return  # theirs
    asked: dict[str, Any] = {}
    for name, value in pairs:
        kind = TrainConfig.__dataclass_fields__[name].type
        number = float(value) if "float" in str(kind) else int(value) if "int" in str(kind) else value
        asked[name] = (*asked.get(name, ()), number) if "tuple" in str(kind) else number
    config(tmp_path, **asked)


@pytest.mark.parametrize(("scheme", "setting"), [("logit_normal", "sigma-squared"), ("sigma_sqrt", "none")])
def test_sd3s_loss_is_theirs_of_preconditioned_outputs(scheme: str, setting: str) -> None:
    schedule = FlowSchedule(num_timesteps=1000, shift=3.0, patch_size=2)
    options = ObjectiveOptions(loss_weight=LossWeight.parse(setting, "--loss-weight"))
    batch = make_batch(8)
    scale = LatentScale(scale=1.0, shift=0.0)
    noised = Prep(scale=scale, schedule=schedule, options=options).for_training(batch)
    prediction = torch.randn(noised.noisy.shape, generator=torch.Generator().manual_seed(0))
    errors = squared_error(prediction, noised.target)
    ours = errors if noised.weight is None else errors * noised.weight
    model_input, noisy_model_input = batch.latents.float(), noised.noisy
    sigmas = (noised.timesteps / 1000).view(-1, 1, 1, 1)
    model_pred = prediction * (-sigmas) + noisy_model_input
    weighting = sigmas**-2.0 if scheme == "sigma_sqrt" else torch.ones_like(sigmas)
    theirs = (weighting * (model_pred - model_input) ** 2).reshape(len(ours), -1).mean(1)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def scripts_sigmas(u: torch.Tensor, shift: float) -> torch.Tensor:
    """Return the noise at the timesteps that the scripts take for draws in [0, 1)."""
    kind: Any = FlowMatchEulerDiscreteScheduler
    scheduler = kind(shift=shift)  # whose timesteps fall
    found: torch.Tensor = scheduler.sigmas[(u * 1000).long()]
    return found


def test_a_logit_mean_has_the_other_sign() -> None:
    """Theirs draws an index into timesteps that fall: u near 1 has little noise."""
    z = normal(KEYS, Purpose.TIMESTEP, (1,)).squeeze(1).double()
    theirs = scripts_sigmas(torch.sigmoid(0.5 + 1.0 * -z), shift=3.0)  # -z is as likely as z
    drawn = draw_timesteps(ObjectiveOptions(timesteps=Timesteps.parse("logit-normal:-0.5,1", "--timesteps")), KEYS, 1000)
    ours = FlowSchedule(num_timesteps=1000, shift=3.0, patch_size=2).at(drawn, 8, 8).noise.flatten()
    torch.testing.assert_close(ours, theirs)
    assert float(theirs.mean()) < float(scripts_sigmas(torch.sigmoid(-0.5 + z), shift=3.0).mean())


@pytest.mark.parametrize("prior", [1.0, 0.5])
def test_a_priors_gradients_are_theirs_by_a_factor_and_clipped_where_theirs_are(prior: float, tmp_path: Path) -> None:
    training = make_training(tmp_path, accumulation=1)
    weighing = dataclasses.replace(training, mean_weight=(1 + prior) / 2)
    batch = dataclasses.replace(make_batch(4), weight=torch.tensor([1.0, 1.0, prior, prior]))
    noised = training.prep.for_training(batch)
    errors = squared_error(training.predict(training.model, noised.noisy, noised.timesteps, batch), noised.target)
    theirs = torch.autograd.grad(errors[:2].mean() + prior * errors[2:].mean(), training.trained)
    ours = torch.autograd.grad(loss_of(weighing, batch), training.trained)
    limit = float(torch.nn.utils.get_total_norm(theirs)) / 2
    for gradients, norm in ((theirs, limit), (ours, limit * round(1 / (1 + prior), 3))):  # as the table has the setting
        for parameter, gradient in zip(training.trained, gradients, strict=True):
            parameter.grad = gradient
        assert torch.nn.utils.clip_grad_norm_(training.trained, norm) > norm
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one * (1 + prior), other, rtol=1e-3, atol=1e-6)


FLUX_SCRIPT = (
    *("attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0", "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj"),
    *("attn.to_add_out", "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
)
SD3_SCRIPT = (
    *("attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out", "attn.to_k", "attn.to_out.0", "attn.to_q"),
    "attn.to_v",
)


MIDDLE = torch.tensor([499])


def euler(config: Any, **more: Any) -> Any:
    kind: Any = FlowMatchEulerDiscreteScheduler
    return kind.from_config(dict(config), **more)


def noise_here(tmp_path: Path, family: Any, config: Any) -> float:
    """Return the noise of the middle timestep of a square of 1024 px, in training."""
    path = tmp_path / "scheduler" / "scheduler_config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(config), encoding="utf-8")
    made = family({}, facts())
    schedule = load_schedule(tmp_path, CPU, patch_size=2, published=family.scheduler, levels=made.noise_levels({}))
    assert isinstance(schedule, FlowSchedule)
    return float(schedule.at(MIDDLE, 128, 128).noise)


@pytest.mark.parametrize(("family", "drawn"), [(Flux, 0.76), (Flux2, 0.88), (QwenImage, 0.67), (Krea2, 0.71)])
def test_the_scripts_do_not_shift_what_is_shifted_by_size(family: Any, drawn: float, tmp_path: Path) -> None:
    for more in ({}, {"shift": 3.0}):
        assert float(euler(family.scheduler, **more).sigmas[500]) == pytest.approx(0.5)
    assert noise_here(tmp_path, family, family.scheduler) == pytest.approx(drawn, abs=0.005)


def test_sanas_script_reads_no_shift_and_encodes_without_the_instruction(tmp_path: Path) -> None:
    published = {"_class_name": "DPMSolverMultistepScheduler", "use_flow_sigmas": True, "flow_shift": 3.0}
    assert float(euler(published).sigmas[500]) == pytest.approx(0.5)
    assert noise_here(tmp_path, Sana, published) == pytest.approx(0.75)
    of_call, of_captions = (
        inspect.signature(method).parameters["complex_human_instruction"].default
        for method in (SanaPipeline.__call__, SanaPipeline.encode_prompt)
    )
    assert of_call
    assert of_captions is None


def test_lumina_2s_script_turns_the_shift_to_images(tmp_path: Path) -> None:
    sigma = float(euler(Lumina2.scheduler).sigmas[500])
    assert 1 - sigma == pytest.approx(0.14, abs=0.005)  # its noise: `(1 - sigmas) * noise + sigmas * model_input`
    assert noise_here(tmp_path, Lumina2, Lumina2.scheduler) == pytest.approx(sigma)


@pytest.mark.parametrize("inference", [True, False])
def test_hidreams_experts_learn_nothing_in_a_model_for_inference(*, inference: bool) -> None:
    model = tiny_model("hidream_image", force_inference_output=inference).train()
    layer = next(one for one in model.modules() if hasattr(one, "moe_infer"))
    layer(torch.randn(2, 8, layer.gate.weight.shape[1])).sum().backward()
    gradients = [one.grad for expert in layer.experts for one in expert.parameters()]
    assert all(one is None for one in gradients) is inference


ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")
IN_SINGLE_BLOCKS = ("to_qkv_mlp_proj", *(f"single_transformer_blocks.{n}.attn.to_out" for n in range(48)))
SCRIPTS_LAYERS = {  # ends of names in examples/dreambooth/train_dreambooth_lora_*.py at 58eb52c0
    "flux": FLUX_SCRIPT,
    "sd3": SD3_SCRIPT,
    "flux2": (*ATTENTION, *IN_SINGLE_BLOCKS),
    "flux2 klein": (*ATTENTION, *IN_SINGLE_BLOCKS),
    "hidream_image": ("to_k", "to_q", "to_v", "to_out"),
    "ideogram4": (*ATTENTION, "w1", "w2", "w3"),
    "krea2": (
        *(
            *ATTENTION,
            "img_in",
            "final_layer.linear",
            "to_gate",
            "ff.up",
            "ff.down",
            "text_fusion.projector",
            "txt_in.linear_1",
        ),
        *("txt_in.linear_2", "time_embed.linear_1", "time_embed.linear_2", "time_mod_proj"),
    ),
    "lumina2": ATTENTION,
    "qwenimage": ATTENTION,
    "sana": ("to_k", "to_q", "to_v"),
    "z_image": ATTENTION,
}


@pytest.mark.parametrize("form", [*SCRIPTS_LAYERS, "sd3.5"])
def test_the_layers_that_get_an_adapter_are_the_scripts(form: str) -> None:
    model: Any = tiny_model(form.removesuffix(".5"))
    if form == "sd3.5":
        model = SD3Transformer2DModel.from_config({**model.config, "dual_attention_layers": (0,), "_use_default_values": []})
        assert any(".attn2." in name for name, _ in model.named_modules())
    kind = family_of_pipeline(FORMS[form.removesuffix(".5")].pipeline)
    assert kind is not None
    script = SCRIPTS_LAYERS[form.removesuffix(".5")]
    found, wanted = (
        {name for name, _ in model.named_modules() if any(name == end or name.endswith(f".{end}") for end in ends)}
        for ends in (adapted_layers(model, kind(dict(model.config), facts()), None), script)
    )
    assert found
    assert found == wanted
