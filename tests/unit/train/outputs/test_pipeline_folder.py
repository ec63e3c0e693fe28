"""Whole pipelines of runs: which files they have and where from, adapters in their weights, their card, and refusals.

That diffusers draws a run's images by them is tested for each family in tests/unit/families/test_whole_pipelines.py.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import DiffusionPipeline, DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from bucketline.errors import ModelError, UsageError
from bucketline.train.commands.export_model import ExportModel
from bucketline.train.config import Objective
from bucketline.train.noise import load_schedule
from bucketline.train.outputs.export import export_model
from bucketline.train.outputs.pipeline_folder import scheduler_of
from bucketline.train.run import train
from tests.conftest import once
from tests.single_files import write_single_file
from tests.unit.train.packed_families import CLASSES, Packed, pack_family
from tests.unit.train.tiny_run import ALONE

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="session")
def sd_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Packed, Path]:
    """A run of all weights of a Stable Diffusion."""
    with once(tmp_path_factory, "sd run") as (root, is_first):
        packed = pack_family(root, "sd") if is_first else Packed(family="sd", model=root / "sd", store=root / "sd.store")
        if is_first:
            train(packed.config(root / "run", learning_rate=1e-2), ALONE)
    return packed, root / "run"


def export(run: Path, output: Path, **options: Any) -> Any:
    """Export a pipeline and open it."""
    export_model(run, output, **{"dtype": "fp32", "pipeline": True, **options})
    return DiffusionPipeline.from_pretrained(output, local_files_only=True)


def last_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


def test_other_parts_are_files_of_their_own(
    sd_run: tuple[Packed, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those of a model in a hub's cache, whose files are links: a file that is overwritten in place changes no other."""
    packed, run = sd_run
    model, blobs = shutil.copytree(packed.model, tmp_path / "snapshot"), tmp_path / "blobs"
    blobs.mkdir()
    for number, path in enumerate([path for path in model.rglob("*") if path.is_file()]):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
    output = tmp_path / "pipeline"
    assert ExportModel(folder=run, output=output, like=model, pipeline=True, json=True).run() == 0
    files = {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}
    own = {path.relative_to(packed.model).as_posix() for path in packed.model.rglob("*") if path.is_file()}
    assert files == own | {"README.md"}
    assert not [path for path in output.rglob("*") if path.is_symlink()]
    num_bytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    assert json.loads(capsys.readouterr().out) == {"output": str(output), "num_bytes": num_bytes}
    for name in (f"vae/{WEIGHTS}", "text_encoder/model.safetensors"):
        assert (output / name).read_bytes() == (packed.model / name).read_bytes()
    averaged = load_file(last_checkpoint(run) / "unet_ema" / WEIGHTS)
    found = DiffusionPipeline.from_pretrained(output, local_files_only=True).unet.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in averaged.items())
    for name in files:
        (output / name).write_bytes(b"overwritten")
    assert b"overwritten" not in [path.read_bytes() for path in blobs.iterdir()]


def test_of_several_sets_of_weights_the_one_that_is_read_gets_plain_names(sd_run: tuple[Packed, Path], tmp_path: Path) -> None:
    """As hubs publish them: halves under a variant's name, in parts with an index, next to pickles and other frameworks'."""
    packed, run = sd_run
    model = shutil.copytree(packed.model, tmp_path / "model")
    (model / "vae" / WEIGHTS).rename(model / "vae" / "diffusion_pytorch_model.fp16.safetensors")
    (model / "vae" / "diffusion_pytorch_model.fp16.bin").write_bytes(b"a pickle")
    (model / "text_encoder" / "pytorch_model.fp16.bin").write_bytes(b"a pickle")
    (model / "text_encoder" / "model.onnx").write_bytes(b"for another library")
    whole = load_file(model / "text_encoder" / "model.safetensors")
    (model / "text_encoder" / "model.safetensors").unlink()
    parts = {f"model.fp16-0000{n}-of-00002.safetensors": sorted(whole)[n - 1 :: 2] for n in (1, 2)}
    for name, tensors in parts.items():
        save_file({one: whole[one] for one in tensors}, model / "text_encoder" / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {one: name for name, tensors in parts.items() for one in tensors}}
    (model / "text_encoder" / "model.safetensors.index.fp16.json").write_text(json.dumps(index), encoding="utf-8")
    pipeline = export(run, tmp_path / "pipeline", like=model)
    found = pipeline.text_encoder.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    files = {path.relative_to(tmp_path / "pipeline").as_posix() for path in (tmp_path / "pipeline").rglob("*.*")}
    assert {name for name in files if name.startswith(("vae", "text_encoder"))} == {
        *("vae/config.json", f"vae/{WEIGHTS}", "text_encoder/config.json", "text_encoder/model.safetensors.index.json"),
        *(f"text_encoder/model-0000{n}-of-00002.safetensors" for n in (1, 2)),
    }


