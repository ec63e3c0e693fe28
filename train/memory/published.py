"""The configurations of published models, as their folders have them, for counting memory without their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bucketline.typed_json import Json

PUBLISHED_MODELS: dict[str, dict[str, Json]] = {
    "SD 1.5": {"_class_name": "UNet2DConditionModel", "sample_size": 64, "cross_attention_dim": 768},
    "SDXL": {
        "_class_name": "UNet2DConditionModel",
        "sample_size": 128,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "block_out_channels": [320, 640, 1280],
        "transformer_layers_per_block": [1, 2, 10],
        "attention_head_dim": [5, 10, 20],
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
    "DiT-XL/2": {
        "_class_name": "DiTTransformer2DModel",
        "num_attention_heads": 16,
        "attention_head_dim": 72,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 28,
        "sample_size": 32,
        "patch_size": 2,
        "num_embeds_ada_norm": 1000,
    },
    "PixArt-Σ": {
        "_class_name": "PixArtTransformer2DModel",
        "num_attention_heads": 16,
        "attention_head_dim": 72,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 28,
        "cross_attention_dim": 1152,
        "caption_channels": 4096,
        "sample_size": 128,
        "patch_size": 2,
        "use_additional_conditions": False,
    },
    "SD 3.5 large": {
        "_class_name": "SD3Transformer2DModel",
        "sample_size": 128,
        "num_layers": 38,
        "num_attention_heads": 38,
        "attention_head_dim": 64,
        "caption_projection_dim": 2432,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 2048,
        "out_channels": 16,
        "pos_embed_max_size": 192,
        "qk_norm": "rms_norm",
    },
    "FLUX.1-dev": {
        "_class_name": "FluxTransformer2DModel",
        "in_channels": 64,
        "num_layers": 19,
        "num_single_layers": 38,
        "guidance_embeds": True,
    },
}
"""By name; a field that is missing has the default of diffusers' class."""
