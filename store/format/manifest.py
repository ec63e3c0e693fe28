"""The manifest: a JSON document that lists a generation's shards, with the digest of every file.

`manifest.json` is the newest generation; `generations/N.json` keeps each one, so that readers stay on theirs.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bucketline.errors import CorruptError, FingerprintError, StoreError
from bucketline.files.atomic_write import write_or_explain
from bucketline.files.paths import why_no_store
from bucketline.files.regular_file import read_regular
from bucketline.forks import cached_property
from bucketline.store.format.block import IMAGE_AXES, BlockSpec, Column, fixed_columns
from bucketline.store.format.columns import FLIPPED_SUFFIX, PRESENT_PREFIX, ROLE, role_of, stored_name
from bucketline.store.format.hashing import bytes_digest
from bucketline.store.format.manifest_versions import (
    COLUMNS_VERSION,
    COMPACT_VERSION,
    from_version,
    to_version,
)
from bucketline.store.format.quantised_text import TextError, refuse_strange_form
from bucketline.store.format.safetensors_header import MAX_HEADER_BYTES
from bucketline.store.format.text_block import TEXT_GROUP, TextSpec
from bucketline.typed_json import Json, TypedJsonError, decode, encode, first_difference, is_given

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 28
MAX_SHARD_BYTES = 1 << 44  # a few GiB is usual
EXTENT_BYTES = 4 * 8  # per block: offset, length, first row, rows
SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
SHARD_ID = re.compile(r"[0-9a-f]{32}")
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
class ShardEntry:
    """A sealed shard: its files and their contents."""

    name: str
    shard_id: str  # 32 random hexadecimal digits per shard, also stored in its files
    lmdb: FileEntry
    extents: FileEntry
    index: FileEntry
    dropped: DroppedEntry | None
    groups: dict[str, GroupEntry]  # by bucket name, and `text`
    samples: int  # rows of all buckets, including dropped ones
    record_bytes: int  # of the live rows' sample records
    caption_bytes: int  # of the caption embeddings
    max_tokens: int  # of the longest caption
    text_error: TextError | None = None  # of its captions' tokens; only where they are quantised, and only in version 3

    def __post_init__(self) -> None:
        if not SHARD_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not a shard name")
        if not SHARD_ID.fullmatch(self.shard_id):
            raise ValueError(f"{self.shard_id!r} is not a shard id")

    @property
    def live(self) -> dict[str, int]:
        """Live rows by bucket."""
        return {name: group.live for name, group in self.groups.items() if name != TEXT_GROUP}

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
            refuse_strange_form(self.spec().tokens, self.spec().fixed)
        if self.spec().header_bytes != self.header_bytes:
            raise ValueError(f"header_bytes is {self.header_bytes}, its columns need {self.spec().header_bytes}")

    def spec(self) -> TextSpec:
        return TextSpec(tokens=_columns(self.tokens), fixed=_columns(self.fixed))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One generation of a store."""

    format_version: int
    store_id: str  # random, created once with the store
    generation: int
    engine: str  # the LMDB data format of the shards
    page_bytes: int
    max_captions: int  # V
    encoders: dict[str, Json]  # provenance: what produced the columns (class, config and weights hash, dtype, scaling …)
    rules: dict[str, Json]  # provenance: grid, resampling, crop, split
    text: TextEntry
    columns: dict[str, ColumnRole]  # by name; empty where there are only images' latents, as before version 3
    buckets: tuple[BucketEntry, ...]
    shards: tuple[ShardEntry, ...]
    retired: tuple[str, ...]  # shards of an earlier generation that this one no longer lists; their files may still exist
    digest: str  # of this document with an empty digest

    def __post_init__(self) -> None:
        names = {bucket.name for bucket in self.buckets}
        listed = {shard.name for shard in self.shards}
        if len(names) != len(self.buckets) or len(listed) != len(self.shards):
            raise ValueError("a bucket or a shard is listed twice")
        is_quantised = self.text.spec().is_quantised
        if is_quantised and self.format_version < COLUMNS_VERSION:
            raise ValueError(f"its text is quantised, which version {self.format_version} does not know")
        if any((shard.text_error is not None) != is_quantised for shard in self.shards):
            raise ValueError("a shard has an error of quantised text but no such text, or the text without the error")
        for name in self.retired:
            if name in listed or not SHARD_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a retired shard")
        for shard in self.shards:
            self._check_shard(shard, names)
        for bucket in self.buckets:
            for column in fixed_columns(self.max_captions):
                entry = bucket.columns.get(column.name)
                if entry is None or (entry.dtype, entry.shape) != (column.dtype, column.shape):
                    raise ValueError(f"bucket {bucket.name} lacks the column {column.name!r} or has it in another form")
        self._check_columns()

    def _check_columns(self) -> None:
        """Check the columns' roles, and that every bucket has exactly these columns."""
        if self.columns and self.format_version < COLUMNS_VERSION:
            raise ValueError(f"it has columns with roles, which version {self.format_version} does not know")
        if not self.columns:
            if other := [bucket.name for bucket in self.buckets if bucket.spec().axes != IMAGE_AXES]:
                raise ValueError(f"bucket {other[0]} is not one of images")
            return
        for name, column in self.columns.items():
            if column.role != role_of(name) or not ROLE.fullmatch(column.role):
                raise ValueError(f"column {name!r:.80} has the role {column.role!r:.80}")
            if column.encoder is not None and column.encoder not in self.encoders:
                raise ValueError(f"column {name!r} names the encoder {column.encoder!r:.80}, which is not described")
            if column.role.endswith(FLIPPED_SUFFIX):
                base = self.columns.get(stored_name(column.role.removesuffix(FLIPPED_SUFFIX)))
                if base is None or base.optional != column.optional:
                    raise ValueError(f"column {name!r} has no counterpart that is optional like itself")
        own = {
            *self.columns,
            *(PRESENT_PREFIX + name for name, column in self.columns.items() if column.optional),
            *(column.name for column in fixed_columns(self.max_captions)),
        }
        for bucket in self.buckets:
            if other := sorted(own ^ set(bucket.columns)):
                raise ValueError(f"bucket {bucket.name} lacks the column {other[0]!r:.80}, or has it and should not")
            for name, entry in bucket.columns.items():
                if name.startswith(PRESENT_PREFIX) and (entry.dtype, entry.shape) != ("U8", ()):
                    raise ValueError(f"bucket {bucket.name} has the column {name!r} in another form")

    def _check_shard(self, shard: ShardEntry, buckets: set[str]) -> None:
        """Check a shard's numbers against its file lengths, so that no later read exceeds them."""
        if unknown := set(shard.groups) - buckets - {TEXT_GROUP}:
            raise ValueError(f"shard {shard.name} holds rows of {min(unknown)!r}, which is not listed as a bucket")
        if TEXT_GROUP not in shard.groups:
            raise ValueError(f"shard {shard.name} has no captions, not even the empty one")
        # a sidecar entry is shorter than the block, row or caption that it describes
        sidecars = [shard.extents.num_bytes, shard.index.num_bytes, *([shard.dropped.num_bytes] if shard.dropped else [])]
        largest = shard.lmdb.num_bytes + 2 * MAX_HEADER_BYTES
        if shard.lmdb.num_bytes >= MAX_SHARD_BYTES or not all(0 < num_bytes <= largest for num_bytes in sidecars):
            raise ValueError(f"shard {shard.name} has files of impossible lengths")
        if any(group.dropped for group in shard.groups.values()) != (shard.dropped is not None):
            raise ValueError(f"shard {shard.name} has dropped rows but no list of them, or a list but no dropped rows")
        text = self.text.spec()
        for name, group in shard.groups.items():
            if not 0 < group.blocks <= group.rows:
                raise ValueError(f"shard {shard.name} has {group.rows} rows of {name} in {group.blocks} blocks")
            row_bytes = text.caption_bytes if name == TEXT_GROUP else self.specs[name].row_bytes
            if group.dropped > group.rows or group.rows * row_bytes > shard.lmdb.num_bytes:
                raise ValueError(f"shard {shard.name} cannot hold {group.rows} rows of {name} in {group.blocks} blocks")
            if (group.first_block + group.blocks) * EXTENT_BYTES > shard.extents.num_bytes:
                raise ValueError(f"shard {shard.name} has no extents for the blocks of {name}")
        if sum(group.rows for name, group in shard.groups.items() if name != TEXT_GROUP) != shard.samples:
            raise ValueError(f"shard {shard.name} says it has {shard.samples} samples, its buckets hold a different number")
        if shard.max_tokens * text.token_bytes > shard.caption_bytes or shard.caption_bytes > shard.lmdb.num_bytes:
            raise ValueError(f"shard {shard.name} cannot hold a caption of {shard.max_tokens} tokens")

    @cached_property
    def specs(self) -> dict[str, BlockSpec]:
        return {bucket.name: bucket.spec() for bucket in self.buckets}

    @property
    def known_shards(self) -> set[str]:
        """Names of the listed and the retired shards."""
        return {*self.retired, *(shard.name for shard in self.shards)}

    @property
    def payload_bytes(self) -> int:
        """Bytes of live rows' columns, of caption embeddings (once per shard) and of live rows' sample records."""
        return sum(
            shard.record_bytes
            + shard.caption_bytes
            + sum(rows * self.specs[name].row_bytes for name, rows in shard.live.items())
            for shard in self.shards
        )

    @property
    def samples(self) -> int:
        """Live rows of all buckets."""
        return sum(shard.live_samples for shard in self.shards)


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