def test_what_a_model_lacks_is_named_and_nothing_is_written(sd_run: tuple[Packed, Path], tmp_path: Path) -> None:
    packed, run = sd_run
    model = shutil.copytree(packed.model, tmp_path / "model")
    shutil.rmtree(model / "tokenizer")
    (model / "text_encoder" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks text_encoder/, tokenizer/, which its model_index\.json names.*--like"):
        export_model(run, tmp_path / "out", like=model, dtype="F32", pipeline=True)
    (model / "model_index.json").unlink()
    with pytest.raises(ModelError, match=r"model is not a whole pipeline, since its model_index\.json cannot be read.*--like"):
        export_model(run, tmp_path / "out", like=model, dtype="F32", pipeline=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("name", ["../elsewhere", "{outside}", "vae/../../elsewhere", "..", ".", "", "va e"])
def test_parts_are_folders_of_the_model_only(sd_run: tuple[Packed, Path], tmp_path: Path, name: str) -> None:
    """A downloaded model whose index names files elsewhere copies none of them, and writes none elsewhere."""
    packed, run = sd_run
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (outside / "token").write_text("secret", encoding="utf-8")
    model = shutil.copytree(packed.model, tmp_path / "model")
    index = json.loads((model / "model_index.json").read_text(encoding="utf-8"))
    index[name.format(outside=outside)] = ["transformers", "CLIPTokenizer"]
    (model / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelError, match=r"model_index\.json names a part '.*', expected the name of a folder next to it"):
        export_model(run, tmp_path / "out", like=model, dtype="fp32", pipeline=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "model"]
    (model / "model_index.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelError, match=r"since its model_index\.json cannot be read \(it is a JSON list, expected an object"):
        export_model(run, tmp_path / "out", like=model, dtype="fp32", pipeline=True)


def test_a_part_that_the_pipeline_can_do_without_is_left_out_with_a_warning(
    sd_run: tuple[Packed, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packed, run = sd_run
    model = shutil.copytree(packed.model, tmp_path / "model")
    index = json.loads((model / "model_index.json").read_text(encoding="utf-8"))
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (model / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    assert export(run, tmp_path / "pipeline", like=model).safety_checker is None
    assert "has no safety_checker/, which its pipeline can do without" in caplog.text


def test_classes_of_a_dit_are_in_its_pipeline(tmp_path: Path) -> None:
    packed = pack_family(tmp_path, "dit")
    train(packed.config(tmp_path / "run"), ALONE)
    pipeline = export(tmp_path / "run", tmp_path / "pipeline")  # whose guidance takes ImageNet's class for none
    assert pipeline.labels == {name: number for number, name in CLASSES.items()}
    assert pipeline([1], guidance_scale=1.0, num_inference_steps=2, output_type="np").images.shape == (1, 16, 16, 3)


@pytest.mark.parametrize(("family", "dora"), [("sd", False), ("sd", True), ("dit", False)])
def test_adapters_are_added_to_the_weights_when_told_so(family: str, tmp_path: Path, *, dora: bool) -> None:
    """One family of each form that adapters are written in, and DoRA, which scales the weights as well."""
    from peft import PeftModel

    packed = pack_family(tmp_path, family)
    run, output = tmp_path / "run", tmp_path / "pipeline"
    train(packed.config(run, lora_rank=2, lora_alpha=6.0, lora_targets="all", dora=dora, learning_rate=1e-2), ALONE)
    with pytest.raises(UsageError, match=r"lora_ema has only adapters, which load_lora_weights adds .*--fuse"):
        export_model(run, output, dtype="F32", pipeline=True)
    found = getattr(export(run, output, fuse=True), packed.part).state_dict()
    plain = DiffusionPipeline.from_pretrained(packed.model, local_files_only=True)
    before = {name: tensor.clone() for name, tensor in getattr(plain, packed.part).state_dict().items()}
    adapters = last_checkpoint(run) / "lora_ema"
    if packed.pipeline:
        plain.load_lora_weights(str(adapters))
        plain.fuse_lora()
        plain.unload_lora_weights()
        wanted = getattr(plain, packed.part).state_dict()
    else:
        wanted = PeftModel.from_pretrained(getattr(plain, packed.part), str(adapters)).merge_and_unload().state_dict()
    assert found.keys() == before.keys() == wanted.keys()
    assert any(not torch.equal(found[name], before[name]) for name in found)
    assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in found)
    card = ModelCard.load(output / "README.md")
    assert "lora" not in (card.data.tags or ())
    assert "moving average of the weights, with the trained adapters added" in card.text


def test_options_that_do_not_suit_are_refused(sd_run: tuple[Packed, Path], tmp_path: Path) -> None:
    packed, run = sd_run
    for options, message in (
        ({"pipeline": True, "fuse": True}, r"--fuse is for adapters, and .*unet_ema has all weights of the model"),
        ({"fuse": True}, r"--fuse adds adapters to the weights of a whole pipeline; use it with --pipeline"),
        ({"like": packed.model}, r"--like is .*, and it is for one file or a whole pipeline"),
    ):
        with pytest.raises(UsageError, match=message):
            export_model(run, tmp_path / "out", dtype="F32", **options)
    with pytest.raises(UsageError, match=r"--pipeline writes a folder, and .*out\.safetensors ends in"):
        export_model(run, tmp_path / "out.safetensors", dtype="F32", pipeline=True)
    other = shutil.copytree(packed.model, tmp_path / "other")
    (other / "unet").rename(other / "transformer")
    (other / "transformer" / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}', encoding="utf-8")
    (other / "model_index.json").unlink()
    with pytest.raises(ModelError, match=r"other is not a whole pipeline"):
        export_model(run, tmp_path / "out", dtype="F32", pipeline=True, like=other)
    (other / "model_index.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match=r"has a FluxTransformer2DModel, expected a UNet2DConditionModel, as the run"):
        export_model(run, tmp_path / "out", dtype="F32", pipeline=True, like=other)


def test_a_run_from_one_file_needs_a_folder_with_the_other_parts(sd_run: tuple[Packed, Path], tmp_path: Path) -> None:
    packed, _ = sd_run
    file = write_single_file(tmp_path / "model.safetensors", packed.model, "sd")
    train(packed.config(tmp_path / "run", model=file, model_config=str(packed.model)), ALONE)
    with pytest.raises(UsageError, match=r"model\.safetensors, one file; name a folder .* by --like"):
        export_model(tmp_path / "run", tmp_path / "out", dtype="F32", pipeline=True)
    assert export(tmp_path / "run", tmp_path / "out", like=packed.model).text_encoder is not None


def test_a_runs_objective_is_in_its_pipelines_scheduler(sd_run: tuple[Packed, Path], tmp_path: Path) -> None:
    packed, run = sd_run
    assert export(run, tmp_path / "same").scheduler.config.prediction_type == "epsilon"
    for lora, objective in ((None, "v_prediction"), (2, "v_prediction"), (None, "flow")):
        name = f"{objective} {lora}"
        asked = packed.config(tmp_path / name, objective=Objective(objective), lora_rank=lora, max_steps=1)
        train(asked, ALONE)
        pipeline = export(asked.output_dir, tmp_path / f"{name} out", fuse=lora is not None)
        assert load_schedule(tmp_path / f"{name} out", torch.device("cpu")).objective is asked.objective
        if objective == "flow":  # by a solver that the pipeline of a diffusion model can call
            assert isinstance(pipeline.scheduler, DPMSolverMultistepScheduler)
        assert pipeline("a red cat", height=16, width=16, num_inference_steps=2, output_type="np").images.std() > 0


def test_a_flow_by_a_solver_of_diffusion_pipelines_has_the_flows_own_noise_levels() -> None:
    trained = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0, "use_dynamic_shifting": False}
    made = scheduler_of({"_class_name": "PNDMScheduler", "beta_start": 0.1}, trained)
    solver = DPMSolverMultistepScheduler.from_config(made, solver_order=1)
    flow = FlowMatchEulerDiscreteScheduler.from_config(trained)
    generator = torch.Generator().manual_seed(0)
    noise, clean = torch.randn(2, 1, 4, 8, 8, generator=generator)
    ended = []
    for scheduler in (solver, flow):
        scheduler.set_timesteps(8)
        latents = noise
        for timestep in scheduler.timesteps:
            latents = scheduler.step(noise - clean, timestep, latents).prev_sample
        ended.append(latents)
    assert torch.allclose(ended[0], clean, atol=5e-3)  # its first noise level is 0.9997
    assert torch.allclose(ended[1], clean, atol=1e-4)
    own = {"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True, "flow_shift": 1.0}
    assert scheduler_of(own, trained) == {**own, "flow_shift": 3.0}
    own = {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "shift": 1.0,
        "use_dynamic_shifting": True,
        "use_beta_sigmas": True,
    }
    assert scheduler_of(own, trained) == {**own, "shift": 3.0, "use_dynamic_shifting": False}
