"""A batch: rows of one bucket, one shape, one device; its quantised tokens as F16, and its latents scaled.

Letters: B rows, C latent channels, h and w the latent's height and width, L tokens (padded), D token width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bucketline.errors import UsageError
from bucketline.extensions import imported
from bucketline.loader.plan.order import Purpose, normal
from bucketline.store.format.block import (
    IS_IMAGE,
    MASK,
    POOLED,
    SEEN_EMPTY,
    SEEN_IMAGES,
    TARGET,
    TOKENS,
    LatentKind,
    references_of,
)
from bucketline.store.format.text import GROUP
from bucketline.torch_dtypes import as_stored

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from bucketline.typed_json import Json


# ------------------------------------------------------------------------------------------------------------------ dequantise
# Quantised tokens as F16, on any device, in one expression that compiles.
#
# It gives the bits that `store.format.text_codec` defines. Letters: B rows, L tokens (padded), D token width, S scales.

_F16_OF_E4M3 = 256.0  # F8_E4M3's bits, moved into the places of F16's, are 2⁻⁸ times the value


def dequantised(tokens: Tensor, scale: Tensor) -> Tensor:
    """Return quantised tokens, `[B, L, D]` int8 or uint8 (the bits of F8_E4M3), times their scales, `[B, L, S]`, as float16."""
    if tokens.dtype is torch.uint8:
        bits = tokens.int()
        halves = ((bits & 0x7F) << 7 | (bits & 0x80) << 8).to(torch.int16).view(torch.float16)
        return (halves.float() * _F16_OF_E4M3 * scale).half()
    each = scale.float().unsqueeze(-1)
    if tokens.shape[-1] % GROUP == 0:
        return (tokens.float().view(*scale.shape, GROUP) * each).flatten(-2).half()
    return (tokens.float() * each.expand(*scale.shape, GROUP).flatten(-2)[..., : tokens.shape[-1]]).half()


# ---------------------------------------------------------------------------------------------------------------- latent scale
# How stored latents become those that a model is trained on: drawn if they are moments, then shifted and scaled by their VAE.
#
# The trainer and `Batch.scaled` share it. Letters: B rows, C latent channels, h and w latent height and width.

_PATCH = 2  # of a VAE's `batch_norm`, by the store's format
LOG_VARIANCE_RANGE = (-30.0, 20.0)  # Source: diffusers' DiagonalGaussianDistribution


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentScale:
    """Scaling of stored latents for a model: (stored - shift) · scale, per channel if the VAE has a mean and std.

    Per channel and place in a p by p patch if the VAE normalises patches.

    Source: diffusers' AutoencoderKL configuration, and its use in the pipelines.
    """

    scale: float | Tensor  # [C, p, p]
    shift: float | Tensor = 0.0  # [C, p, p]

    @classmethod
    def of(cls, vae: Mapping[str, Json], device: torch.device) -> LatentScale:
        """Return the scaling of a VAE by a store's record of it."""

        def each(values: Json, side: int = 1) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device).reshape(-1, side, side)

        if isinstance(norm := vae.get("batch_norm"), dict):
            return cls(scale=1 / each(norm["std"], _PATCH), shift=each(norm["mean"], _PATCH))
        shift = vae.get("latents_mean") or vae.get("shift_factor") or 0.0
        return cls(scale=each(vae["scaling_factor"]) / each(vae.get("latents_std") or 1.0), shift=each(shift))

    def apply(self, stored: Tensor, posterior_noise: Tensor | None = None) -> Tensor:
        """Return the latents for the model, in 32 bits; with noise, those drawn by it from stored moments."""
        if posterior_noise is not None:
            mean, log_variance = stored.float().chunk(2, dim=1)
            stored = mean + (0.5 * log_variance.clamp(*LOG_VARIANCE_RANGE)).exp() * posterior_noise
        return (stored.float() - _over(self.shift, stored)) * _over(self.scale, stored)

    def invert(self, latents: Tensor) -> Tensor:
        """Return the latents for the VAE's decoder."""
        return latents / _over(self.scale, latents) + _over(self.shift, latents)


