"""Latents are decoded by the named VAE and encoded again: another VAE and another scale are noticed, with both numbers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.commands import ROOT
from tests.family_models import tiny_vae
from tests.photographs import crop_of
from tests.unit.ingest.importers.known import run_import

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.commands import Ran
    from tests.unit.ingest.importers.known import Known

SIDE = 96  # px


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the demo's VAE, which was trained on photographs."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "vae").symlink_to(ROOT / "demo" / "vae")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}), encoding="utf-8")
    return folder


def encoded(vae: Any, images: torch.Tensor) -> NDArray[np.float32]:
    with torch.no_grad():
        latents: NDArray[np.float32] = vae.encode(images).latent_dist.mode().numpy()
    return latents


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    found = [np.array(crop_of(n, 3 * SIDE, 3 * SIDE).resize((SIDE, SIDE)), dtype="f4") / 127.5 - 1 for n in range(12)]
    return torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2).contiguous()


@pytest.fixture(scope="module")
def latents(model: Path, images: torch.Tensor) -> NDArray[np.float32]:
    from diffusers import AutoencoderKL

    return encoded(AutoencoderKL.from_pretrained(model / "vae", torch_dtype=torch.float32), images)


def imported(model: Path, latents: NDArray[np.float32], folder: Path, *options: str) -> Ran:
    """Import latents as kohya's trainer caches them."""
    folder.mkdir()
    for n, latent in enumerate(latents):
        np.savez(folder / f"{n}_{SIDE:04d}x{SIDE:04d}_sd.npz", latents=latent, original_size=np.array([SIDE, SIDE]))
    named = ("--model", str(model), "--json", "--text", "none", *options)
    return run_import("kohya", folder, folder.parent / f"{folder.name}.store", None, *named)


def test_latents_of_the_named_vae_come_back(model: Path, latents: NDArray[np.float32], tmp_path: Path) -> None:
    ran = imported(model, latents, tmp_path / "right").done()
    trip = ran.json["round_trip"]
    assert trip["samples"] == min(16, len(latents))
    assert 0.9 < trip["factor"] < 1.1
    assert trip["error"] < 0.2
    assert trip["own_error"] < 0.2


@pytest.mark.slow
def test_latents_of_another_vae_with_the_same_spread_are_refused(
    model: Path, images: torch.Tensor, latents: NDArray[np.float32], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    others = encoded(tiny_vae(block_out_channels=(4,) * 4, **blocks).eval(), images)
    like_ours = others / others.std() * latents.std()
    for name, wrong in (("other", like_ours), ("exchanged", latents[:, [1, 0, 3, 2]])):
        imported(model, np.ascontiguousarray(wrong), tmp_path / name).fails("decoded by the VAE of", "per channel mean")
        assert not (tmp_path / f"{name}.store").exists()
        assert imported(model, wrong, tmp_path / f"{name} trusted", "--trust-scale").code == 0


@pytest.mark.slow
def test_a_vae_whose_configuration_hides_a_factor_of_two_is_refused_by_its_weights(
    known: Callable[[str], Known], tmp_path: Path
) -> None:
    """The spread that is published and the cache's agree, and the weights disagree with both."""
    import shutil

    own = known("sd")
    shutil.copytree(own.model, tmp_path / "model")
    path = tmp_path / "model" / "vae" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "scaling_factor": config["scaling_factor"] / 3}), encoding="utf-8")
    for sample in own.samples:
        (tmp_path / "cache" / sample.stem).parent.mkdir(parents=True, exist_ok=True)
        np.savez(tmp_path / "cache" / f"{sample.stem}_0064x0064_sd.npz", latents=3 * sample.latent, original_size=[64, 64])
    options = ("--model", tmp_path / "model", "--text", "none")
    run_import("kohya", tmp_path / "cache", tmp_path / "s.store", None, *options).fails("times that of what comes back")
    assert not (tmp_path / "s.store").exists()
