"""Chroma: Flux without pooled embedding and guidance; the last hidden state of a T5 at the caption's tokens and one of padding.

The transformer masks all padding but the first position, as its authors do. diffusers' pipeline means to: its mask is of
floats, which attention adds, so that padding counts 1 ÷ e of a token there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.families.family import Family, Padding, Part
from bucketline.families.packing import NUM_TRAIN_TIMESTEPS, PATCH, flow, image_ids, pack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from bucketline.loader import Batch


class Chroma(Family):
    """Chroma: takes packed latents, the noise as a share, tokens, position ids, and a mask of tokens and latents."""

    name = "chroma"
    pipelines = ("ChromaPipeline",)  # the others encode captions by other code
    parts = (Part(kind="T5", is_open=True, num_padding=1, most_tokens=512),)
    padding = Padding.VALID
    results = ("tokens", None, "mask", None, None, None)
    model_class = "ChromaTransformer2DModel"
    usual_tokens = 512
    image_guidance = 5.0
    embeds: ClassVar[Mapping[str, str]] = {"prompt_embeds": "tokens", "prompt_attention_mask": "mask"}
    widths: ClassVar[Mapping[str, str]] = {"joint_attention_dim": "tokens"}
    packing = PATCH
    scheduler = flow(1.0)  # as published with Chroma1-HD
    lora_targets = (*Family.lora_targets, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")

    def prepare(self, model: nn.Module) -> None:
        """Pass single blocks the mask that diffusers leaves out when it runs them again for gradient checkpointing."""
        last: dict[str, Any] = {}

        def keep(_: nn.Module, _args: tuple[Any, ...], given: dict[str, Any]) -> None:
            last["mask"] = given.get("attention_mask")

        def add(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return args, {"attention_mask": last["mask"], **given}

        super().prepare(model)
        model.register_forward_pre_hook(keep, with_kwargs=True)
        for block in model.get_submodule("single_transformer_blocks").children():
            block.register_forward_pre_hook(add, with_kwargs=True)

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Pack the latents, give the noise as a share, and add position ids and the mask, which covers latents too."""
        import torch

        packed, mask = pack(noisy), batch.token_mask
        return {
            "hidden_states": packed,
            "timestep": timesteps / NUM_TRAIN_TIMESTEPS,
            "encoder_hidden_states": batch.tokens.float(),
            "txt_ids": noisy.new_zeros(batch.tokens.shape[1], 3),
            "img_ids": image_ids(noisy),
            "attention_mask": torch.cat([mask, mask.new_ones(packed.shape[:2])], dim=1),
        }
