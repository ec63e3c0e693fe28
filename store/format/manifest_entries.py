"""The entries of a manifest: shards and their files, buckets and their columns, the columns of the captions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bucketline.errors import StoreError
from bucketline.store.format.block import CHECKSUM, ID, BlockSpec, Column, fixed_columns
from bucketline.store.format.columns import NAME, RAGGED_PREFIX, SAME, EntriesOf
from bucketline.store.format.text_block import DIGEST, STARTS, RaggedSpec, TextSpec, is_bucket
from bucketline.store.format.text_codec import refuse_strange_form
from bucketline.store.format.text_error import TextError  # noqa: TC001 - `decode` reads the annotations at run time

if TYPE_CHECKING:
    from collections.abc import Mapping

SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
SHARD_ID = re.compile(r"[0-9a-f]{32}")
COLUMN_SHARD_NAME = re.compile(rf"({SHARD_NAME.pattern})\.({SHARD_ID.pattern})")  # of an added column's files
BUCKET_NAME = re.compile(r"(train|val)/([1-9][0-9]{0,8}(?:x[1-9][0-9]{0,8}){0,7})")  # split/sizes of the axes
AXIS_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnEntry:
    """A column's dtype, as a safetensors name, and a row's shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisEntry:
    """One axis of a bucket: its name and size."""

    name: str  # such as `frames`, `height_px`, `width_px`, `length`
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRole:
    """A column's purpose, the encoder that made it, and whether rows may lack it."""

    role: str
    encoder: str | None  # the name of its provenance in `encoders`
    optional: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file's length and digest."""

    num_bytes: int
    digest: str  # XXH3, 128 bits, hexadecimal


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedEntry:
    """A shard's list of dropped rows; its file name contains `generation`."""

    generation: int
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEntry:
    """A shard's share of one bucket (or of the captions): rows, and the position of its blocks in the extents."""

    rows: int
    blocks: int
    first_block: int
    dropped: int

    @property
    def live(self) -> int:
        """Rows that are not dropped."""
        return self.rows - self.dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedTotals:
    """The tokens of a shard's entries of a ragged group: of all of them, and of the longest."""

    tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedColumn:
    """A column that was added to rows after they were written."""

    role: str
    buckets: dict[str, ColumnEntry]  # its form by bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnShardEntry:
    """The file with an added column's values of a shard's rows, and its extents."""

    shard_id: str  # 32 random hexadecimal digits, also stored in its files, and part of their names
    lmdb: FileEntry
    extents: FileEntry
    groups: dict[str, GroupEntry]  # by bucket name; as many rows as the shard has

    def __post_init__(self) -> None:
        if not SHARD_ID.fullmatch(self.shard_id):
            raise ValueError(f"{self.shard_id!r} is not a shard id")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """A sealed shard: its files and their contents."""

    name: str
    shard_id: str  # 32 random hexadecimal digits per shard, also stored in its files
    lmdb: FileEntry
    extents: FileEntry
    index: FileEntry
    dropped: DroppedEntry | None
    groups: dict[str, GroupEntry]  # by bucket name, `text`, and `ragged/NAME` where the shard has such entries
    samples: int  # rows of all buckets, including dropped ones
    record_bytes: int  # of the live rows' sample records
    caption_bytes: int  # of the caption embeddings
    max_tokens: int  # of the longest caption
    text_error: TextError | None = None  # of its captions that were quantised for it; None if not known
    ragged: dict[str, RaggedTotals] = field(default_factory=dict)  # by name, of the groups of which it has entries
    added: dict[str, ColumnShardEntry] = field(default_factory=dict)  # by column, of the added columns that its rows have
    line_checksums: bool = True  # whether its extents have the checksums of its file's lines

    def __post_init__(self) -> None:
        if not (COLUMN_SHARD_NAME if self.is_of_column else SHARD_NAME).fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not a shard name")
        if not SHARD_ID.fullmatch(self.shard_id):
            raise ValueError(f"{self.shard_id!r} is not a shard id")

    @property
    def is_of_column(self) -> bool:
        """True for what `column_shard` returns, which no manifest lists as a shard."""
        return self.name.endswith(f".{self.shard_id}")

    def column_shard(self, column: str) -> ShardEntry:
        """Return the file of an added column as a shard: of the same rows, without captions, records and index."""
        own = self.added[column]
        return ShardEntry(
            name=f"{self.name}.{own.shard_id}",
            shard_id=own.shard_id,
            lmdb=own.lmdb,
            extents=own.extents,
            index=own.extents,
            dropped=None,
            groups=own.groups,
            samples=self.samples,
            record_bytes=0,
            caption_bytes=0,
            max_tokens=0,
        )

    @property
    def data_bytes(self) -> int:
        """Bytes of its own file, and of those of added columns."""
        return self.lmdb.num_bytes + sum(own.lmdb.num_bytes for own in self.added.values())

    @property
    def live(self) -> dict[str, int]:
        """Live rows by bucket."""
        return {name: group.live for name, group in self.groups.items() if is_bucket(name)}

    @property
    def live_samples(self) -> int:
        """Live rows of all buckets."""
        return sum(self.live.values())


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
        if self.name != bucket_name(self.split, *sizes) or not BUCKET_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not the name of a bucket of {self.split}, {'x'.join(map(str, sizes))}")
        if len(set(names)) != len(names) or not all(map(AXIS_NAME.fullmatch, names)):
            raise ValueError(f"bucket {self.name} has axes of the names {names}")
        if self.spec().header_bytes != self.header_bytes:
            raise ValueError(f"header_bytes is {self.header_bytes}, its columns need {self.spec().header_bytes}")

    def spec(self) -> BlockSpec:
        columns = (Column(name=name, dtype=c.dtype, shape=c.shape) for name, c in self.columns.items())
        return BlockSpec(bucket=self.name, columns=tuple(columns), axes=tuple(axis.name for axis in self.axes))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEntry:
    """The caption columns: per token and per caption."""

    header_bytes: int
    tokens: dict[str, ColumnEntry]
    fixed: dict[str, ColumnEntry]

    def __post_init__(self) -> None:
        if not self.tokens or any(column.row_bytes == 0 for column in _columns(self.tokens)):
            raise ValueError("there is no token column, or one that holds nothing")
        if self.spec().is_quantised:
            refuse_strange_form(self.spec().tokens)
        if self.spec().header_bytes != self.header_bytes:
            raise ValueError(f"header_bytes is {self.header_bytes}, its columns need {self.spec().header_bytes}")

    def spec(self) -> TextSpec:
        return TextSpec(tokens=_columns(self.tokens), fixed=_columns(self.fixed))

    @property
    def without_error(self) -> TextEntry:
        """Return the columns that a writer of the store must have: all but the one that only an earlier version has."""
        return text_entry(self.spec().without_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedEntry:
    """A ragged group: what its entries belong to, and their columns."""

    of: EntriesOf
    stored_once: bool  # whether equal entries of rows are stored once per shard
    optional: bool  # whether rows may lack an entry
    mirrored: str | None  # `same` if the entry of a row is also that of its mirror image
    encoder: str | None  # the name of its provenance in `encoders`
    header_bytes: int
    tokens: dict[str, ColumnEntry]
    fixed: dict[str, ColumnEntry]

    def __post_init__(self) -> None:
        names = [*self.tokens, *self.fixed]
        strange = [name for name in names if not NAME.fullmatch(name) or name in (STARTS, CHECKSUM, DIGEST)]
        if strange or len(set(names)) != len(names):
            raise ValueError(f"a ragged group has columns of the names {names}")
        if not self.tokens or any(column.row_bytes == 0 for column in (*_columns(self.tokens), *_columns(self.fixed))):
            raise ValueError("a ragged group has no token column, or a column that holds nothing")
        if self.mirrored not in (None, SAME):
            raise ValueError(f"a ragged group has entries of mirror images that are {self.mirrored!r:.80}")
        if self.of is EntriesOf.CAPTIONS and (self.optional or not self.stored_once or self.mirrored):
            raise ValueError("a ragged group of captions is optional, not stored once, or says what a mirror image has")

    def spec(self, name: str) -> RaggedSpec:
        """Return the columns of the group of this name."""
        return RaggedSpec(tokens=_columns(self.tokens), fixed=_columns(self.fixed), group=RAGGED_PREFIX + name)


def bucket_name(split: str, *sizes: int) -> str:
    """Return a bucket's canonical name from the sizes of its axes: `train/256x192`, height first, or `train/750`."""
    return f"{split}/{'x'.join(map(str, sizes))}"


def bucket_sizes(name: str, axes: tuple[str, ...]) -> dict[str, int] | None:
    """Return the sizes in a bucket's name by axis; None if it is not the name of a bucket with these axes.

    >>> bucket_sizes("train/256x192", ("height_px", "width_px"))
    {'height_px': 256, 'width_px': 192}
    """
    match = BUCKET_NAME.fullmatch(name)
    sizes = match[2].split("x") if match else []
    return dict(zip(axes, map(int, sizes), strict=True)) if sizes and len(sizes) == len(axes) else None


def column_spec(bucket: str, axes: tuple[str, ...], name: str, form: ColumnEntry) -> BlockSpec:
    """Return the columns of the blocks of an added column in a bucket: its values, and the rows' ids and checksums."""
    own = Column(name=name, dtype=form.dtype, shape=form.shape)
    fixed = tuple(column for column in fixed_columns(1) if column.name in (CHECKSUM, ID))
    return BlockSpec(bucket=bucket, columns=(*fixed, own), axes=axes)


def _columns(entries: Mapping[str, ColumnEntry]) -> tuple[Column, ...]:
    return tuple(Column(name=name, dtype=entry.dtype, shape=entry.shape) for name, entry in entries.items())


def column_entries(columns: tuple[Column, ...]) -> dict[str, ColumnEntry]:
    """Return columns in the manifest's form."""
    return {column.name: ColumnEntry(dtype=column.dtype, shape=column.shape) for column in columns}


def bucket_entry(spec: BlockSpec) -> BucketEntry:
    """Return a bucket in the manifest's form.

    Raises:
        StoreError: if the spec's bucket name is not canonical.
    """
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


def text_entry(spec: TextSpec) -> TextEntry:
    """Return a store's text columns in the manifest's form."""
    return TextEntry(header_bytes=spec.header_bytes, tokens=column_entries(spec.tokens), fixed=column_entries(spec.fixed))