def sealed(manifest: Manifest) -> Manifest:
    """Return the manifest with its digest filled in."""
    blank = dataclasses.replace(manifest, digest="")
    return dataclasses.replace(manifest, digest=bytes_digest(dump_manifest(blank)))


def dump_manifest(manifest: Manifest) -> bytes:
    """Return the manifest's serialised bytes, in the form of its version."""
    document: Any = to_version(encode(manifest), manifest.format_version)  # type: ignore[arg-type]
    if manifest.format_version >= COMPACT_VERSION:
        return json.dumps(document, separators=(",", ":"), sort_keys=True, ensure_ascii=True).encode("ascii") + b"\n"
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=True).encode("ascii") + b"\n"


def generation_path(store: Path, generation: int) -> Path:
    """Return the path of a generation's manifest."""
    return store / "generations" / f"{generation}.json"


def generations(store: Path) -> list[int]:
    """Return the numbers of the existing generations, ascending."""
    return sorted(int(path.stem) for path in (store / "generations").glob("*.json") if path.stem.isdecimal())


def read_manifest(store: Path, generation: int | None = None) -> Manifest:
    """Return a store's checked manifest: the newest, or that of a generation.

    Raises:
        StoreError: if the path is not a store, the generation is gone, or the format is newer than this reader.
        CorruptError: if the document is damaged or was edited by hand.
    """
    path = store / MANIFEST if generation is None else generation_path(store, generation)
    try:
        data = read_regular(path, MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        if generation is not None and (store / MANIFEST).is_file():
            raise StoreError(f"{store} has no generation {generation} any more; open the newest one") from error
        if generation is None and newest_intact(store) is not None:
            raise StoreError(f"{store} has lost its {MANIFEST}; {advice(store)}") from error
        raise StoreError(f"{store} is not a store: {why_no_store(store, MANIFEST)}") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}; {advice(store)}") from error
    try:
        if len(data) > MAX_MANIFEST_BYTES:
            raise CorruptError(f"{path} has more than the {MAX_MANIFEST_BYTES} bytes that are accepted")
        return parse_manifest(data, str(path))
    except CorruptError as error:
        raise CorruptError(f"{error}; {advice(store)}") from error


