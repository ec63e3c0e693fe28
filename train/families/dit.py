"""`DiTTransformer2DModel`: class-conditional, square pictures alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.square_only import DIT, refuse_unsquare
from bucketline.train.families.family import LINEAR, SAME_CHANNELS, Expected, Family

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from bucketline.loader import Batch
    from bucketline.train.families.family import Presets


class Dit(Family):
    """Called with the noisy latents, the timesteps and the classes; the class after the last is the dropped one."""

    name = "dit"
    model_class = DIT
    columns = ("class_labels",)
    scheduler = LINEAR
    lora_targets = (*Family.lora_targets, "ff.net.0.proj", "ff.net.2")
    presets: ClassVar[Presets] = {
        "": {
            "learning_rate": 1e-4,
            "warmup_steps": 0,
            "batch_size": 32,
            "caption_dropout": 0.1,
            "precision": "bf16",
            "weight_decay": 0.0,
        },
    }

    def expects(self) -> Iterator[Expected]:
        """Expect the store's sizes and classes, and refuse buckets that are not square.

        Raises:
            UsageError: naming the first bucket that is not square.
        """
        refuse_unsquare("the store", DIT, self.store.latent_sizes, "pack the source into a store with --grid square:N")
        channels = self.store.latent_channels
        yield self.equal("in_channels", channels, SAME_CHANNELS)
        yield self.one_of("out_channels", (None, channels, 2 * channels), f"{SAME_CHANNELS}, and a variance may follow each")
        yield self.equal("num_embeds_ada_norm", self.store.num_classes, "the store has as many classes")
        yield from self.whole_patches()

    def prepare(self, model: nn.Module) -> None:
        """Leave the dropping of labels to the loader, whose draws are keyed: the model's come from the process's generator."""
        for module in model.modules():
            if hasattr(module, "dropout_prob"):
                module.dropout_prob = 0.0  # type: ignore[assignment] # torch types any attribute as a tensor or module

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Give latents, timesteps and classes."""
        return {"hidden_states": noisy, "timestep": timesteps, "class_labels": batch.class_labels}
