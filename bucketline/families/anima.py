"""Anima: what its text conditioner, elsewhere called LLM adapter, makes of a caption's T5 tokens and of its states in a Qwen3.

The conditioner is never trained. The model sees its output at the T5 tokens, and zeros up to 512 positions, without a mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.families.cosmos import ORIGINAL_NAMES, do_without_torchvision
from bucketline.families.family import Encoded, Family, Padding, Part
from bucketline.families.packing import flow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from bucketline.families.family import Expected, Model
    from bucketline.loader import Batch


class Anima(Family):
    """Anima: a Cosmos transformer, which takes latents with a frame axis, the noise as a share, and tokens."""

    name = "anima"
    pipelines = ("AnimaModularPipeline",)
    parts = (
        Part(kind="Qwen3", is_open=True, has_positions=False, most_tokens=512),
        Part(encoder="text_conditioner", tokenizer="t5_tokenizer", kind="Anima", layer="output", is_open=True, most_tokens=512),
    )
    padding = Padding.VALID
    model_class = "CosmosTransformer3DModel"
    is_shared_class = True
    usual_tokens = 512
    image_guidance = 4.0
    widths: ClassVar[Mapping[str, str]] = {"text_embed_dim": "tokens"}
    other_names = ORIGINAL_NAMES
    is_told_share = True
    scheduler = flow(3.0)  # as diffusers' conversion script writes it

    @classmethod
    def encode_prompt(cls, pipeline: Any, captions: list[str], more: Mapping[str, Any]) -> Encoded:  # noqa: ANN401 - diffusers has no types
        """Encode captions as the pipeline's first two steps do."""
        asked = {name: more[name] for name in ("device", "max_sequence_length")}
        step, condition = pipeline.blocks.sub_blocks["text_encoder"], pipeline.text_conditioner
        text = step.encode_prompt(pipeline, captions, prepare_unconditional_embeds=False, **asked)
        states, mask, ids = text["qwen_prompt_embeds"].to(condition.dtype), text["t5_attention_mask"], text["t5_input_ids"]
        return Encoded(tokens=condition(states, ids, mask, text["qwen_attention_mask"])[:, : mask.shape[1]], mask=mask)

    @classmethod
    def stored_width(cls, _model: Model, configs: Mapping[str, Any]) -> int:
        """Return the width of the conditioner's output."""
        return int(configs["text_conditioner"].target_dim)

    def expects(self) -> Iterator[Expected]:
        """Require rotary positions for each bucket's longer side, too."""
        yield from super().expects()
        sizes = self.config["max_size"], self.config["patch_size"]
        yield from self.enough_positions(field="max_size", most=max(map(int.__floordiv__, *sizes)))

    def prepare(self, model: nn.Module) -> None:
        """Let the model do without torchvision."""
        super().prepare(model)
        do_without_torchvision()

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Add that there are no borders, and leave out the tokens' mask."""
        given = {**super().arguments(noisy, timesteps, batch), "padding_mask": noisy.new_zeros(1, 1, *noisy.shape[2:])}
        return {name: one for name, one in given.items() if name != "encoder_attention_mask"}

    def as_tokens(self, latents: Tensor) -> Tensor:
        """Return latents as a video of one frame."""
        return latents[:, :, None]

    def tokens(self, batch: Batch) -> Tensor:
        """Return a batch's tokens with zeros after them."""
        from torch.nn.functional import pad

        return pad(batch.tokens.float() * batch.token_mask[..., None], (0, 0, 0, self.usual_tokens - batch.tokens.shape[1]))
