"""Model families: the store columns that a model needs, its call arguments, and its checks against the store.

Letters: B samples, C latent channels, h and w latent height and width, L tokens, D a token's width.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from bucketline.train.noise_schedule import SCALED_LINEAR

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from bucketline.loader import Batch
    from bucketline.typed_json import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """The properties of a store that a model must match."""

    latent_channels: int  # C; if the store has moments, of a latent drawn from them
    text: Mapping[str, int]  # the width of each text column: `tokens`, `pooled`; or `class_labels`
    num_classes: int | None = None
    shows_padding: bool = True  # tokens are stored for all positions including padding, as in the model's pipeline
    latent_sizes: tuple[tuple[str, int, int], ...] = ()  # name, h, w of each bucket
    has_crops: bool = True  # where the images were cropped is known; imported ones may lack it


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A requirement on one field of a model's configuration."""

    field: str
    found: Json
    wanted: str  # in words
    is_met: bool
    because: str


SAME_CHANNELS = "the store's latents have as many channels"
SAME_WIDTH = {
    "tokens": "the store's text embeddings are as wide",
    "pooled": "the store's pooled embeddings are as wide",
}


class ModelFamily:
    """A kind of model, instantiated with a model's configuration and the facts of the store.

    To add a family, write a module with a subclass and add the class to `FAMILIES`.
    """

    model_class: ClassVar[str]  # in diffusers
    folder: ClassVar[str] = "transformer"  # in diffusers' layout
    pipeline: ClassVar[str | None] = None  # whose `load_lora_weights` loads an adapter; None: diffusers has none
    columns: ClassVar[tuple[str, ...]] = ("tokens",)  # text columns of the store
    widths: ClassVar[Mapping[str, str]] = {}  # fields of the configuration that are as wide as a text column
    out_channels: ClassVar[tuple[int | None, ...]] = (None, 1)  # times the latent's channels; None: as many as go in
    packing: ClassVar[int] = 1  # latent positions, in each direction, that become one position of more channels
    has_mask: ClassVar[bool] = True  # of the tokens that are padding
    scheduler: ClassVar[Mapping[str, Any]] = SCALED_LINEAR  # default for a folder without one
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    image_guidance: float  # default of the model's pipeline in diffusers
    sets_sigmas: ClassVar[bool] = False  # the pipeline has a flow's noise fall evenly to 1 ÷ steps; else as by the scheduler

    def __init__(self, config: Mapping[str, Json], store: StoreFacts) -> None:
        """`config`: the model's config.json, with the class's defaults for missing fields."""
        self.config = config
        self.store = store
        self.guidance = 1.0  # the input of a model that is told it

    @property
    def is_told_guidance(self) -> bool:
        """True for a guidance-distilled model, whose input says how strong the guidance is."""
        return bool(self.config.get("guidance_embeds"))

    def with_guidance(self, guidance: float) -> Self:
        """Return the same family with another guidance input."""
        other = copy.copy(self)
        other.guidance = guidance
        return other

    @classmethod
    def takes(cls, kind: str, _config: Mapping[str, Json]) -> bool:
        """Return whether a model with this class and configuration belongs to the family."""
        return kind == cls.model_class

    def expects(self) -> Iterator[Expected]:
        """Yield the configuration fields that must match the store."""
        channels = self.store.latent_channels * self.packing**2
        same = SAME_CHANNELS + f" in {self.packing} by {self.packing} positions" * (self.packing > 1)
        yield self.one_of("in_channels", (channels,), same)
        wanted = tuple(None if times is None else times * channels for times in self.out_channels)
        yield self.one_of("out_channels", wanted, same + ", or twice as many with variances" * (2 in self.out_channels))
        for field, column in self.widths.items():
            yield self.one_of(field, (self.store.text[column],), SAME_WIDTH[column])
        yield Expected(
            field="the store's encoders.text_encoder.padding",
            found="max_length" if self.store.shows_padding else "valid",
            wanted="max_length",
            is_met=self.has_mask or self.store.shows_padding,
            because="this model has no mask, and sees the padding that its pipeline adds",
        )
        for bucket, height, width in self.store.latent_sizes:
            yield Expected(
                field="patch_size",
                found=self.patch_size,
                wanted=f"a divisor of {height} and {width}",
                is_met=height % self.patch_size == 0 and width % self.patch_size == 0,
                because=f"the latents of {bucket} are {height} by {width}",
            )
        # Dropout draws from the process's generator: two ranks would differ from one, and a resume from an uninterrupted run.
        yield self.one_of("dropout", (0, None), "only random draws keyed by step and sample are reproducible: set it to 0")

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Return the model's call arguments: latents, timesteps, tokens, and the mask or the pooled embedding that it takes.

        `noisy`: [B, C, h, w] float32. `timesteps`: [B], int64 from 0, or for a flow float32, 1000 · noise.
        """
        given: dict[str, Any] = {
            "sample" if self.folder == "unet" else "hidden_states": noisy,
            "timestep": timesteps,
            "encoder_hidden_states": batch.tokens.float(),
        }
        if self.has_mask:  # padding tokens, if they are stored, are shown to the model
            given["encoder_attention_mask"] = None if self.store.shows_padding else batch.token_mask
        if "pooled" in self.widths.values():
            assert batch.pooled is not None
            given["pooled_projections"] = batch.pooled.float()
        return given

    def answer(self, output: Tensor, noisy: Tensor) -> Tensor:
        """Return the prediction, [B, C, h, w], from the model's output; of 2C channels the second half is a variance.

        The variance has a separate loss in Nichol and Dhariwal 2021 (arXiv 2102.09672). Here its channels get no gradient, as
        in diffusers' training scripts; diffusers' pipelines ignore these channels in sampling, too.
        """
        return output[:, : noisy.shape[1]]

    def prepare(self, model: nn.Module) -> None:
        """Disable the label dropout of a DiT, which uses the process's generator; the loader drops labels with keyed draws."""
        for module in model.modules():
            if hasattr(module, "dropout_prob"):
                module.dropout_prob = 0.0  # type: ignore[assignment] # torch types any attribute as a tensor or module

    @property
    def patch_size(self) -> int:
        """Latent positions per token, in each direction."""
        size = self.config.get("patch_size")
        return self.packing * (size if isinstance(size, int) else 1)

    def predict(self, model: nn.Module, noisy: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        """Return the model's prediction, [B, C, h, w]; the inputs are those of `arguments`."""
        output: Tensor = model(**self.arguments(noisy, timesteps, batch), return_dict=False)[0]
        return self.answer(output, noisy)

    def one_of(self, field: str, wanted: tuple[Json, ...], because: str) -> Expected:
        """Require one of the `wanted` values of a field."""
        words = " or ".join("none" if value is None else str(value) for value in wanted)
        found = self.config.get(field)
        return Expected(field=field, found=found, wanted=words, is_met=found in wanted, because=because)
