"""Show latents without a VAE: a linear map from the channels of a scaled latent to red, green and blue; constants of VAEs.

Letters: C latent channels, h and w the latent's height and width, N samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.pages.page import png

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

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


_SOURCE = "ComfyUI, comfy/latent_formats.py (latent_rgb_factors), as of commit 75399d78"
_MANY = 64  # latents that false colours are made from
_MAX_PIXELS = 1 << 20  # latent positions that a fit or a principal component takes


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRgb:
    """A linear map to RGB: `scaled latent @ factors + bias` is in -1 to 1."""

    name: str
    factors: NDArray[np.float64]  # [C, 3]
    bias: NDArray[np.float64]  # [3]
    source: str  # where the factors are from, for people

    @property
    def channels(self) -> int:
        return len(self.factors)

    def image(self, scaled: NDArray[Any]) -> NDArray[np.uint8]:
        """Return the preview of one scaled latent, `[C, h, w]` of any float, as RGB, `[h, w, 3]`; not finite values are 0."""
        finite = np.nan_to_num(scaled.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
        rgb = np.tensordot(finite, self.factors, axes=(0, 0)) + self.bias
        pixels: NDArray[np.uint8] = np.rint((np.clip(rgb, -1.0, 1.0) + 1.0) * 127.5).astype(np.uint8)
        return pixels


def _published(name: str, factors: str, bias: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> LatentRgb:
    values = np.array(factors.split(), dtype=np.float64).reshape(-1, 3)
    return LatentRgb(name=name, factors=values, bias=np.array(bias), source=_SOURCE)


LATENT_RGB = {
    "sd": _published(
        "sd",
        """ 0.3512  0.2297  0.3227    0.3250  0.4974  0.2350   -0.2829  0.1762  0.2721   -0.2120 -0.2616 -0.7177""",
    ),
    "sdxl": _published(
        "sdxl",
        """ 0.3651  0.4232  0.4341   -0.2533 -0.0042  0.1068    0.1076  0.1111 -0.0362   -0.3165 -0.2492 -0.2188""",
        (0.1084, -0.0175, -0.0011),
    ),
    "sd3": _published(
        "sd3",
        """-0.0922 -0.0175  0.0749    0.0311  0.0633  0.0954    0.1994  0.0927  0.0458    0.0856  0.0339  0.0902
            0.0587  0.0272 -0.0496   -0.0006  0.1104  0.0309    0.0978  0.0306  0.0427   -0.0042  0.1038  0.1358
           -0.0194  0.0020  0.0669   -0.0488  0.0130 -0.0268    0.0922  0.0988  0.0951   -0.0278  0.0524 -0.0542
            0.0332  0.0456  0.0895   -0.0069 -0.0030 -0.0810   -0.0596 -0.0465 -0.0293   -0.1448 -0.1463 -0.1189""",
        (0.2394, 0.2135, 0.1925),
    ),
    "flux": _published(
        "flux",
        """-0.0346  0.0244  0.0681    0.0034  0.0210  0.0687    0.0275 -0.0668 -0.0433   -0.0174  0.0160  0.0617
            0.0859  0.0721  0.0329    0.0004  0.0383  0.0115    0.0405  0.0861  0.0915   -0.0236 -0.0185 -0.0259
           -0.0245  0.0250  0.1180    0.1008  0.0755 -0.0421   -0.0515  0.0201  0.0011    0.0428 -0.0012 -0.0036
            0.0817  0.0765  0.0749   -0.1264 -0.0522 -0.1103   -0.0280 -0.0881 -0.0499   -0.1262 -0.0982 -0.0778""",
        (-0.0329, -0.0718, -0.0851),
    ),
}
"""The published factors, by the names of `PUBLISHED`. Source: `_SOURCE`; the maps to RGB there are of scaled latents."""


def scaled(latents: NDArray[Any], vae: Mapping[str, Json]) -> NDArray[np.float32]:
    """Return stored latents, `[N, C, …]`, as a model is fed: centred and scaled by the constants of `encoders.vae`."""
    each = (1, -1, *(1,) * (latents.ndim - 2))
    mean, std = vae.get("latents_mean"), vae.get("latents_std")
    shift = np.array(mean if isinstance(mean, list) else [number(vae, "shift_factor", 0.0)], dtype=np.float32)
    spread = np.array(std if isinstance(std, list) else [1.0], dtype=np.float32)
    factor = np.float32(number(vae, "scaling_factor", 1.0))
    fed: NDArray[np.float32] = (latents.astype(np.float32) - shift.reshape(each)) * (factor / spread.reshape(each))
    return fed


def still(latent: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a latent as an image, `[C, h, w]`, of a video the frame in the middle; or a sequence as it is, `[C, length]`."""
    while latent.ndim > 3:
        latent = latent[:, latent.shape[1] // 2]
    return latent


def latent_images(
    latents: Sequence[NDArray[np.float32]], vae: Mapping[str, Json], longest: int | None = None
) -> tuple[list[bytes], str]:
    """Return stored latents as PNGs of at most `longest` pixels on their longer side, and in words how they are shown."""
    fed = [scaled(still(latent)[None], vae)[0] for latent in latents]
    images = [latent for latent in fed if latent.ndim == 3]
    rgb, how = published_for(vae), "shown without a VAE"
    if not images:
        how += ": time to the right, channels from the bottom to the top"
    elif rgb is None or any(len(latent) != rgb.channels for latent in images):
        rgb = false_colours(images[:_MANY])
        how += ", in false colours: no RGB factors are published for this VAE"
    else:
        how += f", by the published linear RGB factors of {TITLES[rgb.name]} ({rgb.source})"
    return [png(rgb.image(one) if rgb is not None and one.ndim == 3 else grey_image(one), longest) for one in fed], how


def published_for(vae: Mapping[str, Json]) -> LatentRgb | None:
    return LATENT_RGB.get(vae_family_of(vae) or "")


def false_colours(latents: Sequence[NDArray[Any]]) -> LatentRgb:
    """Return a map that shows the three largest principal components of scaled latents, each `[C, h, w]`: only shapes."""
    pixels = np.concatenate([latent.reshape(len(latent), -1).T for latent in latents]).astype(np.float64)[:_MAX_PIXELS]
    pixels = pixels[np.isfinite(pixels).all(axis=1)]
    channels = len(latents[0])
    if len(pixels) < 2:
        return LatentRgb(name="false colours", factors=np.zeros((channels, 3)), bias=np.zeros(3), source="no finite latent")
    mean = pixels.mean(axis=0)
    values, vectors = np.linalg.eigh(np.cov(pixels.T).reshape(channels, channels))
    order = np.argsort(values)[::-1][:3]
    axes = np.zeros((channels, 3))
    largest = max(float(values[order[0]]), 1e-12)
    # brightness by the first component, two hues by the others; 0.4: two standard deviations fill the range
    mix = np.array([[1.0, 1.0, 1.0], [0.6, 0.0, -0.6], [0.3, -0.6, 0.3]])
    for n, component in enumerate(order):
        axes += np.outer(vectors[:, component], mix[n]) * 0.4 / np.sqrt(largest)
    return LatentRgb(
        name="false colours", factors=axes, bias=-mean @ axes, source="principal components of the store's latents"
    )


def grey_image(latent: NDArray[Any]) -> NDArray[np.uint8]:
    """Return a sequence's latent, `[C, length]`, as a grey image, `[C, length, 3]`: time to the right, channel 0 below."""
    finite = np.nan_to_num(latent.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)[::-1]
    low, high = np.percentile(finite, (1, 99))
    share = np.clip((finite - low) / max(high - low, 1e-12), 0.0, 1.0)
    pixels: NDArray[np.uint8] = np.repeat(np.rint(share * 255.0).astype(np.uint8)[..., None], 3, axis=2)
    return pixels
