"""Flux.2: three hidden states of a Mistral 3 side by side, at all positions; latents packed into tokens.

The pipeline puts each caption into a chat, which is padded, and the model sees the padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.families.family import Family, Part, variants
from bucketline.families.packing import PATCH, by_size_and_steps, flow, grid_ids
from bucketline.families.references import KeptReferences

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from bucketline.families.family import StoreFacts
    from bucketline.loader import Batch
    from bucketline.typed_json import Json

REFERENCE_SPACING = 10  # between the image indices of target and references


class Flux2(Family):
    """Flux.2: takes packed latents, the noise as a share, tokens of all positions, and position ids of both."""

    name = "flux2"
    pipelines = variants("Flux2")
    parts = (Part(kind="Mistral3", layer="hidden_states[10, 20, 30]", is_open=True),)
    results = ("tokens", None)
    num_layers = 3
    model_class = "Flux2Transformer2DModel"
    usual_tokens = 512
    image_guidance = 4.0
    widths: ClassVar[Mapping[str, str]] = {"joint_attention_dim": "tokens"}
    packing = PATCH
    packs_channels = True
    is_told_share = True
    has_mask = False
    noise_levels = by_size_and_steps
    references = KeptReferences(most=8)
    scheduler = flow(3.0, use_dynamic_shifting=True)  # as published with FLUX.2-dev

    @classmethod
    def cleaned(cls, pipeline: Any, captions: list[str]) -> list[str]:  # noqa: ANN401 - diffusers has no types
        """Return captions in the pipeline's chat, with its system message."""
        from diffusers.pipelines.flux2.pipeline_flux2 import format_input

        chats = format_input(prompts=captions, system_message=pipeline.system_message)
        return [pipeline.tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]

    @classmethod
    def takes(cls, kind: str, config: Mapping[str, Json]) -> bool:
        """Return whether a model of the class is told guidance; Klein is not."""
        return kind == cls.model_class and bool(config.get("guidance_embeds", True))

    def __init__(self, config: Mapping[str, Json], store: StoreFacts) -> None:
        """Choose layers for adapters as diffusers' training script of Klein does: also in blocks of one stream."""
        super().__init__(config, store)
        singles = range(self.number("num_single_layers"))
        outputs = (f"single_transformer_blocks.{n}.attn.to_out" for n in singles)
        self.lora_targets = (*Family.lora_targets, "to_qkv_mlp_proj", *outputs)  # type: ignore[misc] # of this model

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Pack the latents, give the noise as a share, and add position ids, and guidance if the model takes it."""
        height, width = noisy.shape[2] // PATCH, noisy.shape[3] // PATCH
        given = {
            **super().arguments(noisy, timesteps, batch),
            "guidance": noisy.new_full((len(noisy),), self.guidance) if self.is_told_guidance else None,
            "txt_ids": grid_ids(noisy, (1, 1, 1, batch.tokens.shape[1])),
            "img_ids": grid_ids(noisy, (1, height, width, 1)),
        }
        return self.with_references(given, batch)

    def with_references(self, given: Mapping[str, Any], batch: Batch) -> dict[str, Any]:
        """Put the references behind the target, the first at the image index 10, the next at 20."""
        import torch

        tokens, ids = [given["hidden_states"]], [given["img_ids"]]
        for number, one in enumerate(batch.scaled_references(), 1):
            tokens.append(self.as_tokens(one))
            own = grid_ids(one, (1, one.shape[2] // PATCH, one.shape[3] // PATCH, 1))
            ids.append(own + own.new_tensor([REFERENCE_SPACING * number, 0, 0, 0]))
        return {**given, "hidden_states": torch.cat(tokens, dim=1), "img_ids": torch.cat(ids, dim=1)}
