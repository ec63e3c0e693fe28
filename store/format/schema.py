"""The schema of a store: the columns of its rows, captions and ragged entries, and what made them.

A writer makes one (`store.write`), a manifest is one with a list of shards, and readers and `store verify` take the columns of
all blocks from it. Its fields are those of the manifest's document.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar

import msgpack

from bucketline.errors import CorruptError, StoreError
from bucketline.forks import cached_property
from bucketline.store.format.block import (
    CHECKSUM,
    DIGEST_BYTES,
    FLIPPED,
    FLIPPED_SUFFIX,
    ID,
    IMAGE_AXES,
    IS_IMAGE,
    LATENT,
    NAME,
    PRESENT_PREFIX,
    RAGGED_PREFIX,
    REFERENCE_AXIS,
    ROLE,
    SAME,
    SEEN_EMPTY,
    SEEN_IMAGES,
    BlockSpec,
    Column,
    EntriesOf,
    caption_digest,
    checksum,
    fixed_columns,
    role_of,
    stored_name,
    text_bytes,
)
from bucketline.store.format.text import DIGEST, STARTS, TEXT_GROUP, RaggedSpec, TextSpec, refuse_strange_form
from bucketline.typed_json import Json, encode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


# split/sizes of the axes
BUCKET_NAME = re.compile(r"(train|val)/([1-9][0-9]{0,8}(?:x(?:0|[1-9][0-9]{0,8})){0,23})")
AXIS_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnEntry:
    """A column's dtype, as a safetensors name, and a row's shape."""

    IS_SHARED: ClassVar = True  # most are those of each bucket

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisEntry:
    """One axis of a bucket: its name and size."""

    IS_SHARED: ClassVar = True

    name: str  # such as `frames`, `height_px`, `width_px`, `length`
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRole:
    """A column's purpose, the encoder that made it, and whether rows may lack it."""

    role: str
    encoder: str | None  # the name of its provenance in `encoders`
    optional: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedColumn:
    """A column that was added to rows after they were written."""

    role: str
    buckets: dict[str, ColumnEntry]  # its form by bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketEntry:
    """A bucket: an exact size of every axis, a split, and the columns of its rows."""

    name: str
    axes: tuple[AxisEntry, ...]
    split: str
    header_bytes: int
    columns: dict[str, ColumnEntry]

    def __post_init__(self) -> None:
        sizes, names = [axis.size for axis in self.axes], [axis.name for axis in self.axes]
        if self.name != bucket_name(self.split, *sizes) or bucket_sizes(self.name, tuple(names)) is None:
            raise ValueError(f"{self.name!r} is not the name of a bucket of {self.split}, {'x'.join(map(str, sizes))}")
        if len(set(names)) != len(names) or not all(map(AXIS_NAME.fullmatch, names)):
            raise ValueError(f"bucket {self.name} has axes of the names {names}")

    def spec(self) -> BlockSpec:
        return BlockSpec(bucket=self.name, columns=_columns(self.columns), axes=tuple(axis.name for axis in self.axes))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEntry:
    """The caption columns: per token and per caption."""

    header_bytes: int
    tokens: dict[str, ColumnEntry]
    fixed: dict[str, ColumnEntry]

    def __post_init__(self) -> None:
        _check_names("the text", self.spec())
        if any(column.row_bytes == 0 for column in self.spec().tokens):
            raise ValueError("there is a token column that holds nothing")
        if self.spec().is_quantised:
            refuse_strange_form(self.spec().tokens)
        if self.spec().header_bytes != self.header_bytes:
            raise ValueError(f"header_bytes is {self.header_bytes}, its columns need {self.spec().header_bytes}")

    def spec(self) -> TextSpec:
        return TextSpec(tokens=_columns(self.tokens), fixed=_columns(self.fixed))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """The rules of a ragged group's entries, in a writer's description and in a manifest."""

    of: str = EntriesOf.ROWS
    stored_once: bool = True  # whether equal entries of rows are stored once per shard
    optional: bool = False  # whether rows may lack an entry
    mirrored: str | None = None  # `same` if the entry of a row is also that of its mirror image
    encoder: str | None = None  # the name of its provenance in `encoders`

    def check(self, spec: RaggedSpec) -> None:
        """Check the rules, and the group's columns."""
        if self.of not in set(EntriesOf):
            raise ValueError(f"a ragged group has entries of {self.of!r:.80}, expected of='captions' or of='rows'")
        if self.mirrored not in (None, SAME):
            raise ValueError(f"the mirrored of a ragged group is {self.mirrored!r:.80}, expected None or {SAME!r}")
        if self.of == EntriesOf.CAPTIONS and (self.optional or not self.stored_once or self.mirrored):
            raise ValueError(
                "a ragged group of captions has one entry for each caption, stored once, and flips do not concern it; leave "
                "optional, stored_once and mirrored out (an entry may have no tokens)"
            )
        _check_names("a ragged group", spec)
        columns = (*spec.tokens, *spec.fixed)
        if strange := [column.name for column in columns if not NAME.fullmatch(column.name)]:
            raise ValueError(f"a ragged group has the column {strange[0]!r:.80}; expected a name of a to z, 0 to 9 and _")
        if empty := [column.name for column in columns if column.row_bytes == 0]:
            raise ValueError(f"column {empty[0]!r} of a ragged group holds nothing; give it a shape without 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedEntry(GroupRules):
    """A ragged group: what its entries belong to, and their columns."""

    of: EntriesOf
    header_bytes: int
    tokens: dict[str, ColumnEntry]
    fixed: dict[str, ColumnEntry]

    def __post_init__(self) -> None:
        self.check(self.spec(""))

    def spec(self, name: str) -> RaggedSpec:
        """Return the columns of the group of this name."""
        return RaggedSpec(
            tokens=_columns(self.tokens),
            fixed=_columns(self.fixed),
            group=RAGGED_PREFIX + name,
            of=self.of,
            stored_once=self.stored_once,
            optional=self.optional,
        )


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The columns of a store's rows, captions and ragged entries, and their provenance."""

    max_captions: int  # V
    encoders: dict[str, Json]  # provenance: what produced the columns (class, config and weights hash, dtype, scaling …)
    rules: dict[str, Json]  # provenance: grid, resampling, crop, split
    text: TextEntry
    columns: dict[str, ColumnRole] = field(default_factory=dict)  # by name; empty where there are only images' latents
    ragged: dict[str, RaggedEntry] = field(default_factory=dict)  # by name
    buckets: tuple[BucketEntry, ...] = ()  # of rows that were written
    added: dict[str, AddedColumn] = field(default_factory=dict)  # by name: columns in files of their own

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            if column.role != role_of(name) or not ROLE.fullmatch(column.role):
                raise ValueError(f"column {name!r:.80} has the role {column.role!r:.80}")
            self._check_encoder(f"column {column.role!r}", column.encoder)
            base = self.columns.get(stored_name(column.role.removesuffix(FLIPPED_SUFFIX)))
            if base is None or base.optional != column.optional:
                raise ValueError(f"column {name!r} has no counterpart that is optional like itself")
        for name, group in self.ragged.items():
            if not NAME.fullmatch(name) or name == TEXT_GROUP:
                raise ValueError(
                    f"{name!r:.80} is not the name of a ragged group; expected a to z, 0 to 9 and _, not {TEXT_GROUP!r}"
                )
            self._check_encoder(f"ragged group {name!r}", group.encoder)
            if (expected := self.groups[RAGGED_PREFIX + name].header_bytes) != group.header_bytes:
                raise ValueError(f"header_bytes of {name} is {group.header_bytes}, expected {expected}")
        if self.sees_images:
            self._check_seen()
        if len(self.specs) != len(self.buckets):
            raise ValueError("a bucket is listed twice")
        common = column_entries(self.common_columns)
        for bucket in self.buckets:
            self._check_bucket(bucket, common)
        self._check_added()

    @property
    def sees_images(self) -> bool:
        """Return True if the captions' states depend on the sample's images, whose own states are a ragged group."""
        return SEEN_IMAGES in self.ragged and SEEN_EMPTY in self.ragged

    def caption_digest(self, text: str, sample: bytes) -> bytes:
        """Return the digest by which a shard has a caption of the sample whose id has the digest `sample`.

        Of a store that sees images it is also of the sample. That of the empty caption is the same everywhere.
        """
        return caption_digest(text, sample if self.sees_images and text else b"")

    def _check_seen(self) -> None:
        """Check that the groups of a store that sees images are what is joined with the captions' delivered tokens."""
        tokens = self.groups[TEXT_GROUP].delivered.tokens
        is_image = Column(name=IS_IMAGE, dtype="U8", shape=())
        for name, expected in ((SEEN_IMAGES, (is_image, *tokens)), (SEEN_EMPTY, tokens)):
            group, spec = self.ragged[name], self.groups[RAGGED_PREFIX + name]
            rules = (group.of, group.stored_once, group.optional)
            if spec.tokens != expected or spec.fixed or rules != (EntriesOf.ROWS, True, False):
                columns = [f"{c.name} {c.dtype} {list(c.shape)}" for c in expected]
                raise ValueError(
                    f"ragged group {name!r} is of a store whose text sees the images; expected an entry of each row, stored "
                    f"once, not optional, with the columns {', '.join(columns)}"
                )

    def _check_encoder(self, what: str, encoder: str | None) -> None:
        if encoder is not None and encoder not in self.encoders:
            raise ValueError(
                f"{what} names the encoder {encoder!r:.80}, encoders has {sorted(self.encoders)}; add it there, or leave it out"
            )

    @cached_property
    def common_columns(self) -> tuple[Column, ...]:
        """Return the columns that all rows have in addition to those of roles."""
        present = (Column(name=PRESENT_PREFIX + name, dtype="U8", shape=()) for name, c in self.columns.items() if c.optional)
        of_rows = (name for name, group in self.ragged.items() if group.of is EntriesOf.ROWS)
        numbers = (Column(name=RAGGED_PREFIX + name, dtype="I32", shape=()) for name in of_rows)
        return (*fixed_columns(self.max_captions), *present, *numbers)

    def _check_bucket(self, bucket: BucketEntry, common: Mapping[str, ColumnEntry]) -> None:
        """Check that a bucket's rows have exactly the columns of this schema, and mirror images the form of their images."""
        spec = self.specs[bucket.name]
        if not self.columns and spec.axes != IMAGE_AXES:
            raise ValueError(f"bucket {bucket.name} is not one of images")
        if spec.header_bytes != bucket.header_bytes:
            raise ValueError(f"header_bytes of {bucket.name} is {bucket.header_bytes}, its columns need {spec.header_bytes}")
        roles = self.columns.keys() or {LATENT, FLIPPED} & bucket.columns.keys()
        is_same = bucket.columns.keys() == {*roles, *common} and common.items() <= bucket.columns.items()
        for name in () if is_same else sorted({*roles, *common, *bucket.columns}):
            if name not in bucket.columns:
                raise ValueError(f"bucket {bucket.name} lacks the column {name!r:.80}")
            if name not in common and name not in roles:
                raise ValueError(f"bucket {bucket.name} has the column {name!r:.80}, which has no role")
            if common.get(name, bucket.columns[name]) != bucket.columns[name]:
                raise ValueError(f"bucket {bucket.name} has the column {name!r} in another form")
        for name in roles:
            base = stored_name(role_of(name).removesuffix(FLIPPED_SUFFIX))
            if bucket.columns.get(base) not in (None, bucket.columns[name]):
                raise ValueError(f"bucket {bucket.name} has the column {name!r} in another form than {base!r}")

    def _check_added(self) -> None:
        forms = {bucket.name: bucket.columns for bucket in self.buckets}
        for name, column in self.added.items():
            if column.role != role_of(name) or not ROLE.fullmatch(column.role) or any(name in own for own in forms.values()):
                raise ValueError(f"the added column {name!r:.80} has the role {column.role!r:.80}, or the rows have it already")
            base = stored_name(column.role.removesuffix(FLIPPED_SUFFIX))
            others = self.added[base].buckets if base in self.added else {}
            for bucket, form in column.buckets.items():
                if bucket not in forms or (base != name and form not in (forms[bucket].get(base), others.get(bucket))):
                    raise ValueError(
                        f"the added column {name!r} has no bucket {bucket!r:.80}, or another form than {base!r} there"
                    )

    @cached_property
    def specs(self) -> dict[str, BlockSpec]:
        """Return the columns of the rows' blocks, by bucket."""
        return {bucket.name: bucket.spec() for bucket in self.buckets}

    @cached_property
    def groups(self) -> dict[str, RaggedSpec]:
        """Return the columns of the blocks of captions, `text`, and of ragged entries, `ragged/NAME`."""
        return {TEXT_GROUP: self.text.spec(), **{RAGGED_PREFIX + name: group.spec(name) for name, group in self.ragged.items()}}

    @cached_property
    def added_specs(self) -> dict[str, dict[str, BlockSpec]]:
        """Return the columns of the blocks of each added column, by its name and bucket: its value, checksum and id."""
        axes = {name: spec.axes for name, spec in self.specs.items()}
        return {
            name: {bucket: column_spec(bucket, axes[bucket], name, form) for bucket, form in column.buckets.items()}
            for name, column in self.added.items()
        }

    def settings(self) -> dict[str, Json]:
        """Return as JSON what is fixed when a store is created, and what rows must share to be in one store."""
        fixed = ("encoders", "rules", "max_captions", "columns", "ragged", "text")
        return {name: encode(getattr(self, name)) for name in fixed}


def bucket_name(split: str, *sizes: int) -> str:
    """Return a bucket's canonical name from the sizes of its axes: `train/256x192`, height first, or `train/750`."""
    return f"{split}/{'x'.join(map(str, sizes))}"


def bucket_sizes(name: str, axes: tuple[str, ...]) -> dict[str, int] | None:
    """Return the sizes in a bucket's name by axis; None if it is not the name of a bucket with these axes.

    Only a reference's sizes may be 0: the bucket's rows then lack it.

    >>> bucket_sizes("train/256x192", ("height_px", "width_px"))
    {'height_px': 256, 'width_px': 192}
    """
    match = BUCKET_NAME.fullmatch(name)
    sizes = match[2].split("x") if match else []
    found = dict(zip(axes, map(int, sizes), strict=True)) if sizes and len(sizes) == len(axes) else {}
    is_whole = bool(found) and all(size or REFERENCE_AXIS.fullmatch(axis) for axis, size in found.items())
    return found if is_whole else None


def column_spec(bucket: str, axes: tuple[str, ...], name: str, form: ColumnEntry) -> BlockSpec:
    """Return the columns of the blocks of an added column in a bucket: its values, and the rows' ids and checksums."""
    own = Column(name=name, dtype=form.dtype, shape=form.shape)
    fixed = tuple(column for column in fixed_columns(1) if column.name in (CHECKSUM, ID))
    return BlockSpec(bucket=bucket, columns=(*fixed, own), axes=axes)


def _columns(entries: Mapping[str, ColumnEntry]) -> tuple[Column, ...]:
    return tuple(_column(name, entry.dtype, entry.shape) for name, entry in entries.items())


@functools.lru_cache(maxsize=1 << 12)
def _column(name: str, dtype: str, shape: tuple[int, ...]) -> Column:
    """Return a column. Each bucket has a few of its own, and the others of all."""
    return Column(name=name, dtype=dtype, shape=shape)


def column_entries(columns: tuple[Column, ...]) -> dict[str, ColumnEntry]:
    return {column.name: ColumnEntry(dtype=column.dtype, shape=column.shape) for column in columns}


def bucket_entry(spec: BlockSpec) -> BucketEntry:
    sizes = bucket_sizes(spec.bucket, spec.axes)
    if sizes is None:
        raise StoreError(f"{spec.bucket!r} is not a bucket name; expected something like 'train/256x192'")
    return BucketEntry(
        name=spec.bucket,
        axes=tuple(AxisEntry(name=name, size=size) for name, size in sizes.items()),
        split=spec.bucket.partition("/")[0],
        header_bytes=spec.header_bytes,
        columns=column_entries(spec.columns),
    )


def _check_names(what: str, spec: RaggedSpec) -> None:
    """Check that each column of a group has a name of its own, which no other tensor of its blocks has."""
    names = [column.name for column in (*spec.tokens, *spec.fixed)]
    if not spec.tokens or len(set(names)) != len(names) or {STARTS, CHECKSUM, DIGEST} & set(names):
        raise ValueError(
            f"{what} has the columns {names}; expected one token column or more, each name once, and none of {STARTS}, "
            f"{CHECKSUM}, {DIGEST}"
        )


def text_entry(spec: TextSpec) -> TextEntry:
    """Return a store's text columns in the manifest's form."""
    _check_names("the text", spec)
    return TextEntry(header_bytes=spec.header_bytes, tokens=column_entries(spec.tokens), fixed=column_entries(spec.fixed))


# --------------------------------------------------------------------------------------------------------------- sample record
# Sample records: a sample's metadata outside its columns, as msgpack keyed by the digest of its id; the share a crop keeps.

MAX_RECORD_BYTES = 1 << 26
MAX_MTIME_NS = (1 << 63) - 1  # the limit of the index's I64: 11 April 2262
MAX_RESIZED_PX = (1 << 31) - 1  # per side; crop offsets are smaller, and the column `crop` is an I32
UNKNOWN_BOX = (-1, -1, -1, -1)  # `crop_in_source` of an image whose crop is unknown; its `crop` begins at -1, -1
_MAX_SOURCE_BYTES = (1 << 64) - 1  # the limit of the index's U64


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """One sample: its id, location and provenance. Sizes and boxes are height first, in pixels."""

    id: str
    bucket: str
    row: int  # in its shard's bucket
    split: str
    source: str  # path or key in the source
    source_bytes: int
    source_mtime_ns: int
    content: bytes  # 16 bytes, the digest of the source's bytes
    original_size: tuple[int, int]  # upright
    resized: tuple[int, int]
    crop: tuple[int, int, int, int]  # top, left, height, width in the resized image; top and left are -1 if unknown
    crop_in_source: tuple[int, int, int, int]  # the same box in the upright source image, rounded outwards; or UNKNOWN_BOX
    captions: tuple[str, ...]
    caption_rows: tuple[int, ...]  # in this shard; the first ones are the row's `captions`
    # of each caption that a text encoder did not see to its end: the encoder, its tokens, the limit, what was cut off
    cuts: tuple[tuple[str, int, int, str], ...] = ()

    @property
    def text_bytes(self) -> int:
        """Size of the record's texts, its only unbounded part."""
        return sum(len(text_bytes(text)) for text in (self.id, self.source, *self.captions))


_NAMES = tuple(field.name for field in fields(SampleRecord))
_VALUES = attrgetter(*_NAMES)


def storable_mtime_ns(mtime_ns: int) -> int:
    """Return an mtime clamped to a record's range, 1970 to 2262."""
    return min(max(0, mtime_ns), MAX_MTIME_NS)


def refuse_unsealable(record: SampleRecord) -> None:
    """Check that the index can hold a record's values: once it is committed, its shard could not be sealed."""
    for name, largest in (("source_mtime_ns", MAX_MTIME_NS), ("source_bytes", _MAX_SOURCE_BYTES)):
        if not 0 <= (value := getattr(record, name)) <= largest:
            raise StoreError(f"sample {record.id!r:.200} has the {name} {value}, expected 0 to {largest}")
    if len(record.content) != DIGEST_BYTES:
        raise StoreError(
            f"sample {record.id!r:.200} has a content digest of {len(record.content)} bytes, expected {DIGEST_BYTES}"
        )


def encode_record(record: SampleRecord, **changes: int | tuple[int, ...]) -> bytes:
    """Return the serialised bytes of a record, with `changes` in place of some fields."""
    values = dict(zip(_NAMES, _VALUES(record), strict=True))  # `asdict` copies each value, which takes ten times as long
    values |= changes
    if not record.cuts:
        del values["cuts"]
    packed: bytes = msgpack.packb(values, use_bin_type=True, unicode_errors="surrogateescape")
    return packed


def decode_record(data: bytes | memoryview, item: str) -> SampleRecord:
    try:
        if len(data) > MAX_RECORD_BYTES:
            raise ValueError(f"{len(data)} bytes are too many")
        record = SampleRecord(**msgpack.unpackb(data, use_list=False, unicode_errors="surrogateescape", strict_map_key=True))
        _check_types(record)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise CorruptError(f"{item}: its sample record is damaged ({error!r:.200})") from error
    return record


def _check_types(record: SampleRecord) -> None:
    sizes, boxes = (record.original_size, record.resized), (record.crop, record.crop_in_source)
    if {*map(type, (*sizes, *boxes, record.captions, record.caption_rows, record.cuts, *record.cuts))} != {tuple}:
        raise TypeError("a size, a box, the captions, their rows or the cuts are not a list")
    texts = (record.id, record.bucket, record.split, record.source, *record.captions)
    numbers = (record.row, record.source_bytes, record.source_mtime_ns, *sizes[0], *sizes[1], *boxes[0], *boxes[1])
    if {*map(type, texts)} != {str} or {*map(type, (*numbers, *record.caption_rows))} != {int}:
        raise TypeError("a field has the wrong type")
    if any([*map(type, cut)] != [str, int, int, str] for cut in record.cuts):
        raise TypeError("a cut caption is not described by an encoder, two numbers and a text")
    if [*map(len, sizes), *map(len, boxes)] != [2, 2, 4, 4] or type(record.content) is not bytes:
        raise TypeError("a size, a box or the content's digest has the wrong form")
    if not 0 <= record.source_mtime_ns <= MAX_MTIME_NS:
        raise ValueError(f"source_mtime_ns is {record.source_mtime_ns}")


def captions_checksum(captions: tuple[str, ...]) -> int:
    """Return the checksum of a sample's captions; the index stores it so that changed captions are detected."""
    return checksum(*(len(text).to_bytes(8, "little") + text for text in map(text_bytes, captions)))


def kept_share(height_px: int, width_px: int, source_height_px: int, source_width_px: int) -> tuple[int, int]:
    """Return the share of an image that is kept if it is resized to cover a size and cropped to it, as a fraction.

    >>> kept_share(64, 64, 90, 120)
    (5760, 7680)
    """
    across, down = width_px * source_height_px, height_px * source_width_px
    return (across, down) if across <= down else (down, across)


def box_in_source(crop: Sequence[int], resized: Sequence[int], source: Sequence[int]) -> tuple[int, int, int, int]:
    """Return a crop (top, left, height, width) of a resized image in its source, rounded outwards to whole pixels."""
    top, bottom = _outwards(crop[0], crop[2], source[0], resized[0])
    left, right = _outwards(crop[1], crop[3], source[1], resized[1])
    return top, left, bottom - top, right - left


def cropped_away(record: SampleRecord) -> float | None:
    """Return the share of the source image that a sample's crop removed, 0 to 1; None if it is unknown.

    It is that of the crop before rounding, unless another program recorded a box in the source that is not that of its crop.
    """
    source, resized, box = record.original_size, record.resized, record.crop_in_source
    if box == UNKNOWN_BOX or min(*source, *resized) <= 0:
        return None
    _, _, height, width = record.crop
    kept, whole = box[2] * box[3], source[0] * source[1]
    if box == box_in_source(record.crop, resized, source):
        is_covering = height == resized[0] or width == resized[1]
        kept, whole = kept_share(height, width, *source) if is_covering else (height * width, resized[0] * resized[1])
    return max(0.0, 1.0 - kept / whole)


def _outwards(begin: int, length: int, source: int, resized: int) -> tuple[int, int]:
    return begin * source // resized, min(source, -(-(begin + length) * source // resized))
