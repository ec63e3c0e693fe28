"""Each family, from what `ingest` packed for it to what diffusers loads."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from bucketline.model_file import LORA_FILE
from bucketline.train.checkpoint import KOHYA_FILE, Start
from bucketline.train.config import Precision, WeightDtype
from bucketline.train.log import read_metrics
from bucketline.train.run import Run, train
from bucketline.train.step import train_step
from tests.family_models import PIPELINES, tiny_dc
from tests.unit.train.packed_families import FAMILIES, pack_family
from tests.unit.train.tiny_run import ALONE, built

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.train.packed_families import Packed


# of a whole run, one of each kind is quick: of noise with text, of noise with classes, of flow; all have their step compared
A_FEW = [pytest.param(family, marks=() if family in ("sd", "dit", "flux") else pytest.mark.slow) for family in FAMILIES]
START = Start(checkpoint=None, state=None)


def assembled(packed: Packed, output: Path, **changes: Any) -> Run:
    asked = packed.config(output, **changes)
    return built(asked)


@pytest.mark.parametrize("packed", A_FEW, indirect=True)
def test_a_family_learns_and_its_weights_open_in_diffusers(packed: Packed, tmp_path: Path) -> None:
    asked = packed.config(tmp_path, max_steps=25, learning_rate=1e-2, num_images=1, caption_dropout=0.2)
    summary = train(asked, ALONE)
    validated = [line["val_loss"] for line in read_metrics(tmp_path) if "val_loss" in line]
    first, last = validated[0], validated[-1]
    assert isinstance(first, float)
    assert isinstance(last, float)
    assert last < 0.9 * first
    assert len(summary.images) == 2
    folders = (summary.checkpoint / packed.part, summary.checkpoint / f"{packed.part}_ema", packed.model / packed.part)
    names = [set(packed.model_class.from_pretrained(folder).state_dict()) for folder in folders]
    assert names[0] == names[1] == names[2]


@pytest.mark.slow
def test_weights_of_bf16_learn_and_open_as_such(packed: Packed, tmp_path: Path) -> None:
    bf16: dict[str, Any] = {"weights": WeightDtype.BF16, "precision": Precision.BF16, "optimizer": "adamw-8bit"}
    asked = packed.config(tmp_path, max_steps=4, learning_rate=1e-2, num_images=1, **bf16)
    summary = train(asked, ALONE)
    for folder in (packed.part, f"{packed.part}_ema"):
        (file,) = (summary.checkpoint / folder).glob("*.safetensors")
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}
        packed.model_class.from_pretrained(summary.checkpoint / folder)
    losses = [float(str(line["loss"])) for line in read_metrics(asked.output_dir) if "loss" in line]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("packed", A_FEW, indirect=True)
def test_adapters_alone_are_trained_and_open_where_the_familys_adapters_do(packed: Packed, tmp_path: Path) -> None:
    asked = packed.config(
        tmp_path, max_steps=3, learning_rate=1e-2, lora_rank=2, lora_alpha=4.0, lora_targets="all", precision=Precision.BF16
    )
    summary = train(asked, ALONE)
    parts = assembled(packed, tmp_path)
    with parts.loader as loader:
        batch = next(loader.forever())
    plain, noised = (
        packed.model_class.from_pretrained(packed.model / packed.part).eval(),
        parts.training.prep.for_training(batch),
    )
    for folder in ("lora", "lora_ema"):
        adapted = with_adapters(packed, summary.checkpoint / folder)
        with torch.no_grad():
            before, after = (
                parts.training.family.predict(model, noised.noisy, noised.timesteps, batch) for model in (plain, adapted)
            )
        assert not torch.allclose(before, after)
        scalings = {module.scaling["default_0" if packed.pipeline else "default"] for module in loras(adapted)}
        assert scalings == {2.0}  # alpha ÷ rank
        if packed.pipeline:
            stored, renamed = (load_file(summary.checkpoint / folder / name) for name in (LORA_FILE, KOHYA_FILE))
            assert {tensor.item() for name, tensor in renamed.items() if name.endswith(".alpha")} == {4.0}
            for name, tensor in stored.items():
                layer, _, end = name.rpartition(".lora_")
                key = f"lora_{layer.replace('.', '_')}" if packed.part == "unet" else layer
                assert torch.equal(renamed[f"{key}.lora_{'down' if end[0] == 'A' else 'up'}.weight"], tensor)
        if packed.family == "sd":  # diffusers reads kohya's names as well, and the alpha
            kohya = with_adapters(packed, summary.checkpoint / folder, weight_name=KOHYA_FILE)
            with torch.no_grad():
                again = parts.training.family.predict(kohya, noised.noisy, noised.timesteps, batch)
            assert torch.allclose(again, after, atol=1e-5)


def loras(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def with_adapters(packed: Packed, folder: Path, **options: Any) -> Any:
    """Open adapters as their users do: by the pipeline, and by peft for the families whose pipelines take none."""
    import diffusers
    from peft import PeftModel

    if packed.pipeline:
        pipeline = getattr(diffusers, PIPELINES[packed.family]).from_pretrained(packed.model, local_files_only=True)
        pipeline.load_lora_weights(str(folder), **options)
        return getattr(pipeline, packed.part).eval()
    model = packed.model_class.from_pretrained(packed.model / packed.part)
    return PeftModel.from_pretrained(model, str(folder)).eval()


def test_the_models_own_weights_stand_still_beside_adapters(packed: Packed, tmp_path: Path) -> None:
    parts = assembled(packed, tmp_path, lora_rank=2, learning_rate=1e-2)
    model = parts.training.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with parts.loader as loader:
        batches = loader.forever()
        for step in range(2):
            train_step(parts.training, batches, step)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(".lora_" in name for name in changed)
    with parts.training.averaged() as average:
        followed = {name for name, tensor in average.state_dict().items() if not torch.equal(tensor, before[name])}
    assert followed == changed


@pytest.mark.parametrize(
    ("family", "choice"),
    [
        pytest.param("sd3", {}, marks=pytest.mark.slow),
        ("dit", {"recompute": 1.0}),
    ],
)
def test_a_run_of_adapters_resumes_to_the_last_bit(family: str, choice: dict[str, Any], tmp_path: Path) -> None:
    """One family of each form that adapters are written in."""
    packed = pack_family(tmp_path, family)
    more = {"lora_rank": 2, "learning_rate": 1e-2, "max_steps": 4, **choice}
    whole = train(packed.config(tmp_path / "whole", **more), ALONE).checkpoint
    train(packed.config(tmp_path / "parts", **{**more, "max_steps": 2}), ALONE)
    parts = train(packed.config(tmp_path / "parts", **more, resume=True), ALONE).checkpoint
    for folder in ("lora", "lora_ema"):
        for path in (whole / folder).glob("*.safetensors"):
            first, second = (load_file(one / folder / path.name) for one in (whole, parts))
            assert all(torch.equal(first[name], second[name]) for name in first)


def test_recomputing_changes_no_step(packed: Packed, tmp_path: Path) -> None:
    plain, saving = (assembled(packed, tmp_path, recompute=share) for share in (0.0, 1.0))
    assert saving.training.model.is_gradient_checkpointing
    with plain.loader as loader:
        batch = next(loader.forever())
    first, second = (train_step(parts.training, iter([batch]), 0) for parts in (plain, saving))
    torch.testing.assert_close(first.loss, second.loss)
    torch.testing.assert_close(first.grad_norm, second.grad_norm)


def test_moments_and_mirror_images_and_channels_of_their_own_scale_train(tmp_path: Path) -> None:
    def change(model: Path) -> None:
        path = model / "vae" / "config.json"
        own = {"latents_mean": [0.1, 0.2, 0.3, 0.4], "latents_std": [1.0, 2.0, 3.0, 4.0]}
        path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **own}), encoding="utf-8")

    made = pack_family(tmp_path, "pixart_sigma", "--latents", "moments", "--flip", change=change)
    parts = assembled(made, tmp_path / "unused", flip=0.5)
    with parts.loader as loader:
        batches = [next(batch) for batch in [loader.forever()] for _ in range(4)]
    assert {batch.latents.shape[1] for batch in batches} == {8}
    assert len({bool(row) for batch in batches for row in batch.flipped}) == 2
    noised = parts.training.prep.for_training(batches[0])
    assert noised.target.shape[1] == 4
    summary = train(made.config(tmp_path / "run", flip=0.5, num_images=1), ALONE)
    assert len(summary.images) == 2


def test_latents_of_a_dc_autoencoder_train_and_are_drawn(tmp_path: Path) -> None:
    def change(model: Path) -> None:
        shutil.rmtree(model / "vae")
        tiny_dc().save_pretrained(model / "vae")
        index = model / "model_index.json"
        index.write_text(index.read_text(encoding="utf-8").replace("AutoencoderKL", "AutoencoderDC"), encoding="utf-8")

    made = pack_family(tmp_path, "pixart_sigma", change=change)
    assert len(train(made.config(tmp_path / "run", num_images=1), ALONE).images) == 2
