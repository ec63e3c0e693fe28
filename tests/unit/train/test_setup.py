"""The columns that the trainer takes from a store, and those that it refuses because it would ignore them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bucketline.families.family import Family
from bucketline.loader.latent_scale import LatentScale
from bucketline.store import Store
from bucketline.store.format.manifest import read_manifest
from bucketline.train import model
from bucketline.train.compile import recomputed, share_cores_of_compiler
from bucketline.train.config import Precision
from bucketline.train.models.load import load
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


def test_blocks_are_recomputed_without_saving_generators(folder: Path) -> None:
    run = built(config(folder, recompute=1.0))
    functions = [getattr(module, "_gradient_checkpointing_func", None) for module in run.training.model.modules()]
    assert {function for function in functions if function} == {recomputed}


def test_ranks_of_a_machine_share_the_cores_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as inductor

    for threads, ranks, each in ((16, 8, 2), (4, 8, 1)):
        monkeypatch.setattr(inductor, "compile_threads", threads)
        share_cores_of_compiler(ranks)
        assert inductor.compile_threads == each


def test_a_run_computes_no_attention_by_cudnn(tmp_path: Path) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    start_processes(config(tmp_path))
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]


def test_a_run_tells_once_what_it_chooses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = config(folder, max_steps=1, lora_rank=2, learning_rate=None)
    train(asked, ALONE)
    said = " ".join(capsys.readouterr().err.split())
    assert "left open: --precision fp32, --optimizer adamw, --learning-rate 0.0001" in said
    train(replace(asked, max_steps=2, resume=True), ALONE)
    assert "left open" not in capsys.readouterr().err
