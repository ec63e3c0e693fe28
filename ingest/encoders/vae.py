"""Pictures to latents and back, by diffusers' `AutoencoderKL` or `AutoencoderDC`. They are unscaled; scaling is the trainer's.

Letters: B pictures, H and W their height and width in px, C latent channels, h and w the latent's height and width.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from bucketline.errors import ModelError, UsageError
from bucketline.ingest.encoders.arrays import DTYPES
from bucketline.ingest.encoders.hub import one_line
from bucketline.ingest.encoders.loaded import hash_of_weights, refuse_incomplete
from bucketline.store.provenance import config_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.store.typed_json import Json

WITH_POSTERIOR = "AutoencoderKL"
WITHOUT_POSTERIOR = "AutoencoderDC"


class Latents(StrEnum):
    """What of a picture's latent distribution is stored."""

    MODE = "mode"  # its mode; of a VAE that gives no distribution, its latent
    SAMPLE = "sample"  # one sample, drawn once
    MOMENTS = "moments"  # mean and log-variance, to be sampled at each step


def refuse_latents(kind: str, latents: Latents) -> None:
    """Refuse what a VAE of this class cannot give.

    Raises:
        UsageError: where a sample or moments are asked for of one that has no distribution.
    """
    if kind == WITHOUT_POSTERIOR and latents is not Latents.MODE:
        raise UsageError(f"--latents {latents.value}: {kind} gives one latent and no distribution; expected --latents mode")


class VaeEncoder:
    """A loaded VAE."""

    def __init__(
        self,
        model: ModelFolder,
        device: torch.device,
        stored_dtype: str,
        *,
        latents: Latents = Latents.MODE,
        encode_dtype: str = "F32",
    ) -> None:
        """Load `vae/`, to compute in `encode_dtype`, but in F32 where the VAE says that it must (`force_upcast`).

        Raises:
            ModelError: where it is missing, is not whole or is of another class.
            UsageError: where a sample or moments are asked for of a VAE that has no distribution.
        """
        self._vae = vae = _load(model)
        config = vae.config
        kind = type(vae).__name__
        self._has_posterior = kind == WITH_POSTERIOR
        refuse_latents(kind, latents)
        self._latents = latents
        blocks = config.block_out_channels if self._has_posterior else config.encoder_block_out_channels
        self.stored_dtype = stored_dtype
        self.downscale = 2 ** (len(blocks) - 1)  # px per latent pixel, each way
        self.latent_channels = int(config.latent_channels)
        self.stored_channels = self.latent_channels * (2 if latents is Latents.MOMENTS else 1)
        dtype = encode_dtype
        if getattr(config, "force_upcast", False):
            dtype = "F32"
        self.provenance: dict[str, Json] = {
            "class": kind,
            "config_hash": config_hash(model.config("vae") or {}),
            "weights_hash": hash_of_weights(vae),
            "dtype": dtype,
            "latents": latents.value,
            "stored_dtype": stored_dtype,
            "latent_channels": self.latent_channels,
            "downscale": self.downscale,
            "scaling_factor": float(config.scaling_factor),
            "shift_factor": float(getattr(config, "shift_factor", None) or 0.0),
            "latents_mean": _numbers(getattr(config, "latents_mean", None)),
            "latents_std": _numbers(getattr(config, "latents_std", None)),
        }
        self._device = device
        self._dtype, self._compute_dtype = DTYPES[stored_dtype], DTYPES[dtype]
        # torch's own `to`: diffusers' warns of modules to be kept in F32, and names none, at any cast
        moved: Any = torch.nn.Module.to(vae, device=device, dtype=self._compute_dtype)
        self._vae = moved.eval().requires_grad_(requires_grad=False)

    @torch.inference_mode()
    def encode(self, pixels: NDArray[np.uint8], seeds: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode pictures `[B, H, W, 3]`, sRGB; `seeds` has one number a picture where a sample is drawn.

        Gives latents `[B, C, h, w]` in the stored dtype on the CPU (of moments `[B, 2C, h, w]`, the means first), and which
        of them are finite in that dtype, `[B]` bool.
        """
        images = torch.from_numpy(pixels).to(self._device).permute(0, 3, 1, 2).contiguous()  # as the pipelines lay them out
        encoded = self._vae.encode((images.to(torch.float32) / 127.5 - 1.0).to(self._compute_dtype))
        latents = self._of_posterior(encoded.latent_dist.parameters, seeds) if self._has_posterior else encoded.latent
        stored = latents.to(self._dtype).cpu().contiguous()
        return stored, torch.isfinite(stored).flatten(1).all(dim=1)

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor) -> NDArray[np.uint8]:
        """Decode latents, or the means of moments, `[B, C, h, w]` as they are stored, to pictures `[B, H, W, 3]`, sRGB."""
        images = self._vae.decode(latents.to(self._device, self._compute_dtype), return_dict=False)[0].float()
        pixels = ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        pictures: NDArray[np.uint8] = pixels.permute(0, 2, 3, 1).cpu().numpy()
        return pictures

    def _of_posterior(self, parameters: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        posterior = DiagonalGaussianDistribution(parameters.float())
        if self._latents is Latents.MOMENTS:
            return torch.cat([posterior.mean, posterior.logvar], dim=1)
        if self._latents is Latents.SAMPLE:
            # drawn on the CPU, each picture by its own seed: the same on any device and in any batch
            generators = [torch.Generator().manual_seed(seed) for seed in seeds]
            sampled: torch.Tensor = posterior.sample(generators)
            return sampled
        mode: torch.Tensor = posterior.mode()
        return mode


def seed_of(sample_id: str, column: str) -> int:
    """Give the seed by which a sample's latent is drawn, 63 bits: of its id and the column that it is stored in."""
    key = sample_id.encode("utf-8", "surrogateescape")
    digest = hashlib.blake2b(key, digest_size=8, key=column.encode(), person=b"bucketline.draw").digest()
    return int.from_bytes(digest, "little") >> 1


def _load(model: ModelFolder) -> Any:  # noqa: ANN401 - diffusers has no types
    import diffusers

    part = model.part("vae")
    kind = str((model.config("vae") or {}).get("_class_name") or WITH_POSTERIOR)
    if kind not in (WITH_POSTERIOR, WITHOUT_POSTERIOR):
        raise ModelError(
            f"{model.name}: vae/ is a {kind[:80]}, expected {WITH_POSTERIOR} or {WITHOUT_POSTERIOR}; "
            "pack with a model that has one of these"
        )
    try:
        # in F32 first, so that the weights' digest does not depend on what is computed in
        vae, loading = getattr(diffusers, kind).from_pretrained(**part, torch_dtype=torch.float32, output_loading_info=True)
        refuse_incomplete(f"{model.name}: vae/", loading)
    except (OSError, ValueError, RuntimeError, KeyError, NotImplementedError) as error:
        raise ModelError(f"{model.name}: vae/ cannot be loaded as an {kind}: {one_line(error)}") from error
    return vae


def _numbers(values: Sequence[float] | None) -> Json:
    return None if values is None else [float(value) for value in values]
