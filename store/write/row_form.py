"""The form of a writer's rows and captions: columns whose shapes depend on a bucket's axes, and checks of given arrays.

Shape letters: C latent channels, h and w the latent's height and width, T tokens of a caption.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import UsageError
from bucketline.forks import cached_property
from bucketline.option_value import expect, unlike
from bucketline.store.format.block import (
    DIGEST_BYTES,
    DTYPES,
    FLIPPED_SUFFIX,
    IMAGE_AXES,
    LATENT,
    MASK,
    PRESENT_PREFIX,
    RAGGED_PREFIX,
    REFERENCE_AXIS,
    REFERENCE_PREFIX,
    ROLE,
    TOKENS,
    TOKENS_SCALE,
    BlockSpec,
    Column,
    EntriesOf,
    flipped_role,
    reference_axes,
    reference_role,
    role_of,
    stored_name,
)
from bucketline.store.format.schema import (
    AXIS_NAME,
    GroupRules,
    RaggedEntry,
    SampleRecord,
    bucket_name,
    bucket_sizes,
    column_entries,
)
from bucketline.store.format.text import TEXT_GROUP, RaggedSpec, make_caption, quantised_caption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bucketline.store.format.schema import Schema
    from bucketline.store.format.text import Entry, TextSpec

    Arrays = Mapping[str, Any]  # column name → numpy array or torch tensor

# Bits of NaN and infinite values, as (mask, value): a value is one if its bits under the mask are all of `value`.
_NOT_FINITE: dict[str, tuple[Any, Any]] = {
    "F16": (np.uint16(0x7C00), np.uint16(0x7C00)),
    "BF16": (np.uint16(0x7F80), np.uint16(0x7F80)),
    "F8_E4M3": (np.uint8(0x7F), np.uint8(0x7F)),
    "F8_E5M2": (np.uint8(0x7C), np.uint8(0x7C)),
    "F8_E8M0": (np.uint8(0xFF), np.uint8(0xFF)),
    "F8_E4M3FNUZ": (np.uint8(0xFF), np.uint8(0x80)),
    "F8_E5M2FNUZ": (np.uint8(0xFF), np.uint8(0x80)),
}
# Names that torch and ml_dtypes have for the dtypes that numpy lacks.
_BITS = {
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}


def checked_arrays(item: str, columns: Sequence[tuple[str, str]], values: Arrays, finite: set[str]) -> dict[str, NDArray[Any]]:
    """Return the values of exactly these columns, (name, dtype) each, as arrays. Shapes are compared where they are stored."""
    if len(values) != len(columns) or not all(name in values for name, _ in columns):
        expected = sorted(name for name, _ in columns)
        raise UsageError(f"{item} has the columns {sorted(values)}, expected {expected}; give each of them, and no other")
    arrays = {}
    for name, dtype in columns:
        try:
            arrays[name] = as_array(values[name], dtype)
        except (ValueError, TypeError, RuntimeError) as error:
            raise UsageError(
                f"{item}: a column is not an array ({error}); give numpy arrays or tensors, and BF16 as its bits, uint16"
            ) from error
        if type(given := values[name]) is not np.ndarray and isinstance(given, np.ndarray) and np.ma.is_masked(given):
            raise UsageError(f"{item}: column {name!r} has masked values; give what is to be stored, such as its `filled(0)`")
        if arrays[name].dtype.kind in "OUS":
            raise unlike(f"{item}: column {name!r}", values[name], "an array of numbers; give a numpy array or a tensor")
        if name in finite and not is_finite(arrays[name], dtype):
            raise UsageError(
                f"{item}: column {name!r} is NaN or infinite, or beyond the range of {dtype}; "
                "leave the sample out, or store a wider dtype"
            )
    return arrays


def as_array(value: Any, dtype: str) -> NDArray[Any]:  # noqa: ANN401 - anything that numpy takes, or a tensor
    """Return a value as a numpy array; of a dtype that numpy lacks, from torch or ml_dtypes, its bits if it is `dtype`."""
    bits = DTYPES[dtype]
    if type(value) is np.ndarray and value.dtype == bits:
        return value
    if hasattr(value, "detach"):  # a torch tensor, so that torch is there
        value = value.detach().cpu().contiguous()
        if _BITS.get(str(value.dtype).removeprefix("torch.")) == dtype:
            value = value.view(getattr(sys.modules["torch"], bits.name))
    array: NDArray[Any] = np.asarray(value)
    if array.dtype == bits:
        return array
    return array.view(bits) if _BITS.get(array.dtype.name) == dtype else array


def dtype_of(value: Any) -> str | None:  # noqa: ANN401 - as `as_array`
    """Return the name of the dtype in which `as_array` takes a value unchanged; None if there is none."""
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    name = _BITS.get(str(dtype).removeprefix("torch."))
    if name is None and hasattr(value, "detach"):
        dtype = as_array(value, "U8").dtype
    own = (own for own, known in DTYPES.items() if known == dtype and own not in _BITS.values())
    return name or next(own, None)


def is_finite(values: NDArray[Any], dtype: str) -> bool:
    """Return False if a value is NaN or infinite. Short floats are compared as integers, which is several times faster."""
    bits = DTYPES[dtype]
    if values.dtype != bits:
        return True  # not what is stored: refused for its dtype
    if dtype in _NOT_FINITE:
        mask, value = _NOT_FINITE[dtype]
        return not np.count_nonzero((values.view(mask.dtype) & mask) == value)
    return values.dtype.kind not in "fc" or bool(np.isfinite(values).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedGroup(GroupRules):
    """A group of arrays whose first dimension differs from entry to entry: another encoder's tokens, audio, points.

    `columns` are its token columns: an entry has an array `[T, *shape]` of each, all of the same T, 0 or more. `fixed` are
    columns of which an entry has one array `[*shape]`. With `of="captions"` each caption has an entry, which is given with its
    embedding. With `of="rows"` each row has one; `stored_once` stores those that are equal once per shard, and rows may lack an
    `optional` one. An entry has no mirror image: a loader that flips refuses the group, unless `mirrored` is "same".
    """

    columns: Sequence[Column]
    fixed: Sequence[Column] = ()
    allow_nonfinite: bool = False  # whether NaN and infinite values are stored, not refused

    def __post_init__(self) -> None:
        try:
            self.check(self.spec(""))
        except ValueError as error:
            raise UsageError(str(error)) from error

    def spec(self, name: str) -> RaggedSpec:
        """Return the columns of the blocks of the group of this name."""
        return RaggedSpec(tokens=tuple(self.columns), fixed=tuple(self.fixed), group=RAGGED_PREFIX + name)

    def entry(self, name: str) -> RaggedEntry:
        """Return the group in the manifest's form."""
        spec = self.spec(name)
        return RaggedEntry(
            **{rule.name: getattr(self, rule.name) for rule in fields(GroupRules)} | {"of": EntriesOf(self.of)},
            header_bytes=spec.header_bytes,
            tokens=column_entries(spec.tokens),
            fixed=column_entries(spec.fixed),
        )


