"""`SD3Transformer2DModel`: Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.train.models.model import SAME_CHANNELS, SAME_POOLED, SAME_WIDTH, Expected, ModelFamily

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from bucketline.loader import Batch


class Sd3(ModelFamily):
    """Stable Diffusion 3: takes latents, timesteps, tokens of all positions and the pooled embedding."""

    model_class = "SD3Transformer2DModel"
    pipeline = "StableDiffusion3Pipeline"
    image_guidance = 7.0
    columns = ("tokens", "pooled")
    scheduler: ClassVar[Mapping[str, Any]] = {  # as published with Stable Diffusion 3 Medium
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": 1000,
        "shift": 3.0,
    }
    lora_targets = (*ModelFamily.lora_targets, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")

    def expects(self) -> Iterator[Expected]:
        """Require the store's sizes, and enough positions for its largest bucket."""
        yield self.equal("in_channels", self.store.latent_channels, SAME_CHANNELS)
        yield self.one_of("out_channels", (None, self.store.latent_channels), SAME_CHANNELS)
        yield self.equal("joint_attention_dim", self.store.text["tokens"], SAME_WIDTH)
        yield self.equal("pooled_projection_dim", self.store.text["pooled"], SAME_POOLED)
        yield self.all_positions()
        yield from self.whole_patches()
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

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Return latents, timesteps (1000 · noise), tokens and pooled embedding."""
        assert batch.pooled is not None
        return {
            "hidden_states": noisy,
            "timestep": timesteps,
            "encoder_hidden_states": batch.tokens.float(),
            "pooled_projections": batch.pooled.float(),
        }
