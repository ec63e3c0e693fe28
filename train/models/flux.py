"""`FluxTransformer2DModel`: its inputs are latents packed into tokens of 2 by 2, with position ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from bucketline.train.models.model import ModelFamily

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from bucketline.loader import Batch
    from bucketline.train.models.model import StoreFacts
    from bucketline.typed_json import Json

PATCH = 2
NUM_TRAIN_TIMESTEPS = 1000.0  # the model itself multiplies by it


class Flux(ModelFamily):
    """Flux: takes packed latents, timesteps, tokens of all positions, the pooled embedding, and position ids of both."""

    model_class = "FluxTransformer2DModel"
    pipeline = "FluxPipeline"
    image_guidance = 3.5
    columns = ("tokens", "pooled")
    widths: ClassVar[Mapping[str, str]] = {"joint_attention_dim": "tokens", "pooled_projection_dim": "pooled"}
    packing = PATCH
    sets_sigmas = True
    has_mask = False
    scheduler: ClassVar[Mapping[str, Any]] = {  # as published with FLUX.1-dev
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": 1000,
        "shift": 3.0,
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 1.15,
        "base_image_seq_len": 256,
        "max_image_seq_len": 4096,
    }
    lora_targets = (*ModelFamily.lora_targets, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")

    def __init__(self, config: Mapping[str, Json], store: StoreFacts) -> None:
        """FLUX.1-schnell takes no guidance at all."""
        super().__init__(config, store)
        self.image_guidance = Flux.image_guidance if self.is_told_guidance else 1.0

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Pack the latents, give the noise as a share, and add position ids, and guidance if the model takes it."""
        height, width = noisy.shape[2] // PATCH, noisy.shape[3] // PATCH
        guidance = noisy.new_full((len(noisy),), self.guidance) if self.is_told_guidance else None
        return {
            **super().arguments(pack(noisy), timesteps / NUM_TRAIN_TIMESTEPS, batch),
            "guidance": guidance,
            "txt_ids": noisy.new_zeros(batch.tokens.shape[1], 3),
            "img_ids": image_ids(height, width, noisy),
        }

    def answer(self, output: Tensor, noisy: Tensor) -> Tensor:
        """Unpack the prediction."""
        return unpack(output, noisy.shape[2], noisy.shape[3])


def pack(latents: Tensor) -> Tensor:
    """Pack 2 by 2 positions into tokens: [B, C, h, w] to [B, h·w/4, 4C]. Source: `FluxPipeline._pack_latents`."""
    count, channels, height, width = latents.shape
    tiles = latents.reshape(count, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(count, height * width // PATCH**2, channels * PATCH**2)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Undo `pack`: [B, h·w/4, 4C] to [B, C, h, w]."""
    tiles = tokens.reshape(len(tokens), height // PATCH, width // PATCH, tokens.shape[2] // PATCH**2, PATCH, PATCH)
    return tiles.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), tokens.shape[2] // PATCH**2, height, width)


def image_ids(height: int, width: int, like: Tensor) -> Tensor:
    """Return each token's position id, [height·width, 3]: 0, row, column. Source: `FluxPipeline._prepare_latent_image_ids`."""
    places = like.new_zeros(height, width, 3)
    places[..., 1] = torch.arange(height, device=like.device)[:, None]
    places[..., 2] = torch.arange(width, device=like.device)[None, :]
    return places.reshape(height * width, 3)