def newest_intact(store: Path) -> Path | None:
    """Return the path of the newest intact generation; None if there is none."""
    for generation in reversed(generations(store)):
        path = generation_path(store, generation)
        try:
            parse_manifest(read_regular(path, MAX_MANIFEST_BYTES), str(path))
        except (OSError, StoreError):
            continue
        return path
    return None


def advice(store: Path) -> str:
    """Return how to fix a damaged or missing manifest."""
    found = newest_intact(store)
    return f"copy {found} to {store / MANIFEST}" if found else "restore it from a backup; no generation of the store is intact"


def parse_manifest(data: bytes, item: str) -> Manifest:
    """Return the checked manifest in `data`; errors name `item`."""
    try:
        document = json.loads(data)
        version = document["format_version"]
        if type(version) is not int:
            raise TypedJsonError(f"format_version is {version!r:.40}")
        if version > COLUMNS_VERSION:
            raise StoreError(f"{item} has format version {version}, this bucketline reads up to {COLUMNS_VERSION}; update it")
        manifest = decode(Manifest, from_version(document, version))
        digest = manifest.digest if _is_as_written(data, manifest.digest) else sealed(manifest).digest
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{item} is damaged: {error!s:.300}") from error
    if digest != manifest.digest:
        raise CorruptError(
            f"{item} is damaged or was edited by hand: its digest is {manifest.digest[:40]!r}, its content gives {digest!r}"
        )
    return manifest


