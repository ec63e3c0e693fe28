"""Weights of runs as folders, as whole pipelines and as single files, as diffusers opens them.

That diffusers draws a run's images by a pipeline is tested for each family in tests/unit/families/test_whole_pipelines.py.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import (
    DDPMScheduler,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UNet2DConditionModel,
)
from safetensors.torch import load_file, save_file

from bucketline.errors import ModelError, UsageError
from bucketline.model_file import converter
from bucketline.train.commands.export_model import ExportModel
from bucketline.train.config import Objective
from bucketline.train.export import export_model, in_original_layout, scheduler_of
from bucketline.train.noise import load_schedule
from bucketline.train.run import train
from tests.conftest import once
from tests.single_files import write_single_file
from tests.unit.train.packed_families import Packed, pack_family
from tests.unit.train.tiny_run import ALONE, SCHEDULER, config

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "diffusion_pytorch_model.safetensors"


def last_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


# ------------------------------------------------------------------ folders


@pytest.mark.parametrize(
    ("changes", "saved", "weights", "dtype"),
    [
        ({"save_every": 3, "keep": 9, "max_steps": 7}, [3, 6, 7], "unet_ema", torch.bfloat16),
        ({"ema": "off", "export_dtype": "fp32", "max_steps": 6}, [6], "unet", torch.float32),
    ],
)
def test_exports_along_a_run_are_its_best_weights_in_the_dtype_and_all_stay(
    folder: Path, changes: dict[str, Any], saved: list[int], weights: str, dtype: torch.dtype
) -> None:
    asked = config(folder, export_every=3, **changes)
    train(asked, ALONE)
    exports = {int(path.name.removeprefix("step-")): path for path in (asked.output_dir / "exports").iterdir()}
    assert sorted(exports) == sorted({3, 6, *saved})
    for step in saved:
        export = exports[step]
        own = load_file(asked.output_dir / "checkpoints" / export.name / weights / WEIGHTS)
        assert_equal(load_file(export / "unet" / WEIGHTS), {name: tensor.to(dtype) for name, tensor in own.items()})
        opened: Any = UNet2DConditionModel
        assert opened.from_pretrained(export, subfolder="unet").config.in_channels == 2
        card = (export / "README.md").read_text(encoding="utf-8")
        kept = "moving average of the weights" if weights.endswith("_ema") else "last weights"
        assert f"{kept}, in {asked.export_dtype}" in card
        assert 'subfolder="unet"' in card


def test_a_checkpoint_is_exported_as_a_folder_later(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (probe := folder / "probe").touch()
    whole = config(folder, max_steps=2, output_dir=folder / "whole", export_every=2)
    adapters = replace(whole, output_dir=folder / "adapters", lora_rank=2)
    for asked, inner in ((whole, "unet"), (adapters, ".")):
        train(asked, ALONE)
        output = folder / f"{asked.output_dir.name} in bf16"
        assert ExportModel(folder=asked.output_dir, output=output, dtype="bf16", json=True).run() == 0
        along = asked.output_dir / "exports" / "step-00000002"
        assert files_of(output) == files_of(along) - {"README.md"}
        for path in (along / inner).glob("*.safetensors"):
            assert_equal(load_file(output / inner / path.name), load_file(path))
        num_bytes = sum((output / name).stat().st_size for name in files_of(output))
        assert json.loads(capsys.readouterr().out) == {"output": str(output), "num_bytes": num_bytes}
        for place in (asked.output_dir, output):  # others may read what the umask lets them read
            assert {(place / name).stat().st_mode for name in files_of(place)} == {probe.stat().st_mode}
    for options in ({"output": folder / "a.safetensors"}, {"output": folder / "a", "pipeline": True}):
        with pytest.raises(UsageError, match=r"lora_ema has only adapters"):
            ExportModel(folder=adapters.output_dir, **options).run()


def test_training_goes_on_from_a_checkpoint_or_an_export_with_the_objective_of_its_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = config(folder, objective=Objective.V_PREDICTION, max_steps=1, export_every=1, ema="off")
    saved = train(asked, ALONE).checkpoint
    export, exported = asked.output_dir / "exports" / saved.name, folder / "exported"
    ExportModel(folder=asked.output_dir, output=exported, last=True).run()
    capsys.readouterr()
    for start in (saved, export, exported):
        scheduler: Any = DDPMScheduler
        assert scheduler.from_pretrained(start, subfolder="scheduler").config.prediction_type == "v_prediction"
        assert load_schedule(start, torch.device("cpu")).objective is Objective.V_PREDICTION
        schedule = json.loads((start / "scheduler" / "scheduler_config.json").read_bytes())
        assert schedule == {**SCHEDULER, "prediction_type": "v_prediction"}
    train(replace(asked, model=saved, objective=None, output_dir=folder / "onward"), ALONE)
    assert "has no scheduler/" not in capsys.readouterr().err
    assert "scheduler/scheduler_config.json" in json.loads((saved / "digests.json").read_bytes())


# ------------------------------------------------------------------ whole pipelines


@pytest.fixture(scope="session")
def sd_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Packed, Path]:
    with once(tmp_path_factory, "sd run") as (root, is_first):
        packed = pack_family(root, "sd") if is_first else Packed(family="sd", model=root / "sd", store=root / "sd.store")
        if is_first:
            train(packed.config(root / "run", learning_rate=1e-2), ALONE)
    return packed, root / "run"


def export(run: Path, output: Path, **options: Any) -> Any:
    export_model(run, output, dtype="fp32", pipeline=True, **options)
    return DiffusionPipeline.from_pretrained(output, local_files_only=True)


def change_index(model: Path, **changes: object) -> None:
    path = model / "model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}), encoding="utf-8")


def test_other_parts_are_files_of_their_own(sd_run: tuple[Packed, Path], tmp_path: Path) -> None:
    """Also those of a model in a hub's cache, whose files are links: a file that is overwritten in place changes no other."""
    packed, run = sd_run
    model, blobs = shutil.copytree(packed.model, tmp_path / "snapshot"), tmp_path / "blobs"
    blobs.mkdir()
    change_index(model, labels={"0": "cat"})
    (model / "LICENSE.md").write_text("as is", encoding="utf-8")
    own = files_of(model)
    for number, path in enumerate([model / name for name in own]):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
    output = tmp_path / "pipeline"
    assert ExportModel(folder=run, output=output, like=model, pipeline=True).run() == 0
    assert files_of(output) == own | {"README.md"}
    assert not [path for path in output.rglob("*") if path.is_symlink()]
    for name in (f"vae/{WEIGHTS}", "text_encoder/model.safetensors"):
        assert (output / name).read_bytes() == (packed.model / name).read_bytes()
    assert json.loads((output / "model_index.json").read_bytes()) == json.loads((model / "model_index.json").read_bytes())
    found = DiffusionPipeline.from_pretrained(output, local_files_only=True)
    assert_equal(found.unet.state_dict(), load_file(last_checkpoint(run) / "unet_ema" / WEIGHTS))
    for name in own:
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
    assert {name for name in files_of(tmp_path / "pipeline") if name.startswith(("vae", "text_encoder"))} == {
        *("vae/config.json", f"vae/{WEIGHTS}", "text_encoder/config.json", "text_encoder/model.safetensors.index.json"),
        *(f"text_encoder/model-0000{n}-of-00002.safetensors" for n in (1, 2)),
    }


