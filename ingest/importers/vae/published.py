"""Constants of published VAEs, from their config.json: for caches whose model is not at hand."""

from __future__ import annotations

from dataclasses import dataclass

_WAN_MEAN: tuple[float, ...] = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508)
_WAN_MEAN += (0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)
_WAN_STD: tuple[float, ...] = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743)
_WAN_STD += (3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The constants of a published VAE."""

    kind: str = "AutoencoderKL"
    channels: int
    scaling: float = 1.0
    shift: float = 0.0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    frames_step: int | None = None  # frames of a video per latent frame, after the first; None: its latents are of images


PUBLISHED = {
    "sd": Published(channels=4, scaling=0.18215),
    "sdxl": Published(channels=4, scaling=0.13025),
    "sd3": Published(channels=16, scaling=1.5305, shift=0.0609),
    "flux": Published(channels=16, scaling=0.3611, shift=0.1159),
    "wan": Published(kind="AutoencoderKLWan", channels=16, mean=_WAN_MEAN, std=_WAN_STD, frames_step=4),
    "qwen-image": Published(kind="AutoencoderKLQwenImage", channels=16, mean=_WAN_MEAN, std=_WAN_STD),
    "hunyuan-video": Published(kind="AutoencoderKLHunyuanVideo", channels=16, scaling=0.476986, frames_step=4),
}
"""VAEs that `--vae` knows. Where their configuration gives a scale, it is 1 over the standard deviation of their latents."""
