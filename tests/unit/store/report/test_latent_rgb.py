"""Previews without a VAE: the published factors, the scaling before them, and false colours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bucketline.store.report.latent_rgb import (
    LATENT_RGB,
    PUBLISHED,
    LatentRgb,
    false_colours,
    published_for,
    scaled,
    vae_family_of,
)


def provenance(name: str) -> dict[str, Any]:
    vae = PUBLISHED[name]
    return {
        "class": vae.kind,
        "latent_channels": vae.channels,
        "scaling_factor": vae.scaling,
        "shift_factor": vae.shift,
        "latents_mean": None if vae.mean is None else list(vae.mean),
        "latents_std": None if vae.std is None else list(vae.std),
    }


def smooth_image(height: int, width: int) -> NDArray[np.uint8]:
    down, across = np.mgrid[0:height, 0:width] / max(height, width)
    waves = [np.sin(5 * down + k * 3 * across + k) for k in range(3)]
    image: NDArray[np.uint8] = (127.5 + 90 * np.stack(waves, axis=-1)).astype(np.uint8)
    return image


def latent_of(rgb: LatentRgb, image: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return a scaled latent whose preview by these factors is the image: the smallest one."""
    values = image.reshape(-1, 3) / 127.5 - 1.0 - rgb.bias
    latent: NDArray[np.float64] = (values @ np.linalg.pinv(rgb.factors)).T.reshape(rgb.channels, *image.shape[:2])
    return latent


@pytest.mark.parametrize("name", sorted(LATENT_RGB))
def test_a_stores_constants_choose_the_factors_and_the_scaling_that_they_are_for(name: str) -> None:
    rgb, vae, image = LATENT_RGB[name], provenance(name), smooth_image(12, 20)
    assert published_for(vae) is rgb
    assert rgb.factors.shape == (PUBLISHED[name].channels, 3)
    as_fed = latent_of(rgb, image)
    stored = as_fed / PUBLISHED[name].scaling + PUBLISHED[name].shift
    shown = rgb.image(scaled(stored[None], vae)[0])
    assert np.abs(shown.astype(int) - image).max() <= 1
    assert "ComfyUI" in rgb.source


@pytest.mark.parametrize("name", sorted(LATENT_RGB))
def test_published_factors_see_colours_apart(name: str) -> None:
    values = np.linalg.svd(LATENT_RGB[name].factors, compute_uv=False)
    assert values[2] > 0.05 * values[0]


def test_a_vae_of_other_constants_has_no_published_factors() -> None:
    assert vae_family_of(provenance("sd") | {"scaling_factor": 0.45108}) is None
    assert published_for(provenance("wan")) is None
    assert published_for({}) is None


def test_values_that_are_not_finite_are_shown_as_none() -> None:
    rgb = LATENT_RGB["sd"]
    broken = np.zeros((4, 3, 3), dtype=np.float32)
    broken[0, 1, 1] = np.nan
    broken[2, 0, 0] = np.inf
    assert (rgb.image(broken) == rgb.image(np.zeros((4, 3, 3)))).all()


def test_false_colours_show_what_differs_most_as_brightness() -> None:
    random = np.random.default_rng(0)
    latent = random.normal(size=(16, 8, 8)) * 0.01 + 3.0
    latent[5, :, 4:] += 1.0
    image = false_colours([latent]).image(latent).astype(int)
    assert abs(int(image[:, 4:].mean()) - int(image[:, :4].mean())) > 80
    assert 100 < image.mean() < 155


def test_false_colours_of_latents_without_a_finite_value_are_grey() -> None:
    latent = np.full((4, 2, 2), np.nan)
    assert (false_colours([latent]).image(latent) == 128).all()
