"""`PixArtTransformer2DModel`: PixArt-Alpha and PixArt-Sigma."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bucketline.train.models.model import SAME_WIDTH, Expected, ModelFamily
from bucketline.train.noise_schedule import LINEAR

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from bucketline.loader import Batch

MICRO_CONDITIONED = 128  # by default, models with this sample size take the image's size as a condition


class PixArt(ModelFamily):
    """PixArt: takes latents, timesteps, tokens and their mask; Alpha at 1024 px also takes the image's size."""

    model_class = "PixArtTransformer2DModel"
    image_guidance = 4.5
    out_channels = (None, 1, 2)  # twice as many with variances
    scheduler = LINEAR
    lora_targets = (*ModelFamily.lora_targets, "ff.net.0.proj", "ff.net.2")

    def expects(self) -> Iterator[Expected]:
        """Require the store's sizes."""
        yield from super().expects()
        width = "cross_attention_dim" if self.config.get("caption_channels") is None else "caption_channels"
        yield self.one_of(width, (self.store.text["tokens"],), SAME_WIDTH["tokens"])

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
