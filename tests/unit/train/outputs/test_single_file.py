"""A run that begins from one `.safetensors` file in the original layout, and its weights written as such a file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bucketline.errors import ModelError, UsageError
from bucketline.model_file import converter
from bucketline.train.commands.export_model import ExportModel
from bucketline.train.outputs.export import export_model
from bucketline.train.outputs.single_file import in_original_layout
from bucketline.train.run import train
from tests.single_files import write_single_file
from tests.unit.train.packed_families import Packed, pack_family
from tests.unit.train.tiny_run import ALONE

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


@pytest.fixture(scope="module", params=["sd", pytest.param("sdxl", marks=pytest.mark.slow), "sd3"])
def in_one_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Packed, Path, Path]:
    """A family's store and folder, its weights as one file, and a run that began from that file; each once."""
    root = tmp_path_factory.mktemp("single")
    packed = pack_family(root, request.param)
    file = write_single_file(root / "model.safetensors", packed.model, request.param)
    train(packed.config(root / "run", model=file, model_config=str(packed.model), num_images=1), ALONE)
    return packed, file, root / "run"


def last_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


def stored(checkpoint: Path, part: str) -> dict[str, Tensor]:
    return load_file(checkpoint / part / "diffusion_pytorch_model.safetensors")


@pytest.mark.slow
def test_training_from_one_file_equals_training_from_the_folder(in_one_file: tuple[Packed, Path, Path], tmp_path: Path) -> None:
    packed, _, run = in_one_file
    train(packed.config(tmp_path / "run"), ALONE)
    own, other = (stored(last_checkpoint(folder), packed.part) for folder in (run, tmp_path / "run"))
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert (run / "images.png").exists(), "its VAE is the file's"


@pytest.mark.parametrize("last", [False, True])
def test_an_exported_run_is_read_back_by_diffusers_to_the_same_bits(
    in_one_file: tuple[Packed, Path, Path], tmp_path: Path, *, last: bool
) -> None:
    packed, file, run = in_one_file
    export_model(run, tmp_path / "out.safetensors", last=last, dtype="F32")
    trained = stored(last_checkpoint(run), packed.part if last else f"{packed.part}_ema")
    before = load_file(file)
    assert not all(torch.equal(tensor, before[name]) for name, tensor in load_file(tmp_path / "out.safetensors").items())
    read: Any = packed.model_class.from_single_file(
        str(tmp_path / "out.safetensors"), config=str(packed.model), subfolder=packed.part, local_files_only=True
    )
    found = read.state_dict()
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], trained[name]) for name in trained)


def test_an_export_keeps_names_shapes_and_the_other_parts_of_the_file(
    in_one_file: tuple[Packed, Path, Path], tmp_path: Path
) -> None:
    _, file, run = in_one_file
    export_model(last_checkpoint(run), tmp_path / "out.safetensors", dtype="F16")
    before, after = load_file(file), load_file(tmp_path / "out.safetensors")
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
    again = packed.config(asked.output_dir, model=asked.model, model_config=asked.model_config, max_steps=2, resume=True)
    assert train(again, ALONE).steps_done == 2


def test_a_model_with_another_vae_in_its_file_is_refused(in_one_file: tuple[Packed, Path, Path], tmp_path: Path) -> None:
    packed, file, _ = in_one_file
    tensors = load_file(file)
    tensors["first_stage_model.encoder.conv_in.bias"] += 1
    save_file(tensors, tmp_path / "other.safetensors")
    asked = packed.config(tmp_path / "run", model=tmp_path / "other.safetensors", model_config=str(packed.model))
    with pytest.raises(ModelError, match=r"is not the VAE that the store was packed with: its weights_hash is"):
        train(asked, ALONE)


@pytest.fixture(scope="module")
def sd_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Packed, Path]:
    """A run of a Stable Diffusion that began from a folder."""
    root = tmp_path_factory.mktemp("folder")
    packed = pack_family(root, "sd")
    train(packed.config(root / "run", max_steps=1), ALONE)
    return packed, root / "run"


def test_a_run_that_began_from_a_folder_needs_a_file_to_follow(
    sd_run: tuple[Packed, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed, run = sd_run
    with pytest.raises(UsageError, match=r"is not a \.safetensors file; name one of the same architecture with --like"):
        export_model(run, tmp_path / "out.safetensors", dtype="F32")
    file = write_single_file(tmp_path / "like.safetensors", packed.model, "sd")
    output = tmp_path / "out.safetensors"
    assert ExportModel(folder=run, output=output, like=file, json=True).run() == 0
    assert json.loads(capsys.readouterr().out) == {"output": str(output), "num_bytes": output.stat().st_size}
    with pytest.raises(UsageError, match="exists; name a file that does not"):
        ExportModel(folder=run, output=output, like=file).run()
    with pytest.raises(UsageError, match=r"name a file that ends in \.safetensors"):
        ExportModel(folder=run, output=tmp_path / "out.ckpt").run()


def test_an_old_moving_average_in_the_file_is_left_out(sd_run: tuple[Packed, Path], tmp_path: Path) -> None:
    packed, run = sd_run
    file = write_single_file(tmp_path / "like.safetensors", packed.model, "sd")
    scalar = {
        "model_ema.decay": torch.tensor(0.5),
        "model_ema.diffusion_modeloutbias": torch.zeros(4),
        "version": torch.tensor(1),
    }
    save_file({**load_file(file), **scalar}, file)
    export_model(run, tmp_path / "out.safetensors", like=file, dtype="F32")
    found = load_file(tmp_path / "out.safetensors")
    assert "version" in found
    assert not [name for name in found if name.startswith("model_ema.")]


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


@pytest.mark.slow
def test_adapters_are_one_file_already(sd_run: tuple[Packed, Path], tmp_path: Path) -> None:
    packed, _ = sd_run
    train(packed.config(tmp_path / "run", max_steps=1, lora_rank=2), ALONE)
    with pytest.raises(UsageError, match="has only adapters, which are one file already, in lora_ema/"):
        export_model(tmp_path / "run", tmp_path / "out.safetensors", dtype="F32")


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