SPLITS = ("train", "val")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A dimension of a column that follows from an axis of its bucket, of which it has one value for every `step`.

    `first`: 1 if the first value stands for itself only, as in a video VAE that makes 21 of 81 frames with a step of 4.
    """

    name: str
    step: int = 1
    first: int = 0

    def length(self, size: int) -> int | None:
        """Return the dimension's length in a bucket where the axis has this size; None if it does not divide."""
        whole, rest = divmod(size - self.first, self.step)
        return None if rest or whole < 0 else self.first + whole

    def size(self, length: int) -> int:
        """Return the axis's size from the dimension's length; the inverse of `length`."""
        return self.first + (length - self.first) * self.step


@dataclass(frozen=True, slots=True, kw_only=True)
class RowColumn:
    """A column with one array per row.

    `role` is `target`, `mask`, `audio`, `control/NAME`, `reference/NAME` or `features/NAME`, each also with `/flipped`: that of
    the horizontally mirrored image. `shape` has a number for a fixed dimension. For one that differs from bucket to bucket it
    has an `Axis` or, where both have the same length, its name: `(4, Axis(name="height_px", step=8), …)`, `(128, "length")`.
    """

    role: str
    dtype: str  # a safetensors name, such as F16, U8, BF16, F8_E4M3
    shape: tuple[int | str | Axis, ...]
    optional: bool = False  # whether a row may lack it
    encoder: str | None = None  # the name in `encoders` of what made it
    allow_nonfinite: bool = False  # whether NaN and infinite values are stored, not refused

    def __post_init__(self) -> None:
        expect("a column's role", self.role, str, "a str, such as 'target'")
        if not ROLE.fullmatch(role_of(self.role)):
            raise UsageError(
                f"{self.role!r:.80} is not a column's role; expected target, mask, audio, control/NAME, reference/NAME or "
                "features/NAME, and /flipped after it for that of the mirror image"
            )
        if self.dtype not in DTYPES:
            known = next((name for name, own in DTYPES.items() if str(own) in f"{self.dtype!r:.80}"), None)
            meant = f": write {known!r}" if known else ""
            raise UsageError(
                f"column {self.role!r} has the dtype {self.dtype!r:.40}, expected one of {', '.join(DTYPES)}{meant}"
            )
        _check_shape(self.role, self.shape)
        for axis in self.axes:
            if not AXIS_NAME.fullmatch(axis.name) or axis.step < 1 or axis.first < 0:
                raise UsageError(
                    f"column {self.role!r} has the impossible axis {axis}; names are like height_px, a step is 1 or more"
                )

    @property
    def name(self) -> str:
        """The column's name in the blocks."""
        return stored_name(self.role)

    @property
    def dimensions(self) -> tuple[int | Axis, ...]:
        return tuple(Axis(name=length) if isinstance(length, str) else length for length in self.shape)

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.dimensions if isinstance(axis, Axis))

    def in_sizes(self, bucket: str, sizes: Mapping[str, int]) -> Column:
        """Return the column as a bucket of these sizes has it.

        Raises:
            UsageError: if an axis's size is not one that the column can have.
        """
        shape = []
        for axis in self.dimensions:
            length = axis.length(sizes[axis.name]) if isinstance(axis, Axis) else axis
            if length is None:
                assert isinstance(axis, Axis)
                raise UsageError(f"bucket {bucket}: expected a {axis.name} that is {_multiples(axis)}")
            shape.append(length)
        return Column(name=self.name, dtype=self.dtype, shape=tuple(shape))

    def in_bucket(self, bucket: str) -> Column:
        """Return the column as a bucket of images has it.

        Raises:
            UsageError: if it is not the name of a bucket of images, or its size is not one that the column can have.
        """
        return self.in_sizes(bucket, sizes_of(bucket, IMAGE_AXES))

    def sizes_of(self, shape: tuple[int, ...]) -> dict[str, int] | None:
        """Return the sizes of the axes that give the column this shape; None if none do."""
        if len(shape) != len(self.shape):
            return None
        return {
            axis.name: axis.size(length) for axis, length in zip(self.dimensions, shape, strict=True) if isinstance(axis, Axis)
        }


