"""Load all encoders of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.allocator import keep_freed_memory
from bucketline.ingest.encoders.text.registry import load_caption_encoder
from bucketline.ingest.encoders.text_columns import CaptionEncoder, TextSettings
from bucketline.ingest.encoders.text_model import QUANTISED
from bucketline.ingest.encoders.vae import VaeEncoder
from bucketline.store.format.columns import LatentKind

if TYPE_CHECKING:
    import torch

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.encoders.model_folder import ModelFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoders:
    """The encoders that turn images and captions into columns."""

    vae: VaeEncoder
    text: CaptionEncoder


def load_encoders(config: PackConfig, model: ModelFolder, device: torch.device) -> Encoders:
    """Load the VAE and the text encoders of a model folder.

    Raises:
        ModelError: if a part is missing or cannot be loaded.
        UsageError: if an option does not suit the model.
    """
    if device.type == "cpu":
        keep_freed_memory()
    latents, encode_dtype = LatentKind(config.latents), config.encode_dtype
    vae = VaeEncoder(
        model, device, config.dtype, latents=latents, encode_dtype="F32" if encode_dtype in QUANTISED else encode_dtype
    )
    settings = TextSettings(
        stored_dtype=config.text_dtype or config.dtype,
        encode_dtype=encode_dtype,
        max_tokens=config.max_tokens,
        is_plain=config.text is not None,
    )
    return Encoders(vae=vae, text=load_caption_encoder(model, device, settings))