def _is_as_written(data: bytes, digest: str) -> bool:
    """Return True if these are exactly the bytes of a writer. Serialising the manifest again would take most of an open."""
    own = digest.encode("ascii", "replace")
    if data.startswith(b"{\n"):
        blank = data.replace(b'\n "digest": "%b"' % own, b'\n "digest": ""', 1)  # nested digests are indented further
    else:
        blank = data.replace(b'"digest":"%b"' % own, b'"digest":""', 1)
    return bytes_digest(blank) == digest


def finished(manifest: Manifest, store: Path | str) -> tuple[Manifest, bytes]:
    """Return a manifest with its digest, in the compact form if it is too long otherwise, and its bytes.

    Raises:
        StoreError: if readers would reject it; the message names `store`.
    """
    manifest = sealed(manifest)
    data = dump_manifest(manifest)
    if len(data) > MAX_MANIFEST_BYTES and manifest.format_version < COMPACT_VERSION:
        manifest = sealed(dataclasses.replace(manifest, format_version=COMPACT_VERSION))
        data = dump_manifest(manifest)
    if len(data) > MAX_MANIFEST_BYTES:
        raise StoreError(
            f"the manifest of {len(manifest.shards)} shards and {len(manifest.buckets)} buckets has {len(data)} bytes, at most "
            f"{MAX_MANIFEST_BYTES} are read; {store} stays at the previous generation: pack with larger shards or a grid of "
            "fewer buckets, or the rest into a second store (a loader reads several)"
        )
    return manifest, data


def write_manifest(store: Path, manifest: Manifest) -> Manifest:
    """Publish a generation: its own file first, then `manifest.json`, each by an atomic rename. Return the written manifest.

    Raises:
        StoreError: if a file cannot be written, or readers would reject it; the store then stays at the previous generation.
    """
    manifest, data = finished(manifest, store)
    (store / "generations").mkdir(exist_ok=True)
    write_or_explain(generation_path(store, manifest.generation), data)
    write_or_explain(store / MANIFEST, data)
    return manifest


def check_fingerprint(stored: Manifest, encoders: Mapping[str, Json], rules: Mapping[str, Json], max_captions: int) -> None:
    """Check that a run's provenance matches the store's.

    Raises:
        FingerprintError: if it differs; the message has the first differing field with the stored and the present value.
    """
    before: Json = {"encoders": stored.encoders, "rules": stored.rules, "max_captions": stored.max_captions}
    refuse_difference(before, {"encoders": dict(encoders), "rules": dict(rules), "max_captions": max_captions})


def refuse_difference(stored: Json, present: Json) -> None:
    """Check that what a store was made with equals what is to be added to it.

    Raises:
        FingerprintError: if it differs, as `check_fingerprint`.
    """
    if difference := first_difference(stored, present, ""):
        field, stored_value, present_value = difference
        if not is_given(stored, field):
            raise FingerprintError(
                f"the store does not record its {field}, this run has {present_value!s:.200}: it was made by an earlier "
                "version of bucketline, which packed differently; pack into a new store"
            )
        raise FingerprintError(
            f"the store was made with {field} = {stored_value!s:.200}, this run has {present_value!s:.200}; "
            "use the settings the store was made with, or pack into a new store"
        )