def test_a_part_that_the_pipeline_can_do_without_is_left_out_with_a_warning(
    sd_run: tuple[Packed, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packed, run = sd_run
    model = shutil.copytree(packed.model, tmp_path / "model")
    change_index(model, safety_checker=["stable_diffusion", "StableDiffusionSafetyChecker"])
    assert export(run, tmp_path / "pipeline", like=model).safety_checker is None
    assert "has no safety_checker/, which its pipeline can do without" in caplog.text


CLIP = ["transformers", "CLIPTokenizer"]


@pytest.mark.parametrize(
    ("missing", "index", "message"),
    [
        ("tokenizer", {}, r"model lacks tokenizer/, which its model_index\.json names.*--like"),
        ("text_encoder/model.safetensors", {}, r"text_encoder/ has no weights"),
        ("model_index.json", None, r"model is not a whole pipeline: it has no model_index\.json.*--like"),
        # a downloaded model whose index names files elsewhere
        *(("", {name: CLIP}, rf"names a part '{name}'") for name in ("../elsewhere", "vae/../x", "", "va e")),
        ("", {"scheduler": [None, None]}, "names no scheduler"),
        ("unet", {}, "has a FluxTransformer2DModel, expected a UNet2DConditionModel, as the run"),
    ],
)
def test_a_model_that_is_no_whole_pipeline_is_refused_and_nothing_is_written(
    sd_run: tuple[Packed, Path], tmp_path: Path, missing: str, index: dict[str, object] | None, message: str
) -> None:
    packed, run = sd_run
    model = shutil.copytree(packed.model, tmp_path / "model")
    (tmp_path / "elsewhere").mkdir()
    if index is not None:
        change_index(model, **index)
    if missing == "unet":
        (model / "unet").rename(model / "transformer")
        (model / "transformer" / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}', encoding="utf-8")
        (model / "model_index.json").write_text("{}", encoding="utf-8")
    elif missing:
        shutil.rmtree(model / missing) if (model / missing).is_dir() else (model / missing).unlink()
    with pytest.raises(ModelError, match=message):
        export_model(run, tmp_path / "out", like=model, dtype="fp32", pipeline=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "model"]


def test_options_that_do_not_suit_are_refused(sd_run: tuple[Packed, Path], tmp_path: Path) -> None:
    packed, run = sd_run
    (tmp_path / "there").mkdir()
    for output, options, message in (
        ("out", {"like": packed.model}, r"--like is .*, and it is for one \.safetensors file or --pipeline"),
        ("out", {"like": tmp_path / "a.safetensors", "pipeline": True}, r"a\.safetensors is not a folder; name a folder"),
        ("out.safetensors", {"pipeline": True}, r"out\.safetensors: weights are written as one file"),
        ("out.ckpt", {}, r"out\.ckpt: weights are written as one file that ends in \.safetensors"),
        ("out.safetensors", {}, r"sd is not a \.safetensors file; name one of the same architecture with --like"),
        ("there", {}, "exists; name a folder that does not"),
    ):
        with pytest.raises(UsageError, match=message):
            export_model(run, tmp_path / output, dtype="F32", **options)


@pytest.mark.parametrize("objective", ["v_prediction", "flow"])
def test_a_runs_objective_is_in_its_pipelines_scheduler(sd_run: tuple[Packed, Path], tmp_path: Path, objective: str) -> None:
    packed, run = sd_run
    assert export(run, tmp_path / "same").scheduler.config.prediction_type == "epsilon"
    asked = packed.config(tmp_path / objective, objective=Objective(objective), max_steps=1)
    train(asked, ALONE)
    pipeline = export(asked.output_dir, tmp_path / "out")
    assert load_schedule(tmp_path / "out", torch.device("cpu")).objective is asked.objective
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


# ------------------------------------------------------------------ one file


@pytest.fixture(scope="module", params=["sd", pytest.param("sdxl", marks=pytest.mark.slow), "sd3"])
def in_one_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Packed, Path, Path]:
    """A family's store and folder, its weights as one file, and a run that began from that file; each once."""
    root = tmp_path_factory.mktemp("single")
    packed = pack_family(root, request.param)
    file = write_single_file(root / "model.safetensors", packed.model, request.param)
    train(packed.config(root / "run", model=file, model_config=str(packed.model), num_images=1), ALONE)
    return packed, file, root / "run"


@pytest.mark.slow
def test_training_from_one_file_equals_training_from_the_folder(in_one_file: tuple[Packed, Path, Path], tmp_path: Path) -> None:
    packed, _, run = in_one_file
    train(packed.config(tmp_path / "run"), ALONE)
    own, other = (load_file(last_checkpoint(one) / packed.part / WEIGHTS) for one in (run, tmp_path / "run"))
    assert_equal(own, other)
    assert (run / "images.png").exists(), "its VAE is the file's"


@pytest.mark.parametrize("last", [False, True])
def test_an_exported_run_is_read_back_by_diffusers_to_the_same_bits(
    in_one_file: tuple[Packed, Path, Path], tmp_path: Path, *, last: bool
) -> None:
    packed, file, run = in_one_file
    output = tmp_path / "out.safetensors"
    assert ExportModel(folder=run, output=output, last=last).run() == 0
    trained = load_file(last_checkpoint(run) / (packed.part if last else f"{packed.part}_ema") / WEIGHTS)
    before = load_file(file)
    assert not all(torch.equal(tensor, before[name]) for name, tensor in load_file(output).items())
    read: Any = packed.model_class.from_single_file(
        str(output), config=str(packed.model), subfolder=packed.part, local_files_only=True
    )
    assert_equal(read.state_dict(), trained)


def test_an_export_keeps_names_shapes_and_the_other_parts_of_the_file(
    in_one_file: tuple[Packed, Path, Path], tmp_path: Path
) -> None:
    """But an old moving average, which some tools would prefer."""
    _, file, run = in_one_file
    like, before = tmp_path / "like.safetensors", load_file(file) | {"version": torch.tensor(1)}
    save_file({**before, "model_ema.decay": torch.tensor(0.5), "model_ema.diffusion_modeloutbias": torch.zeros(4)}, like)
    export_model(last_checkpoint(run), tmp_path / "out.safetensors", like=like, dtype="F16")
    after = load_file(tmp_path / "out.safetensors")
    assert {name: tensor.shape for name, tensor in before.items()} == {name: tensor.shape for name, tensor in after.items()}
    for name, tensor in after.items():
        if name.startswith("model.diffusion_model."):
            assert tensor.dtype is torch.float16
        else:
            assert torch.equal(tensor, before[name])


def test_an_exported_file_trains_on_the_same_store(in_one_file: tuple[Packed, Path, Path], tmp_path: Path) -> None:
    packed, _, run = in_one_file
    export_model(run, tmp_path / "out.safetensors", dtype="F32")
    asked = packed.config(tmp_path / "run", model=tmp_path / "out.safetensors", model_config=str(packed.model), max_steps=1)
    train(asked, ALONE)
    assert train(replace(asked, max_steps=2, resume=True), ALONE).steps_done == 2


def test_a_model_with_another_vae_in_its_file_is_refused(in_one_file: tuple[Packed, Path, Path], tmp_path: Path) -> None:
    packed, file, _ = in_one_file
    tensors = load_file(file)
    tensors["first_stage_model.encoder.conv_in.bias"] += 1
    save_file(tensors, tmp_path / "other.safetensors")
    asked = packed.config(tmp_path / "run", model=tmp_path / "other.safetensors", model_config=str(packed.model))
    with pytest.raises(ModelError, match=r"is not the VAE that the store was packed with: its weights_hash is"):
        train(asked, ALONE)


def test_a_file_of_another_model_is_not_followed(sd_run: tuple[Packed, Path], tmp_path: Path) -> None:
    packed, run = sd_run
    file = write_single_file(tmp_path / "like.safetensors", packed.model, "sd")
    tensors = load_file(file)
    prefix = "model.diffusion_model."
    deeper = {**tensors, f"{prefix}input_blocks.1.0.more.weight": torch.zeros(2)}
    wider = {**tensors, f"{prefix}out.2.weight": torch.zeros(4, 5, 3, 3)}
    vae = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    for changed, message in (
        (deeper, "only one of the two has down_blocks.0.resnets.0.more"),
        (wider, "out.2.weight"),
        (vae, "only one of the two has"),
    ):
        save_file(changed, file)
        with pytest.raises(ModelError, match=message):
            export_model(run, tmp_path / "out.safetensors", like=file, dtype="F32")
    assert not list(tmp_path.glob("out*"))


def flux_layout() -> dict[str, Tensor]:
    """Return a Flux of one block of each kind in the original layout: all its rows, of one value each.

    diffusers splits a single block's rows at Flux's own width, so that a smaller model cannot be read.
    """
    width = 3072
    rows = {
        **{f"{name}_in.in_layer": width for name in ("time", "vector", "guidance")},
        **{f"{name}_in.out_layer": width for name in ("time", "vector", "guidance")},
        "txt_in": width,
        "img_in": width,
        "final_layer.linear": 64,
        "final_layer.adaLN_modulation.1": 2 * width,
        **{f"double_blocks.0.{side}_mod.lin": 6 * width for side in ("img", "txt")},
        **{f"double_blocks.0.{side}_attn.qkv": 3 * width for side in ("img", "txt")},
        **{f"double_blocks.0.{side}_attn.proj": width for side in ("img", "txt")},
        **{f"double_blocks.0.{side}_mlp.0": 4 * width for side in ("img", "txt")},
        **{f"double_blocks.0.{side}_mlp.2": width for side in ("img", "txt")},
        "single_blocks.0.linear1": 7 * width,
        "single_blocks.0.linear2": width,
        "single_blocks.0.modulation.lin": 3 * width,
    }
    tensors = {f"{name}.weight": torch.randn(count, 1) for name, count in rows.items()}
    tensors |= {f"{name}.bias": torch.randn(count) for name, count in rows.items()}
    norms = ("double_blocks.0.img_attn.norm", "double_blocks.0.txt_attn.norm", "single_blocks.0.norm")
    return {**tensors, **{f"{name}.{kind}_norm.scale": torch.randn(128) for name in norms for kind in ("query", "key")}}


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_fluxs_rows_go_back_to_where_diffusers_takes_them_from(prefix: str) -> None:
    original = {prefix + name: tensor for name, tensor in flux_layout().items()}
    convert = converter("FluxTransformer2DModel")
    trained = convert(original, {})
    blank = {name: torch.zeros_like(tensor) for name, tensor in original.items()}
    found = in_original_layout(trained, blank, lambda given: convert(given, {}), item="flux.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in original.items())
