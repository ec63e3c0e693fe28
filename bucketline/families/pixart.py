"""PixArt-Alpha and PixArt-Sigma: the last hidden state of a T5 at the caption's own tokens; the model masks the others.

They differ in the maximum caption length: 120 tokens for Alpha, 300 for Sigma. Captions are lowercased and stripped, as
the pipeline does with `clean_caption` off. Its clean-up of web text is not applied, so that captions match the source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.families.family import SAME_WIDTH, Expected, Family, Padding, Part
from bucketline.families.packing import LINEAR

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from bucketline.loader import Batch

MICRO_CONDITIONED = 128  # by default, models with this sample size take the image's size as a condition


class PixArtAlpha(Family):
    """PixArt: takes latents, timesteps, tokens and their mask; Alpha at 1024 px also takes the image's size."""

    name = "pixart_alpha"
    pipelines = ("PixArtAlphaPipeline",)
    parts = (Part(kind="T5", is_open=True),)
    padding = Padding.VALID
    results = ("tokens", "mask", None, None)
    prompt_options: ClassVar[Mapping[str, Any]] = {**Family.prompt_options, "clean_caption": False}
    model_class = "PixArtTransformer2DModel"
    norm_type = "ada_norm_single"
    usual_tokens = 300
    has_lora_loader = False
    image_guidance = 4.5
    embeds: ClassVar[Mapping[str, str]] = {"prompt_embeds": "tokens", "prompt_attention_mask": "mask"}
    call_options: ClassVar[Mapping[str, Any]] = {"negative_prompt": None, "use_resolution_binning": False}
    out_channels = (None, 1, 2)  # twice as many with variances
    scheduler = LINEAR
    lora_targets = (*Family.lora_targets, "ff.net.0.proj", "ff.net.2")

    @classmethod
    def cleaned(cls, pipeline: Any, captions: list[str]) -> list[str]:  # noqa: ANN401 - diffusers has no types
        cleaned: list[str] = pipeline._text_preprocessing(captions, clean_caption=False)
        return cleaned

    @property
    def token_field(self) -> str:
        """The projection's width if there is one."""
        return "cross_attention_dim" if self.config.get("caption_channels") is None else "caption_channels"

    def expects(self) -> Iterator[Expected]:
        """Require the store's sizes."""
        yield from super().expects()
        yield self.one_of(self.token_field, (self.store.text["tokens"],), SAME_WIDTH["tokens"])

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Add the image's size and height ÷ width as in `PixArtAlphaPipeline`."""
        added: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
        if self._is_told_sizes:
            sizes = batch.target_size.float()  # [B, 2], height first
            added = {"resolution": sizes, "aspect_ratio": sizes[:, :1] / sizes[:, 1:]}
        return {**super().arguments(noisy, timesteps, batch), "added_cond_kwargs": added}

    @property
    def _is_told_sizes(self) -> bool:
        said = self.config.get("use_additional_conditions")
        return self.config.get("sample_size") == MICRO_CONDITIONED if said is None else bool(said)


class PixArtSigma(PixArtAlpha):
    """Only the pipeline's default length of captions tells it from Alpha."""

    name = "pixart_sigma"
    pipelines = ("PixArtSigmaPipeline",)