def _check_shape(role: str, shape: object) -> None:
    if not isinstance(shape, tuple | list) or not all(
        isinstance(one, str | Axis) or (type(one) is int and one >= 0) for one in shape
    ):
        raise UsageError(
            f"column {role!r} has the shape {shape!r:.80}, expected a tuple of numbers, axes and names of axes: write "
            "shape=(128, 'length'), or (768,) for 768 numbers per row"
        )


def LatentColumn(  # noqa: N802 - the class that it was
    *, channels: int, downscale: int = 8, dtype: str = "F16", name: str = LATENT
) -> RowColumn:
    """Return a column with one latent of an image per row, `[C, h, w]`: the bucket's height and width over `downscale`."""
    height, width = (Axis(name=axis, step=downscale) for axis in IMAGE_AXES)
    return RowColumn(role=role_of(name), dtype=dtype, shape=(channels, height, width))


def ReferenceColumn(  # noqa: N802 - as LatentColumn
    number: int, *, channels: int, downscale: int = 8, dtype: str = "F16", encoder: str | None = "vae"
) -> RowColumn:
    """Return a column with a sample's reference image, counted from 0, as a latent `[C, h, w]` of a size of its own.

    It is the mode of the VAE's posterior, and has C channels even where targets are moments of 2 C. A row without it has
    `[C, 0, 0]`, and need not name it.
    """
    height, width = (Axis(name=axis, step=downscale) for axis in reference_axes(number))
    return RowColumn(role=reference_role(number), dtype=dtype, shape=(channels, height, width), encoder=encoder)