def _over(each: float | Tensor, latents: Tensor) -> float | Tensor:
    """Return a patch's numbers, [C, p, p], repeated over latents, [B, C, h, w]; a channel's over [B, C, …] of any axes."""
    if isinstance(each, float):
        return each
    if each.shape[0] not in (1, latents.shape[1]):  # torch would repeat latents of one channel
        raise UsageError(
            f"the scaling is of {each.shape[0]} channels and the latents have {latents.shape[1]}; give one of as many"
        )
    if each.shape[-1] == 1:
        return each.reshape(-1, *(1 for _ in latents.shape[2:]))
    return each.repeat(1, latents.shape[2] // each.shape[1], latents.shape[3] // each.shape[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedScale:
    """How the latents of a loader's stores are scaled, by what these record of their encoders; read when it is first used."""

    where: str = field(default="a store that is not known", compare=False)
    encoders: Mapping[str, Json] = field(default_factory=dict)
    _found: dict[torch.device, LatentScale] = field(default_factory=dict, init=False, repr=False, compare=False)

    def on(self, device: torch.device) -> LatentScale:
        """Return the scaling by tensors on a device, which are made once."""
        if device not in self._found:
            vae = self.encoders.get("vae")
            try:
                with torch.inference_mode(mode=False):  # or a backward pass through `invert` could not use the tensors later
                    self._found[device] = _usable(self._of_family(vae), device)
            except (
                KeyError,
                TypeError,
                ValueError,
                RuntimeError,
                OverflowError,
            ) as error:  # whatever a store of other arrays has there
                raise UsageError(
                    f"{self.where} does not record how its latents are scaled: encoders.vae is {vae!s:.100}, expected a "
                    "mapping of finite numbers with a scaling_factor that is not 0. Give the scaling: "
                    "batch.scaled(LatentScale(scale=0.18215)), or scale=1.0 for latents stored as the model takes them; "
                    'or write the store with it: encoders={"vae": {"scaling_factor": 0.18215}}'
                ) from error
        return self._found[device]

    def _of_family(self, vae: Json) -> Mapping[str, Json]:
        """Return the VAE's record as the pipeline scales latents by it, whose captions the stores have."""
        if not isinstance(vae, dict):
            raise TypeError(f"a {type(vae).__name__}")
        if vae.get("shift_factor") and vae.get("latents_mean"):
            raise ValueError("both shift_factor and latents_mean")
        text = self.encoders.get("text_encoder")
        if not isinstance(text, dict) or "family" not in text:
            return vae
        # by name: families type their batches, and their files take longer to import than a first batch
        family = imported("bucketline.families.registry:family_named")(text["family"])
        return vae if family is None else family.scaling(vae)


def _usable(vae: Mapping[str, Json], device: torch.device) -> LatentScale:
    scale = LatentScale.of(vae, device)
    on_host = LatentScale.of(vae, torch.device("cpu"))
    for each in (on_host.scale, on_host.shift):
        if not torch.as_tensor(each).isfinite().all():
            raise ValueError("a number that is not finite")
    if not torch.as_tensor(on_host.scale).all():
        raise ValueError("a factor of 0")
    return scale


def noise_like(latents: Tensor, kind: LatentKind, keys: Tensor, purpose: Purpose = Purpose.NOISE) -> Tensor:
    """Return normal noise by the keys, [B], of the shape of latents, [B, C, h, w] float32, or of those drawn from moments."""
    channels, *axes = latents.shape[1:]
    return normal(keys, purpose, shape=(channels // 2 if kind is LatentKind.MOMENTS else channels, *axes))


def posterior_noise(latents: Tensor, kind: LatentKind, keys: Tensor) -> Tensor | None:
    """Return the noise that draws latents from stored moments; None if the store has latents."""
    return noise_like(latents, kind, keys, Purpose.POSTERIOR) if kind is LatentKind.MOMENTS else None


# ----------------------------------------------------------------------------------------------------------------------- batch

MAX_SHOWN_TENSORS = 18  # of a printed batch
LATENTS = "latents"  # the target's name when a batch's tensors are listed by name
COLUMN_PREFIX, BATCH_PRESENT_PREFIX, FIXED_PREFIX = "columns.", "present.", "text_fixed."  # and those of what is in a mapping
BATCH_RAGGED_PREFIX = "ragged."  # then NAME.columns.COLUMN, NAME.fixed.COLUMN, NAME.lengths, NAME.mask, NAME.present


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """A batch's entries of a ragged group: of its rows, or of the captions that were chosen. L: tokens of one (padded)."""

    columns: Mapping[str, Tensor]  # [B, L, …] as stored, by token column; zeros after an entry's own tokens
    lengths: Tensor  # [B] int32, tokens of an entry; 0 for a row without one
    mask: Tensor  # [B, L] bool, True for an entry's own tokens
    fixed: Mapping[str, Tensor] = field(default_factory=dict)  # [B, …] as stored, by fixed column; zeros without an entry
    present: Tensor | None = None  # [B] bool, rows that have an entry; only of an optional group


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's micro-batch of a step. `accumulation` of them, all of one bucket, make up the rank's share of the step.

    The tensors stay valid as long as any of them is held.
    """

    step: int  # optimizer step, from 0
    micro_step: int  # 0 to accumulation - 1
    epoch: int
    bucket: str  # `train/256x192`, height first
    columns: Mapping[str, Tensor]  # [B, …] as stored, by role: `target` and what else the loader was requested
    tokens: Tensor  # [B, L, D] as stored, or float16 if that is quantised; zeros after a caption's own tokens
    token_mask: Tensor  # [B, L] bool, True for a caption's own tokens
    original_size: Tensor  # [B, 2] int32, height and width of the source image in px
    crop: Tensor  # [B, 2] int32, top and left of the crop in the resized image in px (mirrored for a flipped row)
    target_size: Tensor  # [B, 2] int32, height and width of the bucket in px; 0 if it has none
    weight: Tensor  # [B] float32, 1, or 0 for a padding row
    keys: Tensor  # [B] int64, of (seed, step, position in the global batch); see `plan.rng`
    ids: Tensor  # [B, 16] uint8, digests of the samples' ids
    flipped: Tensor  # [B] bool, True if the columns are of the mirror image
    present: Mapping[str, Tensor] = field(default_factory=dict)  # [B] bool of each optional column: rows that have a value
    text_fixed: Mapping[str, Tensor] = field(default_factory=dict)  # per-caption values by column: [B, …]
    ragged: Mapping[str, RaggedBatch] = field(default_factory=dict)  # by name, of the groups that the loader was requested
    class_labels: Tensor | None = None  # [B] int64; only in a class-conditional store, where `tokens` holds the same numbers
    tokens_scale: Tensor | None = None  # [B, L, S]; only with `text="stored"` of a store whose `tokens` are quantised
    image_tokens: Tensor | None = None  # [B, L] bool, positions of images; only in a store whose text sees the images
    latent_kind: LatentKind = LatentKind.MODE
    recorded_scale: RecordedScale = field(default_factory=RecordedScale, repr=False)  # of the stores; see `scaled`

    def __post_init__(self) -> None:
        tensors = self.by_name().values()
        if len({tensor.device for tensor in tensors}) != 1:
            devices = sorted({str(tensor.device) for tensor in tensors})
            raise AssertionError(f"a batch of {self.bucket} has tensors on {devices}; they must share one device")
        # not len(tensor), which runs in Python
        if len(lengths := {tensor.shape[0] for tensor in tensors}) != 1:
            raise AssertionError(
                f"a batch of {self.bucket} has tensors of {sorted(lengths)} rows; all must have the same number"
            )

    def __repr__(self) -> str:
        about = f"{len(self.weight)} rows of {self.bucket} on {self.device}, epoch {self.epoch}, step {self.step}"
        rows = [
            f"  {name:<16} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            for name, tensor in self.by_name().items()
        ]
        more = [f"  and {len(rows) - MAX_SHOWN_TENSORS} more"] if len(rows) > MAX_SHOWN_TENSORS else []
        return "\n".join([f"Batch: {about}, micro-step {self.micro_step}", *rows[:MAX_SHOWN_TENSORS], *more])

    @property
    def latents(self) -> Tensor:
        """The target, `[B, C, h, w]` as stored (float16, bfloat16 or float32), unscaled; `[B, 2C, h, w]` if it is moments.

        A model is trained on `scaled()`.

        Raises:
            UsageError: if the loader was told to read other columns only.
        """
        if TARGET not in self.columns:
            raise UsageError(
                f"the batch has the columns {sorted(self.columns)}, no {TARGET}; request it in LoaderConfig.columns"
            )
        return self.columns[TARGET]

    @property
    def references(self) -> tuple[Tensor, ...]:
        """The images that the targets are made from, in order: `[B, C, h_i, w_i]` each, as stored, unscaled.

        All rows of a bucket have as many, of the same sizes. A model is given `scaled_references()`.
        """
        return tuple(self.columns[role] for role in references_of(self.columns))

    @property
    def mask(self) -> Tensor | None:
        """How much each position of the latent counts in the loss, `[B, h, w]` float32, 0 to 1; None if there is no mask.

        It is 1 in rows that lack an optional one.
        """
        if (mask := self.columns.get(MASK)) is None:
            return None
        shares = mask.float() / 255 if mask.dtype is torch.uint8 else mask.float()
        if (has := self.present.get(MASK)) is None:
            return shares
        return shares.where(has.reshape(-1, *(1 for _ in mask.shape[1:])), 1.0)

    def scaled_references(self, scale: LatentScale | None = None) -> tuple[Tensor, ...]:
        """Return the references as a model is given them, `[B, C, h_i, w_i]` float32: shifted and scaled, never drawn.

        Raises:
            UsageError: if the stores do not record how.
        """
        return tuple((scale or self.scale).apply(reference) for reference in self.references)

    def scaled(self, scale: LatentScale | None = None) -> Tensor:
        """Return the latents that a model is trained on, `[B, C, h, w]` float32 on the batch's device, as the trainer has them.

        They are shifted and scaled as the stores record it of their VAE. From moments, latents are drawn by `keys`: others in
        each epoch, and the same on any number of ranks and after a resume. `scale` is for a store that does not record it.

        Raises:
            UsageError: if the stores do not record it, or the loader was told to read other columns only.
        """
        return (scale or self.scale).apply(self.latents, posterior_noise(self.latents, self.latent_kind, self.keys))

    @property
    def scale(self) -> LatentScale:
        """How the stores' VAE scales latents, on the batch's device: `invert` undoes `scaled`, for the VAE's decoder.

        Raises:
            UsageError: if the stores do not record it.
        """
        return self.recorded_scale.on(self.device)

    @property
    def pooled(self) -> Tensor | None:
        """The captions' pooled embeddings, `[B, D']`; None if the store has none."""
        return self.text_fixed.get(POOLED)

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def tensors(self) -> Iterator[Tensor]:
        """Iterate over the tensors of the batch."""
        return iter(self.by_name().values())

    def by_name(self) -> dict[str, Tensor]:
        """Return the batch's tensors by field name; the target is `latents`, other entries of a mapping `columns.ROLE` etc."""
        tensors = {LATENTS if role == TARGET else COLUMN_PREFIX + role: tensor for role, tensor in self.columns.items()}
        for name in _TENSORS:
            tensors[name] = getattr(self, name)
        for name, tensor in self.present.items():
            tensors[BATCH_PRESENT_PREFIX + name] = tensor
        for name, tensor in self.text_fixed.items():
            tensors[FIXED_PREFIX + name] = tensor
        for name, group in self.ragged.items():
            tensors |= _ragged_by_name(BATCH_RAGGED_PREFIX + name, group)
        if self.class_labels is not None:
            tensors["class_labels"] = self.class_labels
        for name in ("tokens_scale", "image_tokens"):
            if (tensor := getattr(self, name)) is not None:
                tensors[name] = tensor
        return tensors

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch on a device, or this batch if it is there already. Frameworks expect this name."""
        if self.device == torch.device(device):
            return self
        moved = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.by_name().items()}
        return replace(self, **as_fields(moved))

    def dequantised(self) -> Batch:
        """Return the batch with quantised tokens as float16, computed on its device; this batch if they are not quantised."""
        if self.tokens_scale is None:
            return self
        return replace(self, tokens=dequantised(self.tokens, self.tokens_scale), tokens_scale=None)

    def numpy(self) -> dict[str, NDArray[Any]]:
        """Return `by_name` as numpy arrays over the same memory, which stay valid as long as any of them is held.

        Numpy has no bfloat16 or float8: such an array holds the bits in unsigned integers.

        Raises:
            UsageError: if the batch is not in host memory.
        """
        if self.device.type != "cpu":
            raise UsageError(f"a batch on {self.device} has no numpy arrays; make the loader with device=torch.device('cpu')")
        return {name: as_stored(tensor) for name, tensor in self.by_name().items()}


def with_seen_images(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a batch's fields with the captions' tokens joined to those that its text encoder gave for the rows' images.

    A row's own are left-aligned, `[B, L, D]`: those of its images, then its caption's or the empty caption's.
    L is the images' and the longer one of the others'. No length is read from the device.
    """
    ragged: dict[str, RaggedBatch] = fields["ragged"]
    images, empty = ragged.pop(SEEN_IMAGES), ragged.pop(SEEN_EMPTY)
    seen, captions = images.columns[TOKENS], fields["tokens"]
    num_rows, num_seen, width = seen.shape
    length = num_seen + max(captions.shape[1], empty.columns[TOKENS].shape[1])
    joined = seen.new_zeros((num_rows * length + 1, width))  # the last one takes the padding
    tokens = joined[:-1].view(num_rows, length, width)
    tokens[:, :num_seen] = seen
    first = torch.arange(num_rows, device=seen.device)[:, None] * length + images.lengths[:, None]
    ends = images.lengths
    for own, mask in ((captions, fields["token_mask"]), (empty.columns[TOKENS], empty.mask)):  # of a row, one has tokens
        place = first + torch.arange(own.shape[1], device=seen.device)
        joined.index_copy_(0, place.where(mask, num_rows * length).flatten(), own.flatten(0, 1))
        ends = ends + mask.sum(dim=1)
    image_tokens = seen.new_zeros((num_rows, length), dtype=torch.bool)
    image_tokens[:, :num_seen] = images.columns[IS_IMAGE] != 0
    token_mask = torch.arange(length, device=seen.device) < ends[:, None]
    return {**fields, "tokens": tokens, "token_mask": token_mask, "image_tokens": image_tokens}


_TENSORS = (
    *("tokens", "token_mask", "original_size", "crop", "target_size"),
    *("weight", "keys", "ids", "flipped"),
)


def checked_batch(values: Mapping[str, object]) -> Batch:
    """Return a batch of values whose form is known, with `latent_kind` and `recorded_scale`, without looking at each tensor."""
    batch = object.__new__(Batch)
    vars(batch).update(values)
    return batch


def as_fields(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch's fields from the tensors of `by_name`: those with a prefix are grouped under it."""
    batch_fields: dict[str, Any] = {"columns": {}, "present": {}, "text_fixed": {}}
    ragged: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        group, dot, rest = name.partition(".")
        if dot and group == "ragged":
            of_group, _, field_name = rest.partition(".")
            kind, dot, column = field_name.partition(".")
            entry = ragged.setdefault(of_group, {"columns": {}, "fixed": {}})
            if dot:
                entry[kind][column] = tensor
            else:
                entry[kind] = tensor
        elif dot:
            batch_fields[group][rest] = tensor
        elif name == LATENTS:
            batch_fields["columns"][TARGET] = tensor
        else:
            batch_fields[name] = tensor
    batch_fields["ragged"] = {name: RaggedBatch(**entry) for name, entry in ragged.items()}
    return batch_fields


def _ragged_by_name(prefix: str, group: RaggedBatch) -> dict[str, Tensor]:
    tensors = {f"{prefix}.columns.{name}": tensor for name, tensor in group.columns.items()}
    tensors |= {f"{prefix}.fixed.{name}": tensor for name, tensor in group.fixed.items()}
    tensors |= {f"{prefix}.lengths": group.lengths, f"{prefix}.mask": group.mask}
    return tensors if group.present is None else {**tensors, f"{prefix}.present": group.present}
