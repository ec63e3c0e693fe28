"""Load the encoders of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.ingest.encoders.text_columns import TextSettings
from bucketline.ingest.encoders.text_encoders import load_caption_encoder
from bucketline.ingest.encoders.vae import VaeEncoder
from bucketline.store.format.block import LatentKind
from bucketline.torch_setup import avoid_cudnn_attention, keep_freed_memory

if TYPE_CHECKING:
    import torch

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.encoders.text_columns import CaptionEncoder


def load_vae_encoder(config: PackConfig, model: ModelFolder, device: torch.device) -> VaeEncoder:
    _prepare(device)
    return VaeEncoder(model, device, config.dtype, latents=LatentKind(config.latents), encode_dtype=config.vae_dtype)


def load_text_encoder(config: PackConfig, model: ModelFolder, device: torch.device) -> CaptionEncoder:
    """Load the text encoders of a model folder; raises what `load_vae_encoder` does."""
    _prepare(device)
    settings = TextSettings(
        stored_dtype=config.text_dtype or config.dtype,
        encode_dtype=config.encode_dtype,
        max_tokens=config.max_tokens,
        is_plain=config.text is not None,
    )
    return load_caption_encoder(model, device, settings)


def _prepare(device: torch.device) -> None:
    avoid_cudnn_attention()
    if device.type == "cpu":
        keep_freed_memory()
