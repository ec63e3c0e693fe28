"""The VAE classes that images are encoded with: each as the VAE itself does it, and as its pipeline undoes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bucketline.families.packing import PATCH
from bucketline.families.vaes import PACKED_VAES, vae_decode, vae_encode
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.vae import VaeEncoder
from bucketline.ingest.images.model_sizes import latent_sizes
from bucketline.store.format.columns import LatentKind
from tests.family_models import tiny_dc, tiny_flux2_vae, tiny_qwen21_vae, tiny_qwen_vae, tiny_vae

CPU = torch.device("cpu")
TINY = {
    "AutoencoderKL": tiny_vae,
    "AutoencoderDC": tiny_dc,
    "AutoencoderKLFlux2": tiny_flux2_vae,
    "AutoencoderKLQwenImage": tiny_qwen_vae,
    "AutoencoderKLQwenImage21": tiny_qwen21_vae,
}


def test_every_known_class_is_tried() -> None:
    assert set(TINY) == set(PACKED_VAES)


@pytest.mark.parametrize("kind", list(TINY))
def test_a_vaes_latents_are_its_own_mode_and_come_back(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    vae = TINY[kind]().eval()
    vae.save_pretrained(tmp_path / "vae")
    model = open_model(str(tmp_path))
    encoder = VaeEncoder(model, CPU, "F32")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 64, 3), dtype=np.uint8)
    latents, is_finite = encoder.encode(pixels)
    height, width = 32 // encoder.downscale, 64 // encoder.downscale
    assert latents.shape == (2, encoder.latent_channels, height, width)
    assert latent_sizes(model) == (kind, encoder.downscale, encoder.latent_channels)
    assert bool(is_finite.all())
    with torch.no_grad():
        expected = own_mode(vae, torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1)
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5)
    assert encoder.decode(latents).shape == pixels.shape


def own_mode(vae: Any, images: torch.Tensor) -> torch.Tensor:
    """Return the latents that the VAE itself makes of images, [B, 3, H, W], as its pipelines give them to it."""
    kind = type(vae).__name__
    if kind == "AutoencoderKLQwenImage21":
        images = torch.cat([images, torch.ones(len(images), 1, *images.shape[2:])], dim=1)
    if kind.startswith("AutoencoderKLQwenImage"):
        return vae.encode(images.unsqueeze(2)).latent_dist.mode().squeeze(2)  # type: ignore[no-any-return]
    found = vae.encode(images)
    return found.latent if kind == "AutoencoderDC" else found.latent_dist.mode()  # type: ignore[no-any-return]


def test_moments_of_a_vae_with_frames_are_its_means_and_log_variances(tmp_path: Path) -> None:
    vae = tiny_qwen_vae().eval()
    vae.save_pretrained(tmp_path / "vae")
    encoder = VaeEncoder(open_model(str(tmp_path)), CPU, "F32", latents=LatentKind.MOMENTS)
    pixels = np.full((1, 8, 16, 3), 80, dtype=np.uint8)
    with torch.no_grad():
        own = vae.encode(torch.from_numpy(pixels).permute(0, 3, 1, 2)[:, :, None] / 127.5 - 1).latent_dist
    expected = torch.cat([own.mean, own.logvar], dim=1)[:, :, 0]
    torch.testing.assert_close(encoder.encode(pixels)[0], expected, rtol=0, atol=1e-5)


def test_a_flux2_store_records_the_batch_norm_of_patches(tmp_path: Path) -> None:
    vae = tiny_flux2_vae()
    vae.save_pretrained(tmp_path / "vae")
    found = VaeEncoder(open_model(str(tmp_path)), CPU, "F32").provenance["batch_norm"]
    assert isinstance(found, dict)
    assert found["mean"] == vae.bn.running_mean.tolist()
    assert len(found["std"]) == 4 * PATCH**2  # type: ignore[arg-type]


def test_images_of_a_vae_with_transparency_have_three_channels() -> None:
    vae = tiny_qwen21_vae().eval()
    with torch.no_grad():
        assert vae_decode(vae, vae_encode(vae, torch.zeros(1, 3, 32, 32))[:, :4]).shape == (1, 3, 32, 32)
