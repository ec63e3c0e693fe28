"""`DiTTransformer2DModel`: class-conditional, square images only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bucketline.square_only import DIT, refuse_unsquare
from bucketline.train.models.model import Expected, ModelFamily
from bucketline.train.noise_schedule import LINEAR

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from bucketline.loader import Batch


class Dit(ModelFamily):
    """DiT: takes noisy latents, timesteps and classes; the null class for dropped labels follows the last class."""

    model_class = DIT
    image_guidance = 4.0
    columns = ("class_labels",)
    out_channels = (None, 1, 2)  # twice as many with variances
    scheduler = LINEAR
    lora_targets = (*ModelFamily.lora_targets, "ff.net.0.proj", "ff.net.2")

    def expects(self) -> Iterator[Expected]:
        """Require the store's sizes and classes, and square buckets.

        Raises:
            UsageError: if a bucket is not square; the message names the first one.
        """
        refuse_unsquare("the store", DIT, self.store.latent_sizes, "pack the source into a store with --grid square:N")
        yield from super().expects()
        yield self.one_of("num_embeds_ada_norm", (self.store.num_classes,), "the store has as many classes")

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Return latents, timesteps and classes."""
        return {"hidden_states": noisy, "timestep": timesteps, "class_labels": batch.class_labels}
