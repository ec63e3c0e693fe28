"""The columns that the trainer takes from a store, and those that it refuses because it would ignore them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bucketline.errors import ModelError
from bucketline.families.family import Family
from bucketline.loader.latent_scale import LatentScale
from bucketline.store import Store
from bucketline.store.format.manifest import read_manifest
from bucketline.train import model
from bucketline.train.config import Compile, Objective, Precision
from bucketline.train.load import load
from bucketline.train.run import start_processes, train
from tests.kit import rewrite_manifest
from tests.unit.train.tiny_run import ALONE, TEXT_ENCODER, VAE, built, config, make_training_store

if TYPE_CHECKING:
    from pathlib import Path


CPU = torch.device("cpu")


def rewritten(path: Path, **changes: Any) -> Store:
    rewrite_manifest(path, **changes)
    return Store(path, read_manifest(path))


def with_vae(path: Path, **fields: Any) -> Store:
    make_training_store(path)
    return rewritten(path, encoders={"vae": {**VAE, **fields}, "text_encoder": dict(TEXT_ENCODER)})


def latent_scale(store: Store) -> LatentScale:
    vae: Any = store.manifest.encoders["vae"]
    return LatentScale.of(Family.scaling(vae), CPU)


def test_latents_are_scaled_by_what_the_store_says_of_its_vae(tmp_path: Path) -> None:
    store = with_vae(tmp_path / "s")
    latents = torch.randn(3, 2, 4, 4)
    torch.testing.assert_close(latent_scale(store).apply(latents), (latents - 0.25) * 0.5)


def test_channels_with_a_mean_and_spread_of_their_own_are_scaled_as_sdxls_pipeline_undoes_it(tmp_path: Path) -> None:
    mean, std = [0.5, -1.0], [2.0, 4.0]
    store = with_vae(tmp_path / "s", shift_factor=None, latents_mean=mean, latents_std=std)
    scale, latents = latent_scale(store), torch.randn(3, 2, 4, 4)
    seen = scale.apply(latents)
    means, stds = (torch.tensor(values).view(1, 2, 1, 1) for values in (mean, std))
    torch.testing.assert_close(seen * stds / 0.5 + means, latents)  # Source: StableDiffusionXLPipeline.__call__
    torch.testing.assert_close(scale.invert(seen), latents)


def test_latents_in_patches_are_scaled_as_flux_2s_pipeline_undoes_it(tmp_path: Path) -> None:
    from diffusers import Flux2Pipeline

    mean, std = torch.randn(8), torch.rand(8) + 0.5
    statistics: Any = {"mean": mean.tolist(), "std": std.tolist()}
    store = with_vae(tmp_path / "s", scaling_factor=1.0, shift_factor=0.0, batch_norm=statistics)
    scale, latents = latent_scale(store), torch.randn(3, 2, 4, 6)
    packed: Any = Flux2Pipeline._patchify_latents(scale.apply(latents))
    undone = Flux2Pipeline._unpatchify_latents(packed * std.view(1, -1, 1, 1) + mean.view(1, -1, 1, 1))
    torch.testing.assert_close(undone, latents)
    torch.testing.assert_close(scale.invert(scale.apply(latents)), latents)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"precision": Precision.BF16, "lora_rank": 2}, torch.bfloat16),
        ({"precision": Precision.BF16}, torch.float32),
        ({"precision": Precision.FP32, "lora_rank": 2}, torch.float32),
    ],
)
def test_only_the_frozen_base_of_adapters_is_read_in_16_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], wanted: torch.dtype
) -> None:
    """No rank holds a base in 32 bits, not even for a moment."""
    asked: list[object] = []

    def noting(*given: Any, **named: Any) -> Any:
        asked.append(named["dtype"])
        return load(*given, **named)

    monkeypatch.setattr(model, "load", noting)
    run = built(config(folder, **changes))
    assert asked == [wanted]
    assert {parameter.dtype for parameter in run.training.model.parameters() if parameter.requires_grad} == {torch.float32}


def test_another_vae_than_the_stores_is_refused_before_training(folder: Path) -> None:
    encoders = {"vae": {**VAE, "weights_hash": "0" * 32}, "text_encoder": dict(TEXT_ENCODER)}
    rewrite_manifest(folder / "tiny.store", encoders=encoders)
    with pytest.raises(ModelError, match=r"model/vae is not the VAE .*: its weights_hash is \w{32}, the store has 0{32}; "):
        built(config(folder))


def test_a_run_computes_no_attention_by_cudnn(tmp_path: Path) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    start_processes(config(tmp_path))
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]


def test_a_run_tells_once_what_it_derives_with_the_reason(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = config(folder, max_steps=1, lora_rank=2, learning_rate=None)
    train(asked, ALONE)
    said = " ".join(capsys.readouterr().err.split())
    derived = "--objective epsilon (the model's scheduler), --precision fp32 (a CPU), --compile off (a CPU)"
    assert f"left open: {derived}, --learning-rate 0.0001 (adamw's), --lora-alpha 2 (the rank)" in said
    train(replace(asked, max_steps=2, resume=True), ALONE)
    assert "left open" not in capsys.readouterr().err
    given: dict[str, Any] = {
        "objective": Objective.EPSILON,
        "precision": Precision.FP32,
        "compile": Compile.OFF,
        "learning_rate": 1e-4,
    }
    train(replace(asked, output_dir=folder / "given", lora_alpha=2.0, **given), ALONE)
    assert "left open" not in capsys.readouterr().err
