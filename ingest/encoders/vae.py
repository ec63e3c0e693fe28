"""Pictures to latents and back, by any diffusers `AutoencoderKL`. Latents are unscaled; scaling is the trainer's.

Letters: B pictures, H and W their height and width in px, C latent channels, h and w the latent's height and width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bucketline.errors import ModelError
from bucketline.ingest.encoders.loaded import hash_of_weights, refuse_incomplete
from bucketline.store.provenance import config_hash

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bucketline.ingest.encoders.model_folder import ModelFolder

STORED_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


class VaeEncoder:
    """A loaded VAE, encoding and decoding in float32."""

    def __init__(self, model: ModelFolder, device: torch.device, stored_dtype: str) -> None:
        """Load `vae/`.

        Raises:
            ModelError: where it is missing or is no `AutoencoderKL`.
        """
        from diffusers import AutoencoderKL

        part = model.part("vae")
        try:
            vae, loading = AutoencoderKL.from_pretrained(**part, torch_dtype=torch.float32, output_loading_info=True)
            refuse_incomplete(f"{model.name}: vae/", loading)
        except (OSError, ValueError, RuntimeError, KeyError, NotImplementedError) as error:
            raise ModelError(f"{model.name}: vae/ cannot be loaded as an AutoencoderKL: {error}") from error
        self._vae = vae.to(device).eval().requires_grad_(requires_grad=False)
        self._device = device
        self._dtype = STORED_DTYPES[stored_dtype]
        config = self._vae.config
        self.stored_dtype = stored_dtype
        self.downscale = 2 ** (len(config.block_out_channels) - 1)  # px per latent pixel, each way
        self.latent_channels = int(config.latent_channels)
        self.provenance: dict[str, Any] = {
            "class": "AutoencoderKL",
            "config_hash": config_hash(model.config("vae") or {}),
            "weights_hash": hash_of_weights(self._vae),
            "dtype": "F32",
            "latents": "mode",
            "stored_dtype": stored_dtype,
            "latent_channels": self.latent_channels,
            "downscale": self.downscale,
            "scaling_factor": float(config.scaling_factor),
            "shift_factor": float(config.shift_factor or 0.0),
        }

    @torch.inference_mode()
    def encode(self, pixels: NDArray[np.uint8]) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode pictures `[B, H, W, 3]`, sRGB.

        Gives latents `[B, C, h, w]` in the stored dtype on the CPU, the mode of the posterior, and which of them are
        finite in that dtype, `[B]` bool.
        """
        images = torch.from_numpy(pixels).to(self._device).permute(0, 3, 1, 2).to(torch.float32)
        latents = self._vae.encode(images / 127.5 - 1.0).latent_dist.mode()
        stored = latents.to(self._dtype).cpu().contiguous()
        return stored, torch.isfinite(stored).flatten(1).all(dim=1)

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor) -> NDArray[np.uint8]:
        """Decode latents as they are stored, `[B, C, h, w]`, to pictures `[B, H, W, 3]`, sRGB."""
        images = self._vae.decode(latents.to(self._device, torch.float32), return_dict=False)[0]
        pixels = ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        pictures: NDArray[np.uint8] = pixels.permute(0, 2, 3, 1).cpu().numpy()
        return pictures
