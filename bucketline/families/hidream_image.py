"""HiDream-I1: at 128 positions a T5's last hidden state and every layer of a Llama, 35 MB a caption in F16, and two CLIPs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.families.family import SAME_WIDTH, Expected, Family, Part
from bucketline.families.packing import flow, split_layers
from bucketline.store.format.block import POOLED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from bucketline.loader import Batch


class HiDreamImage(Family):
    """HiDream-I1: takes latents, timesteps, tokens of a T5 and of a Llama's layers, and the pooled embedding."""

    name = "hidream_image"
    pipelines = ("HiDreamImagePipeline",)
    _BESIDE: ClassVar[Any] = {"has_positions": False, "is_open": True}
    _CLIP: ClassVar[Any] = {**_BESIDE, "layer": "text_embeds", "pooled": "projection_dim", "most_tokens": 218}
    parts = (
        Part(kind="CLIPTextModelWithProjection", **_CLIP),
        Part(encoder="text_encoder_2", tokenizer="tokenizer_2", kind="CLIPText", **_CLIP),
        Part(encoder="text_encoder_3", tokenizer="tokenizer_3", kind="T5", is_open=True, most_tokens=512),
        Part(encoder="text_encoder_4", tokenizer="tokenizer_4", kind="Llama", layer="hidden_states[1:]", **_BESIDE),
    )
    results = ("tokens", None, "layers", None, POOLED, None)
    model_class = "HiDreamImageTransformer2DModel"
    usual_tokens = 128
    image_guidance = 5.0
    columns = ("tokens", POOLED)
    widths: ClassVar[Mapping[str, str]] = {"text_emb_dim": POOLED}
    has_mask = False
    points_to_image = True
    eager_parts = ("MOEFeedForwardSwiGLU",)  # each expert gets the tokens that are routed to it
    renames: ClassVar[Mapping[str, str]] = {"timestep": "timesteps", "pooled_projections": "pooled_embeds"}
    scheduler = flow(3.0)  # the shift of the UniPC solver published with HiDream-I1-Full
    lora_targets = ("to_q", "to_k", "to_v", "to_out")  # as in diffusers' training script

    @property
    def token_width(self) -> int:
        """The widths of a T5 and of the Llama's layers that the model reads, together."""
        t5, llama = self.config["caption_channels"]
        return int(t5 + (max(self.config["llama_layers"]) + 1) * llama)

    def expects(self) -> Iterator[Expected]:
        """Require the store's sizes; of the Llama, as many layers as the model reads."""
        yield from super().expects()
        found, (t5, llama), least = self.store.text["tokens"], self.config["caption_channels"], self.token_width
        is_met = (found - t5) % llama == 0 and found >= least
        wanted, because = f"the first and {(least - t5) // llama} of the second, together {found}", SAME_WIDTH["tokens"]
        yield Expected(field="caption_channels", found=[t5, llama], wanted=wanted, is_met=is_met, because=because)

    def prepare(self, model: Any) -> None:  # noqa: ANN401 - as below
        """Have predictions put back into the shape of latents in training too; a HiDream does it in evaluation only."""
        model.unpatchify = lambda tokens, sizes, _: type(model).unpatchify(model, tokens, sizes, is_training=False)

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Return latents, timesteps, the T5's tokens, the Llama's by layer, and the pooled embedding."""
        given = super().arguments(noisy, timesteps, batch)
        t5, llama = split_layers(given.pop("encoder_hidden_states"), *self.config["caption_channels"])
        return {**given, "encoder_hidden_states_t5": t5, "encoder_hidden_states_llama3": llama}

    def embedded(self, batch: Batch) -> dict[str, Any]:
        """Part the T5's tokens from the Llama's layers."""
        t5, llama = split_layers(batch.tokens.float(), *self.config["caption_channels"])
        pooled = batch.text_fixed[POOLED].float()
        return {"prompt_embeds_t5": t5, "prompt_embeds_llama3": llama, "pooled_prompt_embeds": pooled}

    def draw(self, pipeline: Any, given: Mapping[str, Any], batch: Batch, negative: Batch | None = None) -> None:  # noqa: ANN401
        """Have the pipeline, which scales every image to one area, take that of this one; a little more, for its rounding."""
        pipeline.default_sample_size = 1.0001 * (given["height"] * given["width"]) ** 0.5 / pipeline.vae_scale_factor
        super().draw(pipeline, given, batch, negative)
