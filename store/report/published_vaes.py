"""The constants of published VAEs, as their config.json files have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bucketline.typed_json import Json

_WAN_MEAN: tuple[float, ...] = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508)
_WAN_MEAN += (0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)
_WAN_STD: tuple[float, ...] = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743)
_WAN_STD += (3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVae:
    """A published VAE: its latents are centred by `shift` or `mean`, and scaled by `scaling` or `1 / std`, before training."""

    kind: str = "AutoencoderKL"
    channels: int
    scaling: float = 1.0
    shift: float = 0.0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


PUBLISHED = {
    "sd": PublishedVae(channels=4, scaling=0.18215),
    "sdxl": PublishedVae(channels=4, scaling=0.13025),
    "sd3": PublishedVae(channels=16, scaling=1.5305, shift=0.0609),
    "flux": PublishedVae(channels=16, scaling=0.3611, shift=0.1159),
    "wan": PublishedVae(kind="AutoencoderKLWan", channels=16, mean=_WAN_MEAN, std=_WAN_STD),
    "qwen-image": PublishedVae(kind="AutoencoderKLQwenImage", channels=16, mean=_WAN_MEAN, std=_WAN_STD),
    "hunyuan-video": PublishedVae(kind="AutoencoderKLHunyuanVideo", channels=16, scaling=0.476986),
}
"""By name. Where the configuration gives a scale, it is 1 over the standard deviation of the latents."""

TITLES = {"sd": "Stable Diffusion 1 and 2", "sdxl": "SDXL", "sd3": "Stable Diffusion 3", "flux": "Flux"}


def vae_family_of(vae: Mapping[str, Json]) -> str | None:
    """Return the name of the published VAE whose constants a store records in `encoders.vae`; None if there is none.

    >>> vae_family_of({"latent_channels": 4, "scaling_factor": 0.13025, "shift_factor": 0.0})
    'sdxl'
    """
    for name, published in PUBLISHED.items():
        if published.mean is not None:
            if vae.get("class") == published.kind and vae.get("latent_channels") == published.channels:
                return name
        elif (
            vae.get("latent_channels") == published.channels
            and abs(number(vae, "scaling_factor", 0.0) - published.scaling) < 1e-4
            and abs(number(vae, "shift_factor", 0.0) - published.shift) < 1e-3
            and not vae.get("latents_mean")
        ):
            return name
    return None


def number(vae: Mapping[str, Json], name: str, default: float) -> float:
    """Return a constant of `encoders.vae`, or the default if it records none."""
    value = vae.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default
