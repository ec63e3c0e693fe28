"""Decode some of a source's latents with their VAE, encode the images again, and compare.

A latent of another VAE, or of another scale, does not come back. How well a VAE does at all is measured on the latents that
came back, which are its own.

Letters: B samples, C latent channels, F latent frames of a video, h and w the latent's height and width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bucketline.errors import SourceError
from bucketline.families.vaes import VAES, vae_decode, vae_encode
from bucketline.ingest.encoders.vae import load_vae
from bucketline.ingest.importers.vae.spread import MAX_FACTOR, MAX_FACTOR_OF_ONE, farthest_from_1, numbers, overall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bucketline.ingest.encoders.model_folder import ModelFolder

SAMPLES = 16
MAX_SIDE = 32  # latent px of a sample that are decoded, from its middle: 256 px of most VAEs
# Root mean square of the difference over the spread. A trained VAE's own latents come back with 0.06 to 0.3, even half as wide;
# those of another VAE, or with their channels exchanged, with 1 and more (`test_round_trip.py`, with the demo's VAE).
MAX_ERROR = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """Latents of a source, and what its VAE makes of the images that it decodes them to."""

    samples: int
    mean: list[float]  # [C]
    std: list[float]  # [C]
    returned_mean: list[float]  # [C]
    returned_std: list[float]  # [C]
    factor: float  # spread over the returned one's, root mean square over all channels
    error: float  # root mean square of the difference, over the returned spread; of the median sample
    own_error: float  # the same of the returned latents, which are the VAE's own

    @property
    def is_telling(self) -> bool:
        """True if the VAE's own latents come back, so that others are told by their error."""
        return self.own_error < MAX_ERROR


def refuse_other_vae(latents: Sequence[NDArray[Any]], model: ModelFolder, device: torch.device, source: str) -> RoundTrip:
    """Decode and encode unscaled latents, `[C, h, w]` or `[C, F, h, w]` each, of which a video's first frame is taken.

    Raises:
        SourceError: if their spread is off by a factor of two, or they do not come back from a VAE whose own do.
        ModelError: if the VAE cannot be loaded.
    """
    vae = torch.nn.Module.to(load_vae(model, tuple(VAES)), device=device, dtype=torch.float32).eval()
    given = [_middle(latent) for latent in latents]
    returned = [_again(vae, latent, device) for latent in given]
    own = [_again(vae, latent, device) for latent in returned]
    (mean, std), (returned_mean, returned_std) = _typical(given), _typical(returned)
    factors = std / np.maximum(returned_std, 1e-9)
    found = RoundTrip(
        samples=len(given),
        mean=mean.tolist(),
        std=std.tolist(),
        returned_mean=returned_mean.tolist(),
        returned_std=returned_std.tolist(),
        factor=overall(factors),
        error=_error(given, returned),
        own_error=_error(returned, own),
    )
    worst = farthest_from_1(factors)
    numbers_of = (
        f"per channel mean {numbers(found.mean)} and spread {numbers(found.std)}, after decoding and encoding "
        f"{numbers(found.returned_mean)} and {numbers(found.returned_std)}"
    )
    what = f"{source}: of {found.samples} of its latents, decoded by the VAE of {model.name} and encoded again,"
    hint = "Name the model that made them, or import them as they are by --trust-scale"
    if not 1 / MAX_FACTOR < found.factor < MAX_FACTOR or not 1 / MAX_FACTOR_OF_ONE < worst < MAX_FACTOR_OF_ONE:
        raise SourceError(
            f"{what} the spread is {found.factor:.3g} times that of what comes back, in one channel {worst:.3g} times: "
            f"{numbers_of}. {hint}"
        )
    if found.error > MAX_ERROR and found.is_telling:
        raise SourceError(
            f"{what} the error is {found.error:.3g} of their spread, that of the VAE's own latents {found.own_error:.3g}: "
            f"{numbers_of}. {hint}"
        )
    return found


def _middle(latent: NDArray[Any]) -> NDArray[np.float32]:
    """Return the middle of a latent, of a video that of its first frame, `[C, h, w]`."""
    if latent.ndim == 4:
        latent = latent[:, 0]
    parts = []
    for length in latent.shape[1:]:
        side = min(length, MAX_SIDE)
        parts.append(slice((length - side) // 2, (length - side) // 2 + side))
    return np.ascontiguousarray(latent[:, parts[0], parts[1]], dtype=np.float32)


@torch.inference_mode()
def _again(vae: Any, latent: NDArray[np.float32], device: torch.device) -> NDArray[np.float32]:  # noqa: ANN401
    """Decode a latent, `[C, h, w]`, and return that of the image."""
    given = torch.from_numpy(latent)[None].to(device)
    found = vae_encode(vae, vae_decode(vae, given).clamp(-1.0, 1.0))[:, : len(latent)]  # of a distribution, the means
    returned: NDArray[np.float32] = found.reshape(latent.shape).cpu().numpy()
    return returned


def _typical(latents: Sequence[NDArray[np.float32]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the median of the latents' means and of their spreads, `[C]` each: a few wrong ones are rejected on their own."""
    rows = [latent.reshape(len(latent), -1).astype(np.float64) for latent in latents]
    return np.median([row.mean(axis=1) for row in rows], axis=0), np.median([row.std(axis=1) for row in rows], axis=0)


def _error(given: Sequence[NDArray[Any]], returned: Sequence[NDArray[Any]]) -> float:
    """Return the median of the latents' errors, over the typical spread."""
    errors = [float(np.sqrt(np.mean(np.square(one - other)))) for one, other in zip(given, returned, strict=True)]
    _, std = _typical(returned)
    return float(np.median(errors) / max(float(np.sqrt(np.mean(np.square(std)))), 1e-9))
