"""What the trainer knows of a kind of model: which columns it needs, what it is called with, what must suit the store.

Letters: B samples, C latent channels, h and w latent height and width, L tokens, D a token's width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from bucketline.loader import Batch
    from bucketline.store.typed_json import Json

    Presets = Mapping[str, Mapping[str, object]]
    """Values of TrainConfig's fields, by what follows the family's name: "" or "-lora"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """What a store offers a model."""

    latent_channels: int  # C, of a drawn latent where the store has moments
    text: Mapping[str, int]  # the width of each text column: `tokens`, `pooled`; or `class_labels`
    num_classes: int | None = None
    shows_padding: bool = True  # whether the tokens are all positions, padding included, as the model's pipeline shows them
    latent_sizes: tuple[tuple[str, int, int], ...] = ()  # of each bucket: its name, h, w


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One thing that a model's configuration must say."""

    field: str
    found: Json
    wanted: str  # in words
    is_met: bool
    because: str


SCALED_LINEAR: Mapping[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "epsilon",
}
"""Source: the scheduler configuration published with Stable Diffusion 1.5, and that of SDXL."""
LINEAR: Mapping[str, Any] = {**SCALED_LINEAR, "beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear"}
"""Source: the scheduler configuration published with DiT-XL/2, and that of PixArt."""

SAME_CHANNELS = "the store's latents have as many channels"
SAME_WIDTH = "the store's text embeddings are as wide"
SAME_POOLED = "the store's pooled embeddings are as wide"


class Family(ABC):
    """One kind of model, with the configuration of one model and what the store at hand offers it.

    To add a kind: a module with a subclass, and its name in `FAMILIES`.
    """

    name: ClassVar[str]  # presets begin with it
    model_class: ClassVar[str]  # in diffusers
    folder: ClassVar[str] = "transformer"  # in diffusers' layout
    pipeline: ClassVar[str | None] = None  # whose `load_lora_weights` takes an adapter; None: diffusers has none
    columns: ClassVar[tuple[str, ...]] = ("tokens",)  # of the store's text
    scheduler: ClassVar[Mapping[str, Any]] = SCALED_LINEAR  # for a folder without one
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    presets: ClassVar[Presets]

    def __init__(self, config: Mapping[str, Json], store: StoreFacts) -> None:
        """`config`: the model's config.json, with the class's defaults where it is silent."""
        self.config = config
        self.store = store

    @classmethod
    def takes(cls, kind: str, _config: Mapping[str, Json]) -> bool:
        """Say whether a model of this class and configuration is of this kind."""
        return kind == cls.model_class

    @abstractmethod
    def expects(self) -> Iterator[Expected]:
        """Give what the configuration must say to suit the store."""

    @abstractmethod
    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Give what the model is called with.

        `noisy`: [B, C, h, w] float32. `timesteps`: [B], int64 from 0, or of a flow float32, 1000 times the noise's share.
        """

    def answer(self, output: Tensor, noisy: Tensor) -> Tensor:
        """Give the prediction, [B, C, h, w], of what the model returned; of 2C channels the second half is a variance.

        The variance has its own loss in Nichol and Dhariwal 2021 (arXiv 2102.09672). Here its channels get no gradient, as
        in diffusers' training scripts; its pipelines of such models leave them out when they draw, too.
        """
        return output[:, : noisy.shape[1]]

    def prepare(self, model: nn.Module) -> None:  # noqa: B027 - most models draw nothing
        """Turn off what of the model would draw at random."""

    @property
    def patch_size(self) -> int:
        """Latent positions of a token, each way."""
        size = self.config.get("patch_size")
        return size if isinstance(size, int) else 1

    def predict(self, model: nn.Module, noisy: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        """Give the model's prediction, [B, C, h, w]; the arguments as those of `arguments`."""
        output: Tensor = model(**self.arguments(noisy, timesteps, batch), return_dict=False)[0]
        return self.answer(output, noisy)

    def equal(self, field: str, wanted: Json, because: str) -> Expected:
        """Expect a value of a field."""
        return self.one_of(field, (wanted,), because)

    def one_of(self, field: str, wanted: tuple[Json, ...], because: str) -> Expected:
        """Expect one of some values of a field."""
        words = " or ".join("none" if value is None else str(value) for value in wanted)
        found = self.config.get(field)
        return Expected(field=field, found=found, wanted=words, is_met=found in wanted, because=because)

    def whole_patches(self) -> Iterator[Expected]:
        """Expect patches that every bucket's latent is made of."""
        for bucket, height, width in self.store.latent_sizes:
            yield Expected(
                field="patch_size",
                found=self.patch_size,
                wanted=f"a divisor of {height} and {width}",
                is_met=height % self.patch_size == 0 and width % self.patch_size == 0,
                because=f"the latents of {bucket} are {height} by {width}",
            )

    def all_positions(self) -> Expected:
        """Expect a store of every position's embedding, for a model that has no mask."""
        return Expected(
            field="the store's encoders.text_encoder.padding",
            found="max_length" if self.store.shows_padding else "valid",
            wanted="max_length",
            is_met=self.store.shows_padding,
            because="this model takes no mask, and sees the padding that its pipeline feeds it",
        )
