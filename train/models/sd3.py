"""`SD3Transformer2DModel`: Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.train.models.model import Expected, ModelFamily

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Sd3(ModelFamily):
    """Stable Diffusion 3: takes latents, timesteps, tokens of all positions and the pooled embedding."""

    model_class = "SD3Transformer2DModel"
    pipeline = "StableDiffusion3Pipeline"
    image_guidance = 7.0
    columns = ("tokens", "pooled")
    widths: ClassVar[Mapping[str, str]] = {"joint_attention_dim": "tokens", "pooled_projection_dim": "pooled"}
    has_mask = False
    scheduler: ClassVar[Mapping[str, Any]] = {  # as published with Stable Diffusion 3 Medium
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": 1000,
        "shift": 3.0,
    }
    lora_targets = (*ModelFamily.lora_targets, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")

    def expects(self) -> Iterator[Expected]:
        """Require the store's sizes, and enough positions for its largest bucket."""
        yield from super().expects()
        positions = self.config.get("pos_embed_max_size")
        for bucket, height, width in self.store.latent_sizes:
            needed = max(height, width) // self.patch_size
            yield Expected(
                field="pos_embed_max_size",
                found=positions,
                wanted=f"{needed} or more",
                is_met=isinstance(positions, int) and positions >= needed,
                because=f"{bucket} has as many tokens on its longer side",
            )
