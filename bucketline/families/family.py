"""Description of a model family: its text, its latents, its transformer or UNet, and what it needs from a store.

A family is a class with two halves. Packing calls its class methods, which say how captions become columns. Training makes an
instance of a model's configuration and a store's facts, which says how a batch becomes the model's arguments, and its answer a
prediction. Torch is imported inside functions only.

Letters: B samples, C latent channels, h and w latent height and width, T or L tokens, D a token's width.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from dataclasses import dataclass, field
from enum import StrEnum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from bucketline.errors import UsageError
from bucketline.families.modular import modular_pipeline
from bucketline.families.packing import (
    NUM_TRAIN_TIMESTEPS,
    SCALED_LINEAR,
    channels_first,
    channels_last,
    join_layers,
    pack,
    unpack,
)
from bucketline.store.format.block import POOLED, TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from bucketline.families.packing import NoiseLevels
    from bucketline.families.references import References
    from bucketline.loader import Batch
    from bucketline.typed_json import Json


class Padding(StrEnum):
    """The tokens that are stored: those that the model attends to."""

    MAX_LENGTH = "max_length"  # all positions, padding included; every caption has the same number
    VALID = "valid"  # only the caption's own tokens; the model masks the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Output of a pipeline for a batch of captions."""

    tokens: Tensor  # [B, T, D]
    mask: Tensor | None = None  # [B, T], True for tokens that the model sees; None if it sees all
    fixed: Mapping[str, Tensor] = field(default_factory=dict)  # by column, [B, D']


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of a family's text encoders."""

    encoder: str = "text_encoder"
    tokenizer: str = "tokenizer"
    layer: str = "last_hidden_state"  # which output is stored, as transformers calls it
    pooled: str = ""  # the field of its configuration that says how wide its pooled embedding is, if that is stored
    kind: str = ""  # how the names of the encoder's classes begin
    has_positions: bool = True  # adds token positions of its own (zeros if the part is absent), not shared with another part
    num_padding: int = 0  # positions of padding that the model sees after a caption's own tokens, if there is room
    is_open: bool = False  # its length is an argument of `encode_prompt`, not set by the tokenizer
    most_tokens: int | None = None  # of a caption, whatever `--max-tokens` or the tokenizer says; None: no other limit
    is_cut: bool = True  # the pipeline cuts longer captions; otherwise packing refuses them
    is_optional: bool = False


MODULAR = "ModularPipeline"
"""How the names of diffusers' modular pipelines end."""
PENULTIMATE_CLIP: Mapping[str, Any] = {"layer": "hidden_states[-2], text_embeds", "pooled": "projection_dim"}
"""A `Part` of SDXL and of Stable Diffusion 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """The properties of a store that a model must match."""

    latent_channels: int  # C; if the store has moments, of a latent drawn from them
    text: Mapping[str, int]  # the width of each text column: `tokens`, `pooled`; or `class_labels`
    num_classes: int | None = None
    shows_padding: bool = True  # tokens are stored for all positions including padding, as in the model's pipeline
    latent_sizes: tuple[tuple[str, int, int], ...] = ()  # name, h, w of each bucket
    px_per_latent: int = 8  # of an image, in each direction
    reference_sizes: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = ()  # name of each bucket, h and w of its references
    sees_images: bool = False  # its captions' encoder has seen the references
    has_crops: bool = True  # where the images were cropped is known; imported ones may lack it
    family: str = ""  # whose pipeline encoded the captions, as the store records it; empty if it does not


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A requirement on one field of a model's configuration."""

    field: str
    found: Json
    wanted: str  # in words
    is_met: bool
    because: str


class StandIn(SimpleNamespace):
    """Stands in for a part of which a pipeline's text part reads only some fields."""


class Model(Protocol):
    """A model's folder: what its configurations say."""

    @property
    def name(self) -> str: ...
    def has(self, name: str) -> bool: ...
    def config(self, name: str) -> Mapping[str, Any] | None: ...
    def index(self) -> Mapping[str, Any]: ...


def variants(stem: str, others: str = "") -> tuple[str, ...]:
    """Return the pipelines of a stem: its own, and those of other tasks.

    >>> variants("Flux", "Img2Img Fill")
    ('FluxPipeline', 'FluxImg2ImgPipeline', 'FluxFillPipeline')
    """
    return tuple(f"{stem}{other}Pipeline" for other in ("", *others.split()))