def MaskColumn(*, downscale: int = 8) -> RowColumn:  # noqa: N802 - as LatentColumn
    """Return a column with a loss mask, `[h, w]` on the latent's grid; 255 counts in full."""
    height, width = (Axis(name=axis, step=downscale) for axis in IMAGE_AXES)
    return RowColumn(role=MASK, dtype="U8", shape=(height, width))


def with_flipped(columns: Sequence[RowColumn]) -> tuple[RowColumn, ...]:
    """Return columns, each followed by that of the mirror image."""
    return tuple(own for column in columns for own in (column, replace(column, role=flipped_role(column.role))))


@dataclass(frozen=True, kw_only=True)
class RowForm:
    """A writer's rows, captions and ragged entries: a schema, and the shapes of its columns by axis."""

    schema: Schema
    columns: tuple[RowColumn, ...]
    ragged: Mapping[str, RaggedGroup]  # by name
    empty: Mapping[str, Entry] = field(default_factory=dict)  # of the empty caption, by group

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes of all columns, in the order of a bucket's name."""
        return tuple(dict.fromkeys(axis.name for column in self.columns for axis in column.axes))

    @cached_property
    def _optional(self) -> frozenset[str]:
        return frozenset(column.name for column in self.columns if column.optional)

    @cached_property
    def _no_reference(self) -> dict[str, NDArray[Any]]:
        """Return the values of a row without references, by their columns' names."""
        own = (column for column in self.columns if column.role.startswith(REFERENCE_PREFIX) and not column.optional)
        return {
            column.name: np.empty([0 if isinstance(n, Axis) else n for n in column.dimensions], dtype=DTYPES[column.dtype])
            for column in own
            if column.axes and all(REFERENCE_AXIS.fullmatch(axis.name) for axis in column.axes)
        }

    def spec(self, bucket: str) -> BlockSpec:
        """Return the columns of a bucket's blocks."""
        sizes = sizes_of(bucket, self.axes)
        own = [column.in_sizes(bucket, sizes) for column in self.columns]
        return BlockSpec(bucket=bucket, columns=(*self.schema.common_columns, *own), axes=self.axes)

    def bucket(self, item: str, split: str, columns: Mapping[str, NDArray[Any]]) -> str:
        if split not in SPLITS:
            raise UsageError(_no_bucket(split, self.axes))
        sizes: dict[str, tuple[int, str]] = {}
        for column in self.columns:
            if column.name not in columns:
                continue
            shape = columns[column.name].shape
            if (own := column.sizes_of(shape)) is None:
                expected = ", ".join(axis.name if isinstance(axis, Axis) else str(axis) for axis in column.dimensions)
                raise UsageError(f"{item}: column {column.role!r} has the shape {list(shape)}, expected [{expected}]")
            for axis, size in own.items():
                before, other = sizes.setdefault(axis, (size, column.role))
                if before != size:
                    raise UsageError(
                        f"{item}: by the shape of column {column.role!r} its {axis} is {size}, by that of {other!r} {before}; "
                        "give both in one size"
                    )
        if missing := [axis for axis in self.axes if axis not in sizes]:
            raise UsageError(f"{item}: no column gives its {missing[0]}; name the bucket, as 'train/512x768'")
        return bucket_name(split, *(sizes[axis][0] for axis in self.axes))

    def values(self, item: str, given: Arrays) -> dict[str, NDArray[Any]]:
        """Return a row's arrays by their columns' names, without those that it lacks; roles are taken for names.

        References that are not given have sizes 0.
        """
        if type(given) is not dict:
            example = f"{{{self.columns[0].role!r}: array}}"
            expect(f"{item}: columns", given, Mapping, f"a mapping from roles to arrays, {example}")
        named = {stored_name(role): value for role, value in given.items()}
        named |= {name: empty for name, empty in self._no_reference.items() if name not in named}
        lacking = self._optional - named.keys()
        own = [column for column in self.columns if column.name not in lacking]
        for column in own:
            if column.optional and column.role.endswith(FLIPPED_SUFFIX):
                base = column.role.removesuffix(FLIPPED_SUFFIX)
                if stored_name(base) in lacking:
                    raise UsageError(f"{item} has the column {column.role!r} without {base!r}; give both or none")
            elif column.optional and stored_name(column.role + FLIPPED_SUFFIX) in lacking:
                raise UsageError(f"{item} has the column {column.role!r} without that of the mirror image; give both or none")
        finite = {column.name for column in own if not column.allow_nonfinite}
        return checked_arrays(item, [(column.name, column.dtype) for column in own], named, finite)

    def caption(self, item: str, text: str, given: Arrays, digest: bytes) -> dict[str, Entry]:
        """Return a caption's entries by group: `text`, its embedding, and those of ragged groups of captions.

        `digest` is the caption's own in this store, as `Schema.caption_digest` returns it.

        Where the text columns are quantised, `tokens` may be given as `[T, D]` F16 or F32 without scale.
        """
        if type(given) is not dict:
            spec = self.schema.groups[TEXT_GROUP].delivered
            example = ", ".join(f"{column.name!r}: array" for column in (*spec.tokens, *spec.fixed))
            expected = f"a mapping from names to arrays, {{{example}}}"
            expect(f"{item}: the embedding of caption {text!r:.80}", given, Mapping, expected)
        item = f"{item}, caption {text!r:.80}"
        of_captions = [name for name, group in self.ragged.items() if group.of == EntriesOf.CAPTIONS]
        embedding = {k: v for k, v in given.items() if k not in of_captions}
        entries = {TEXT_GROUP: self._entry(item, TEXT_GROUP, embedding, digest)}
        return entries | {RAGGED_PREFIX + name: self._ragged(item, name, given.get(name), digest) for name in of_captions}

    def row_entries(self, item: str, given: Mapping[str, Any]) -> dict[str, Entry | None]:
        """Return a row's entries of all groups of rows, None where it has none; `given` by name."""
        if not self.ragged and not given:
            return {}
        own = [name for name, group in self.ragged.items() if group.of == EntriesOf.ROWS]
        if strange := sorted(given.keys() - set(own)):
            where = "what belongs to a caption is given with it" if strange[0] in self.ragged else "leave it out"
            raise UsageError(f"{item} has the ragged group {strange[0]!r:.80}, the rows of the store have {own}; {where}")
        lacking = {name for name in own if self.ragged[name].optional and given.get(name) is None}
        return {
            RAGGED_PREFIX + name: None if name in lacking else self._ragged(item, name, given.get(name), None) for name in own
        }

    def _ragged(self, item: str, name: str, given: Any, digest: bytes | None) -> Entry:  # noqa: ANN401 - arrays, or one of them
        group, item = self.ragged[name], f"{item}, ragged group {name!r}"
        names = [column.name for column in (*group.columns, *group.fixed)]
        if given is None:
            raise UsageError(f"{item} is missing; give its arrays {names}")
        if not isinstance(given, Mapping):
            if len(names) > 1:
                raise UsageError(f"{item} has the columns {names}, got {type(given).__name__}; give an array for each by name")
            given = {names[0]: given}
        return self._entry(item, RAGGED_PREFIX + name, given, digest, allow_nonfinite=group.allow_nonfinite)

    def _entry(self, item: str, group: str, values: Arrays, digest: bytes | None, *, allow_nonfinite: bool = False) -> Entry:
        """Return an entry, checked against its group's columns; `digest`: None for one that is known by its content."""
        spec = self.schema.groups[group]
        is_whole = spec.is_quantised and TOKENS_SCALE not in values
        given = spec.delivered if is_whole else spec
        columns = [(column.name, column.dtype) for column in (*given.tokens, *given.fixed)]
        own = checked_arrays(item, columns, values, set() if allow_nonfinite else {*values})
        try:
            if is_whole and digest is not None:
                return quantised_caption(spec, digest, _to_quantise(spec, own[TOKENS]), own)
            return make_caption(spec, digest, own, own)
        except (ValueError, TypeError) as error:
            columns_of = "text columns" if group == TEXT_GROUP else "columns"
            raise UsageError(f"{item}: {error}; convert it, or write to a store whose {columns_of} it fits") from error

    def with_presence(self, spec: BlockSpec, values: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return a row's arrays with those of its optional columns that say whether it has them; zeros where it does not."""
        found = dict(values)
        for column in self.columns if self._optional else ():
            if column.optional:
                found[PRESENT_PREFIX + column.name] = np.array(column.name in values, dtype="u1")
                if column.name not in values:
                    own = spec.column(column.name)
                    found[column.name] = np.zeros(own.shape, dtype=own.numpy_dtype)
        return found


@functools.lru_cache(maxsize=4096)
def sizes_of(bucket: str, axes: tuple[str, ...]) -> dict[str, int]:
    """Return the sizes in a bucket's name by axis."""
    sizes = bucket_sizes(bucket, axes)
    if sizes is None:
        raise UsageError(_no_bucket(bucket, axes))
    return sizes


def _no_bucket(bucket: str, axes: tuple[str, ...]) -> str:
    expected = "height x width in px, as 'train/512x768'"
    if axes != IMAGE_AXES:
        expected = f"{' x '.join(axes)}, as {bucket_name('train', *[100] * len(axes))!r}"
    return f"{bucket!r:.200} is not a bucket; expected train or val, and {expected}"


def _multiples(axis: Axis) -> str:
    return f"{axis.first} more than a multiple of {axis.step}" if axis.first else f"a multiple of {axis.step}"


def new_record(sample_id: str, bucket: str, captions: tuple[str, ...] = (), axes: tuple[str, ...] = IMAGE_AXES) -> SampleRecord:
    """Return the record of an image of exactly its bucket's size, of unknown origin; `dataclasses.replace` changes the rest.

    Of a bucket whose `axes` have no height and width in px, the sizes are 0.

    >>> record = new_record("a.png", "val/64x96")
    >>> record.split, record.original_size, record.crop
    ('val', (64, 96), (0, 0, 64, 96))

    Raises:
        UsageError: if `bucket` is not the name of one.
    """
    sizes = sizes_of(bucket, axes)
    height, width = (sizes.get(axis, 0) for axis in IMAGE_AXES)
    return SampleRecord(
        id=sample_id,
        bucket=bucket,
        row=0,
        split=bucket.partition("/")[0],
        source=sample_id,
        source_bytes=0,
        source_mtime_ns=0,
        content=bytes(DIGEST_BYTES),
        original_size=(height, width),
        resized=(height, width),
        crop=(0, 0, height, width),
        crop_in_source=(0, 0, height, width),
        captions=captions,
        caption_rows=(),
    )


def _to_quantise(spec: TextSpec, tokens: NDArray[Any]) -> NDArray[np.float32]:
    if tokens.dtype not in (np.float16, np.float32) or tokens.shape[1:] != spec.tokens[0].shape or tokens.ndim != 2:
        raise ValueError(
            f"tokens to be quantised are F16 or F32 [T, {spec.tokens[0].shape[0]}], got {tokens.dtype} {list(tokens.shape)}"
        )
    return tokens.astype(np.float32)
