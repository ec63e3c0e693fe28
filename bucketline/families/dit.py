"""DiT: class-conditional, square images only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.families.family import Expected, Family, refuse_unsquare
from bucketline.families.packing import LINEAR
from bucketline.store.format.block import CLASS_LABELS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from bucketline.loader import Batch


class Dit(Family):
    """DiT: takes noisy latents, timesteps and classes; the null class for dropped labels follows the last class."""

    name = CLASS_LABELS
    pipelines = ("DiTPipeline",)
    model_class = "DiTTransformer2DModel"
    norm_type = "ada_norm_zero"
    is_square_only = True  # diffusers' class assumes height = width = √tokens when it reassembles its tokens
    reads_first_block = True
    has_lora_loader = False
    image_guidance = 4.0
    columns = (CLASS_LABELS,)
    embeds: ClassVar[Mapping[str, str]] = {}  # its pipeline takes no noise, and knows ImageNet's null class only: own steps
    out_channels = (None, 1, 2)  # twice as many with variances
    scheduler = LINEAR
    lora_targets = (*Family.lora_targets, "ff.net.0.proj", "ff.net.2")

    def expects(self) -> Iterator[Expected]:
        """Require the store's sizes and classes, and square buckets."""
        remedy = "pack the source into a store with --grid square:N"
        refuse_unsquare("the store", self.model_class, self.store.latent_sizes, remedy)
        yield from super().expects()
        yield self.one_of("num_embeds_ada_norm", (self.store.num_classes,), "the store has as many classes")

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Return latents, timesteps and classes."""
        return {"hidden_states": noisy, "timestep": timesteps, "class_labels": batch.class_labels}