def refuse_unsquare(item: str, kind: str, sizes: Iterable[tuple[str, int, int]], remedy: str) -> None:
    """Check that all sizes (name, height, width) are square."""
    for name, height, width in sizes:
        if height != width:
            raise UsageError(
                f"{item} has the size {name}, and the model is a {kind}, which takes only square ones: "
                f"it would silently return a square with the same number of tokens; {remedy}"
            )


def own_tokens(batch: Batch) -> list[Tensor]:
    """Return each caption's own tokens, [L, D] each, without padding."""
    lengths = batch.token_mask.sum(dim=1)
    return [own[: int(length)] for own, length in zip(batch.tokens.float(), lengths, strict=True)]


SAME_CHANNELS = "the store's latents have as many channels"
SAME_WIDTH = {
    "tokens": "the store's text embeddings are as wide",
    "pooled": "the store's pooled embeddings are as wide",
}


class Family:
    """A kind of model. To add one, write a file with a subclass that has a `name`; see docs/families.md."""

    name: ClassVar[str]  # as stores record it
    pipelines: ClassVar[tuple[str, ...]]  # in diffusers: its own, and those that encode captions by the same code
    # Text. None of it for a family whose captions are classes.
    parts: ClassVar[tuple[Part, ...]] = ()
    padding: ClassVar[Padding] = Padding.MAX_LENGTH
    # Of `encode_prompt`, in order: a column, `layers` of another encoder, put behind tokens, `mask`, None. With `empty tokens`
    # and `empty mask` (of the negative prompt), the empty caption is the pipeline's negative prompt, which gets no template.
    results: ClassVar[tuple[str | None, ...]] = (TOKENS,)
    index_options: ClassVar[tuple[str, ...]] = ()  # arguments of the pipeline's constructor that change what is encoded
    num_layers: ClassVar[int] = 1  # of the encoder, side by side in a token
    refused_tokens: ClassVar[tuple[str, ...]] = ()  # its pipeline refuses captions with them, since they stand for images
    prompt_options: ClassVar[Mapping[str, Any]] = {"do_classifier_free_guidance": False}  # other arguments of `encode_prompt`
    references: ClassVar[References | None] = None  # what its pipeline does with reference images; None: it takes none
    # The transformer or UNet.
    model_class: ClassVar[str]  # in diffusers
    norm_type: ClassVar[str | None] = None  # of a published `Transformer2DModel` that is this class in diffusers now
    folder: ClassVar[str] = "transformer"  # in diffusers' layout
    is_shared_class: ClassVar[bool] = False  # other models, of another objective, have this class, too: only its pipeline tells
    columns: ClassVar[tuple[str, ...]] = (TOKENS,)  # text columns of the store
    widths: ClassVar[Mapping[str, str]] = {}  # fields of the configuration that are as wide as a text column
    out_channels: ClassVar[tuple[int | None, ...]] = (None, 1)  # times the latent's channels; None: as many as go in
    packing: ClassVar[int] = 1  # latent positions, in each direction, that become one position of more channels
    points_to_image: ClassVar[bool] = False  # of a flow: it predicts the image less the noise
    is_sequence: ClassVar[bool] = False  # it takes positions as tokens without packing, too
    packs_channels: ClassVar[bool] = False  # its pipeline takes packed positions as an image of more channels, not as tokens
    puts_channels_last: ClassVar[bool] = False  # in a token of packed positions, and in the VAE's statistics
    is_told_share: ClassVar[bool] = False  # of noise, from 0 to 1, in place of a timestep
    renames: ClassVar[Mapping[str, str]] = {}  # its own names for arguments that other models have, too
    packs_answer: ClassVar[bool] = True  # `out_channels` counts those of packed latents, as `in_channels` does
    alignment: ClassVar[int] = 1  # tokens, in each direction, that heights and widths must be a multiple of
    has_mask: ClassVar[bool] = True  # of the tokens that are padding
    is_square_only: ClassVar[bool] = False  # it silently returns a square for any other size
    reads_first_block: ClassVar[bool] = False  # its `forward` calls into its first block, not only the block itself
    eager_parts: ClassVar[tuple[str, ...]] = ()  # classes in its blocks whose sizes depend on values: they are not compiled
    has_own_lengths: ClassVar[bool] = False  # its blocks see as many tokens as a batch's longest caption, not the store's
    unused_layers: ClassVar[tuple[str, ...]] = ()  # parts of names, of layers whose last ones change no prediction
    usual_tokens: ClassVar[int] = 77  # of a caption by the defaults of its pipeline
    scheduler: ClassVar[Mapping[str, Any]] = SCALED_LINEAR  # default for a folder without one
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    has_lora_loader: ClassVar[bool] = True  # diffusers' `load_lora_weights` of its pipeline reads an adapter
    # Parts of layers' names and their names in the original checkpoint, where ComfyUI knows only these; empty: it knows
    # diffusers'. `to_q`, `to_k` and `to_v`, if still called so then, are one matrix there.
    other_names: ClassVar[Mapping[str, str]] = {}
    image_guidance: float  # default of its pipeline
    # Images during training, by the first of `pipelines`.
    embeds: ClassVar[Mapping[str, str]] = {
        "prompt_embeds": TOKENS
    }  # arguments of its call: a text column, `mask` of tokens, or `own tokens`
    guidance_argument: ClassVar[str] = "guidance_scale"
    no_guidance: ClassVar[float] = 1.0  # the guidance that is none; 0 if it counts from the caption's prediction
    is_guidable: ClassVar[bool] = True  # by the same model without a caption; False: by another one, which is not trained
    most_drawn: ClassVar[int | None] = None  # images of one call; None: any number
    joins_negative: ClassVar[bool] = True  # its call puts prompts and negative ones into one batch, of equally many tokens
    call_options: ClassVar[Mapping[str, Any]] = {}  # other arguments of its call
    pipeline_options: ClassVar[Mapping[str, Any]] = {}  # of its constructor

    # -- Packing

    @classmethod
    def encode_prompt(cls, pipeline: Any, captions: list[str], more: Mapping[str, Any]) -> Encoded:  # noqa: ANN401 - diffusers has no types
        """Encode captions by the pipeline's own `encode_prompt`, with those options, and of `more`, that it takes.

        A token's layers follow one another. Captions that it returns one by one, [L, D] each, are padded.
        """
        import torch
        from torch.nn.utils.rnn import pad_sequence

        taken = inspect.signature(pipeline.encode_prompt).parameters
        options = {name: value for name, value in {**cls.prompt_options, **more}.items() if name in taken}
        if "empty tokens" in cls.results:
            options["do_classifier_free_guidance"] = "" in captions
        answer = pipeline.encode_prompt(list(captions), **options)  # some write into the list that they get
        found = dict(zip(cls.results, answer if isinstance(answer, tuple) else (answer,), strict=False))
        tokens, mask = found.pop(TOKENS), found.pop("mask", None)
        if isinstance(tokens, list):
            mask = pad_sequence([own.new_ones(len(own)).bool() for own in tokens], batch_first=True)
            tokens = pad_sequence(tokens, batch_first=True)
        if (layers := found.pop("layers", None)) is not None:
            tokens = join_layers(tokens, layers)
        if (other := found.pop("empty tokens", None)) is not None:
            is_empty = torch.tensor([caption == "" for caption in captions], device=tokens.device)
            tokens = torch.where(is_empty[:, None, None], other, tokens)
            mask = torch.where(is_empty[:, None], found["empty mask"], mask)
        fixed = {name: value for name, value in found.items() if name not in ("empty mask", None)}
        return Encoded(tokens=tokens.flatten(2), mask=mask, fixed=fixed)

    @classmethod
    def stored_width(cls, _model: Model, configs: Mapping[str, Any]) -> int:
        """Return the width of tokens from the encoders' configurations: that of the last part's layers together.

        Where a pipeline returns `layers` by themselves, these are all of them, behind the tokens of the part before.
        """
        last = configs[cls.parts[-1].encoder].get_text_config()
        if "layers" in cls.results:
            return int(configs[cls.parts[-2].encoder].hidden_size + last.num_hidden_layers * last.hidden_size)
        return cls.num_layers * int(last.hidden_size)

    @classmethod
    def extras(cls, model: Model) -> dict[str, Any]:
        """Return other arguments of the pipeline's constructor."""
        return {name: value for name, value in model.index().items() if name in cls.index_options}

    @classmethod
    def pipeline_parts(cls, parts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return loaded encoders and tokenizers as the pipeline's constructor takes them."""
        return parts

    @classmethod
    def pipeline(cls, given: Mapping[str, Any], index: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401 - likewise
        """Return the family's pipeline of these parts and options only, by diffusers' names.

        `index`: a model's, whose options it takes unless they are given.
        """
        import diffusers
        import transformers

        for library in (diffusers.utils, transformers):
            library.logging.set_verbosity_error()  # they say which optional libraries are missing
        kind = getattr(diffusers, cls.pipelines[0])
        if kind.__name__.endswith(MODULAR):
            return modular_pipeline(kind, given)
        _, *wanted = inspect.signature(kind.__init__).parameters.values()
        names = {one.name for one in wanted}
        absent = {one.name: None for one in wanted if one.default is inspect.Parameter.empty}
        options = {name: value for name, value in (index or {}).items() if name in names and not isinstance(value, list)}
        with warnings.catch_warnings(category=FutureWarning, action="ignore"):  # PRX's pipeline is of a deprecated class
            return kind(**{**absent, **options, **cls.pipeline_options, **given})

    @classmethod
    def cleaned(cls, _pipeline: Any, captions: list[str]) -> list[str]:  # noqa: ANN401 - likewise
        """Return captions as the tokenizer gets them."""
        return captions

    @classmethod
    def num_dropped(cls, pipeline: Any, _caption: str) -> int:  # noqa: ANN401 - likewise
        """Return how many of the tokens that the tokenizer makes of a cleaned caption are not stored: those of a template."""
        return int(getattr(pipeline, "prompt_template_encode_start_idx", 0))

    # -- Training

    @classmethod
    def takes(cls, kind: str, _config: Mapping[str, Json]) -> bool:
        """Return whether a model with this class and configuration belongs to the family."""
        return kind == cls.model_class

    def __init__(self, config: Mapping[str, Json], store: StoreFacts) -> None:
        """`config`: the model's config.json, with the class's defaults for missing fields."""
        self.config: Mapping[str, Any] = config
        self.store = store
        self.guidance = 1.0  # the input of a model that is told it

    @property
    def lora_pipeline(self) -> str | None:
        """The pipeline whose `load_lora_weights` loads an adapter; None: diffusers has none."""
        return self.pipelines[0] if self.has_lora_loader else None

    @property
    def is_told_guidance(self) -> bool:
        """True for a guidance-distilled model, whose input says how strong the guidance is."""
        return bool(self.config.get("guidance_embeds"))

    def is_guided(self, guidance: float) -> bool:
        """Return whether images with such a guidance are drawn against negative prompts, as by the family's pipeline."""
        return self.is_guidable and not self.is_told_guidance and guidance > self.no_guidance

    def with_guidance(self, guidance: float) -> Self:
        """Return the same family with another guidance input."""
        other = copy.copy(self)
        other.guidance = guidance
        return other

    @property
    def token_field(self) -> str | None:
        """The field of the configuration that says how wide tokens are."""
        return next((own for own, column in self.widths.items() if column == TOKENS), None)

    @property
    def token_width(self) -> int:
        """The width of the tokens that the model takes; 1 if they are classes."""
        return 1 if self.token_field is None else self.number(self.token_field)

    @property
    def pooled_width(self) -> int:
        """The width of the pooled embedding that the model takes; 0 if it takes none."""
        own = next((own for own, column in self.widths.items() if column == POOLED), None)
        return self.number(own) if own else 0

    def number(self, field: str) -> int:
        """Return a field of the configuration; 0 if it is not an integer."""
        found = self.config.get(field)
        return found if isinstance(found, int) else 0

    def expects(self) -> Iterator[Expected]:
        """Yield the configuration fields that must match the store."""
        channels = self.store.latent_channels * self.packing**2
        same = SAME_CHANNELS + f" in {self.packing} by {self.packing} positions" * (self.packing > 1)
        yield self.one_of("in_channels", (channels,), same)
        given = channels if self.packs_answer else self.store.latent_channels
        wanted = tuple(None if times is None else times * given for times in self.out_channels)
        yield self.one_of("out_channels", wanted, same + ", or twice as many with variances" * (2 in self.out_channels))
        for own, column in self.widths.items():
            yield self.one_of(own, (self.store.text[column],), SAME_WIDTH[column])
        yield Expected(
            field="the store's encoders.text_encoder.padding",
            found="max_length" if self.store.shows_padding else "valid",
            wanted="max_length",
            is_met=self.has_mask or self.store.shows_padding,
            because="this model has no mask, and sees the padding that its pipeline adds",
        )
        step = self.patch_size * self.alignment
        for bucket, height, width in self.store.latent_sizes:
            yield Expected(
                field="patch_size",
                found=step,
                wanted=f"a divisor of {height} and {width}",
                is_met=height % step == 0 and width % step == 0,
                because=f"the latents of {bucket} are {height} by {width}",
            )
        yield from self._expected_references()
        # Dropout draws from the process's generator: two ranks would differ from one, and a resume from an uninterrupted run.
        yield self.one_of("dropout", (0, None), "only random draws keyed by step and sample are reproducible: set it to 0")

    def _expected_references(self) -> Iterator[Expected]:
        own = self.references
        fewest, most = (0, 0) if own is None else (own.least, own.most)
        for bucket, sizes in self.store.reference_sizes:
            wanted = str(most) if fewest == most else f"{fewest} to {most}"
            takes = "takes no references" if own is None else f"takes {wanted}"
            yield Expected(
                field=f"the number of references in {bucket}",
                found=len(sizes),
                wanted=wanted,
                is_met=fewest <= len(sizes) <= most,
                because=f"a model of {self.pipelines[0]} {takes}",
            )
            step = self.patch_size * self.alignment
            for number, (height, width) in enumerate(sizes):
                yield Expected(
                    field="patch_size",
                    found=step,
                    wanted=f"a divisor of {height} and {width}",
                    is_met=height % step == 0 and width % step == 0,
                    because=f"the latents of reference {number} in {bucket} are {height} by {width}",
                )
        sees = own is not None and own.text_sees
        if not self.store.sees_images and not any(sizes for _, sizes in self.store.reference_sizes):
            return  # such as an imported cache of captions
        yield Expected(
            field="the store's text encoder",
            found="one that has seen the references" if self.store.sees_images else "one that has seen captions only",
            wanted="one that has seen the references" if sees else "one that has seen captions only",
            is_met=sees is self.store.sees_images,
            because=f"{self.pipelines[0]} encodes captions so",
        )

    def one_of(self, field: str, wanted: Sequence[Json], because: str) -> Expected:
        """Require one of the `wanted` values of a field."""
        words = " or ".join("none" if value is None else str(value) for value in wanted)
        found = self.config.get(field)
        return Expected(field=field, found=found, wanted=words, is_met=found in wanted, because=because)

    def enough_positions(
        self, power: int = 1, field: str = "pos_embed_max_size", most: int | None = None
    ) -> Iterator[Expected]:
        """Require that the model's positions reach each bucket's longer side; it counts a side's, or a square's (2).

        `most`: how many they are, if the `field` of the configuration is not their number.
        """
        found = self.number(field) if most is None else most
        for bucket, height, width in self.store.latent_sizes:
            side = max(height, width) // self.patch_size
            wanted = side**power
            because = f"{bucket} has {side} tokens on its longer side"
            yield Expected(field=field, found=found, wanted=f"{wanted} or more", is_met=found >= wanted, because=because)

    def same(self, field: str, found: int, wanted: int) -> Expected:
        """Require a token's width of several fields together."""
        return Expected(field=field, found=found, wanted=str(wanted), is_met=found == wanted, because=SAME_WIDTH[TOKENS])

    @classmethod
    def positions_per_token(cls, config: Mapping[str, Any]) -> int:
        """Return latent positions per token, in each direction."""
        patch = config.get("patch_size") or 1
        return cls.packing * int(patch if isinstance(patch, int) else patch[-1])  # of a video model: frames, height, width

    @property
    def patch_size(self) -> int:
        """Latent positions per token, in each direction."""
        return self.positions_per_token(self.config)

    @classmethod
    def scaling(cls, vae: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a store's record of its VAE as the family's pipeline scales latents by it, with a patch's places last."""
        import torch

        if not cls.puts_channels_last:
            return vae
        norm = vae["batch_norm"]
        turned = {one: channels_first(torch.tensor(norm[one], dtype=torch.float64)).tolist() for one in ("mean", "std")}
        return {**vae, "batch_norm": {**norm, **turned}}

    def prepare(self, model: nn.Module) -> None:
        """Disable the label dropout of a DiT, which uses the process's generator; the loader drops labels with keyed draws."""
        for module in model.modules():
            if hasattr(module, "dropout_prob"):
                module.dropout_prob = 0.0  # type: ignore[assignment] # torch types any attribute as a tensor or module

    def noise_levels(self, _index: Mapping[str, Any], /) -> NoiseLevels | None:
        """Return a flow's noise levels by size as its pipeline draws; None: those of the scheduler's configuration.

        `_index`: the model's `model_index.json`.
        """
        return None

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Return the model's call arguments: latents, timesteps, tokens, and the mask or the pooled embedding that it takes.

        `noisy`: [B, C, h, w] float32. `timesteps`: [B], int64 from 0, or for a flow float32, 1000 · noise.
        """
        given: dict[str, Any] = {
            "sample" if self.folder == "unet" else "hidden_states": self.as_tokens(noisy),
            "timestep": timesteps / NUM_TRAIN_TIMESTEPS if self.is_told_share else timesteps,
            "encoder_hidden_states": self.tokens(batch),
        }
        if self.has_mask:  # padding tokens, if they are stored, are shown to the model
            given["encoder_attention_mask"] = None if self.store.shows_padding else batch.token_mask
        if POOLED in self.widths.values():
            assert batch.pooled is not None
            given["pooled_projections"] = batch.pooled.float()
        return {self.renames.get(name, name): value for name, value in given.items()}

    def with_references(self, given: Mapping[str, Any], _batch: Batch) -> dict[str, Any]:
        """Return a call's arguments with a batch's references, scaled and without noise, in their places.

        `given`: those of the target only, from `arguments` or the family's pipeline.
        """
        return dict(given)

    def tokens(self, batch: Batch) -> Tensor:
        """Return a batch's tokens as the model takes them."""
        return batch.tokens.float()

    def answer(self, output: Tensor, noisy: Tensor) -> Tensor:
        """Return the prediction, [B, C, h, w], from the model's output; of 2C channels the second half is a variance.

        The variance has a separate loss in Nichol and Dhariwal 2021 (arXiv 2102.09672). Here its channels get no gradient, as
        in diffusers' training scripts; diffusers' pipelines ignore these channels in sampling, too.
        """
        if self.references is not None and not self.references.come_first:
            output = output[:, : noisy.shape[2] * noisy.shape[3] // self.packing**2]
        prediction = self.unpacked(output, *noisy.shape[2:])[:, : noisy.shape[1]]
        return -prediction if self.points_to_image else prediction

    def unpacked(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Return latents as the family's pipeline hands them to its scheduler, as [B, C, height, width]."""
        from torch.nn.functional import pixel_shuffle

        if latents.ndim == 5:  # a video of one frame
            return latents[:, :, 0]
        if latents.ndim == 3:
            own = latents[:, -(height * width) // self.packing**2 :]  # of a sequence that the image is the end of
            return unpack(channels_first(own) if self.puts_channels_last else own, height, width, self.packing)
        return latents if latents.shape[2] == height else pixel_shuffle(latents, self.packing)

    def packed(self, latents: Tensor) -> Tensor:
        """Return latents, [B, C, h, w], as the family's pipeline takes them."""
        from torch.nn.functional import pixel_unshuffle

        return pixel_unshuffle(latents, self.packing) if self.packs_channels else self.as_tokens(latents)

    def as_tokens(self, latents: Tensor) -> Tensor:
        """Return latents, [B, C, h, w], as tokens if the model takes a sequence."""
        if not self.is_sequence and self.packing == 1:
            return latents
        tokens = pack(latents, self.packing)
        return channels_last(tokens) if self.puts_channels_last else tokens

    def embedded(self, batch: Batch) -> dict[str, Any]:
        """Return a batch's embeddings as arguments of the pipeline's call; of negative prompts, as `negative_…`."""
        found: dict[str, Callable[[], Tensor | list[Tensor]]] = {
            **{name: value.float for name, value in batch.text_fixed.items()},
            TOKENS: lambda: self.tokens(batch),
            "mask": lambda: batch.token_mask,
            "own tokens": lambda: own_tokens(batch),
        }
        return {name: found[own]() for name, own in self.embeds.items()}

    def draw(self, pipeline: Any, given: Mapping[str, Any], batch: Batch, negative: Batch | None = None) -> None:  # noqa: ANN401
        """Call the pipeline with a batch's embeddings, and those of its negative prompts if there are any."""
        other = {} if negative is None else self.embedded(negative)
        with contextlib.ExitStack() as hooked:
            if self.references is not None:  # latents of stored ones, which pipelines take as images only
                hook = getattr(pipeline, self.folder).register_forward_pre_hook(
                    lambda _model, args, options: (args, self.with_references(options, batch)), with_kwargs=True, prepend=True
                )
                hooked.callback(hook.remove)
            pipeline(**given, **self.embedded(batch), **{f"negative_{name}": value for name, value in other.items()})

    def predict(self, model: nn.Module, noisy: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        """Return the model's prediction, [B, C, h, w]; the inputs are those of `arguments`."""
        output: Tensor = model(**self.arguments(noisy, timesteps, batch), return_dict=False)[0]
        return self.answer(output, noisy)
