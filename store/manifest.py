"""The manifest: one JSON document that says what a generation of a store is made of, with the digest of every file.

`manifest.json` is the newest generation; `generations/N.json` keeps each one, so that a reader stays on its own.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from bucketline.errors import CorruptError, FingerprintError, StoreError
from bucketline.store.block import BlockSpec, Column, fixed_columns
from bucketline.store.digests import bytes_digest
from bucketline.store.durable import write_or_explain
from bucketline.store.json_difference import first_difference, is_given
from bucketline.store.tensor_file import MAX_HEADER_BYTES
from bucketline.store.text_block import TEXT_GROUP, TextSpec
from bucketline.store.typed_json import Json, TypedJsonError, decode, encode
from bucketline.store.wrong_path import why_no_store

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 28
MAX_SHARD_BYTES = 1 << 44  # a few GiB is usual
EXTENT_BYTES = 4 * 8  # of one block: offset, length, first row, rows
SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
SHARD_ID = re.compile(r"[0-9a-f]{32}")
BUCKET_NAME = re.compile(r"(train|val)/([1-9][0-9]{0,6})x([1-9][0-9]{0,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnEntry:
    """A column's dtype, as safetensors spells it, and a row's shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file's length and digest."""

    num_bytes: int
    digest: str  # XXH3, 128 bits, hexadecimal


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedEntry:
    """The list of a shard's rows that are no longer live; `generation` is in its file's name."""

    generation: int
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEntry:
    """What a shard holds of one bucket (or of its captions): rows, and where its blocks stand in the extents."""

    rows: int
    blocks: int
    first_block: int
    dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """A sealed shard: its files, and what they hold."""

    name: str
    shard_id: str  # 32 hexadecimal digits, drawn when the shard was begun; its files hold it too
    lmdb: FileEntry
    extents: FileEntry
    index: FileEntry
    dropped: DroppedEntry | None
    groups: dict[str, GroupEntry]  # by bucket name, and `text`
    samples: int  # rows of all buckets, dropped ones included
    record_bytes: int  # of live rows' sample records
    caption_bytes: int  # of the captions' embeddings
    max_tokens: int  # of the longest caption

    def __post_init__(self) -> None:
        if not SHARD_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no shard name")
        if not SHARD_ID.fullmatch(self.shard_id):
            raise ValueError(f"{self.shard_id!r} is no shard id")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketEntry:
    """A bucket: an exact height and width and a split, and the columns that each of its rows has."""

    name: str
    height_px: int
    width_px: int
    split: str
    header_bytes: int
    columns: dict[str, ColumnEntry]

    def __post_init__(self) -> None:
        if self.name != bucket_name(self.split, self.height_px, self.width_px) or not BUCKET_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not the name of a bucket of {self.split}, {self.height_px}x{self.width_px}")
        if self.spec().header_bytes != self.header_bytes:
            raise ValueError(f"header_bytes is {self.header_bytes}, its columns need {self.spec().header_bytes}")

    def spec(self) -> BlockSpec:
        columns = (Column(name=name, dtype=c.dtype, shape=c.shape) for name, c in self.columns.items())
        return BlockSpec(bucket=self.name, columns=tuple(columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEntry:
    """The captions' columns: per token, and per caption."""

    header_bytes: int
    tokens: dict[str, ColumnEntry]
    fixed: dict[str, ColumnEntry]

    def __post_init__(self) -> None:
        if not self.tokens or any(column.row_bytes == 0 for column in _columns(self.tokens)):
            raise ValueError("there is no token column, or one that holds nothing")
        if self.spec().header_bytes != self.header_bytes:
            raise ValueError(f"header_bytes is {self.header_bytes}, its columns need {self.spec().header_bytes}")

    def spec(self) -> TextSpec:
        return TextSpec(tokens=_columns(self.tokens), fixed=_columns(self.fixed))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One generation of a store."""

    format_version: int
    store_id: str  # drawn once, when the store is made
    generation: int
    engine: str  # the LMDB data format that the shards are in
    page_bytes: int
    max_captions: int  # V
    encoders: dict[str, Json]  # provenance: what made the columns (class, config and weights hash, dtype, scaling …)
    rules: dict[str, Json]  # provenance: grid, resampling, crop, split
    text: TextEntry
    buckets: tuple[BucketEntry, ...]
    shards: tuple[ShardEntry, ...]
    retired: tuple[str, ...]  # shards that an earlier generation listed, this one does not; their files may be there
    digest: str  # of this document with an empty digest

    def __post_init__(self) -> None:
        names = {bucket.name for bucket in self.buckets}
        listed = {shard.name for shard in self.shards}
        if len(names) != len(self.buckets) or len(listed) != len(self.shards):
            raise ValueError("a bucket or a shard is listed twice")
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

    def _check_shard(self, shard: ShardEntry, buckets: set[str]) -> None:
        """Hold a shard's numbers against its files' lengths, so that nothing read from them can be larger than they are."""
        if unknown := set(shard.groups) - buckets - {TEXT_GROUP}:
            raise ValueError(f"shard {shard.name} holds rows of {min(unknown)!r}, which is not listed as a bucket")
        if TEXT_GROUP not in shard.groups:
            raise ValueError(f"shard {shard.name} has no captions, not even the empty one")
        # each entry of a sidecar is shorter than the block, row or caption that it is about
        sidecars = [shard.extents.num_bytes, shard.index.num_bytes, *([shard.dropped.num_bytes] if shard.dropped else [])]
        largest = shard.lmdb.num_bytes + 2 * MAX_HEADER_BYTES
        if shard.lmdb.num_bytes >= MAX_SHARD_BYTES or not all(0 < num_bytes <= largest for num_bytes in sidecars):
            raise ValueError(f"shard {shard.name} has files of impossible lengths")
        if any(group.dropped for group in shard.groups.values()) != (shard.dropped is not None):
            raise ValueError(f"shard {shard.name} has dropped rows and no list of them, or the other way about")
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
            raise ValueError(f"shard {shard.name} says it has {shard.samples} samples, its buckets have another number")
        if shard.max_tokens * text.token_bytes > shard.caption_bytes or shard.caption_bytes > shard.lmdb.num_bytes:
            raise ValueError(f"shard {shard.name} cannot hold a caption of {shard.max_tokens} tokens")

    @cached_property
    def specs(self) -> dict[str, BlockSpec]:
        return {bucket.name: bucket.spec() for bucket in self.buckets}

    @property
    def payload_bytes(self) -> int:
        """Bytes of live rows' columns, of captions' embeddings (once per shard) and of live rows' sample records."""
        return sum(
            shard.record_bytes
            + shard.caption_bytes
            + sum((g.rows - g.dropped) * self.specs[name].row_bytes for name, g in shard.groups.items() if name != TEXT_GROUP)
            for shard in self.shards
        )

    @property
    def samples(self) -> int:
        """Live rows of all buckets."""
        return sum(g.rows - g.dropped for shard in self.shards for name, g in shard.groups.items() if name != TEXT_GROUP)


def bucket_name(split: str, height_px: int, width_px: int) -> str:
    """Give a bucket's name, the same everywhere: `train/256x192`, height first."""
    return f"{split}/{height_px}x{width_px}"


def _columns(entries: Mapping[str, ColumnEntry]) -> tuple[Column, ...]:
    return tuple(Column(name=name, dtype=entry.dtype, shape=entry.shape) for name, entry in entries.items())


def column_entries(columns: tuple[Column, ...]) -> dict[str, ColumnEntry]:
    """Give the manifest's form of columns."""
    return {column.name: ColumnEntry(dtype=column.dtype, shape=column.shape) for column in columns}


def bucket_entry(spec: BlockSpec) -> BucketEntry:
    """Give the manifest's form of a bucket.

    Raises:
        StoreError: where the spec's bucket has no proper name.
    """
    match = BUCKET_NAME.fullmatch(spec.bucket)
    if match is None:
        raise StoreError(f"{spec.bucket!r} is no bucket name; expected something like 'train/256x192'")
    return BucketEntry(
        name=spec.bucket,
        height_px=int(match[2]),
        width_px=int(match[3]),
        split=match[1],
        header_bytes=spec.header_bytes,
        columns=column_entries(spec.columns),
    )


def sealed(manifest: Manifest) -> Manifest:
    """Give the manifest with its own digest filled in."""
    blank = dataclasses.replace(manifest, digest="")
    return dataclasses.replace(manifest, digest=bytes_digest(dump_manifest(blank)))


def dump_manifest(manifest: Manifest) -> bytes:
    """Give the bytes that a manifest is written as."""
    return json.dumps(encode(manifest), indent=1, sort_keys=True, ensure_ascii=True).encode("ascii") + b"\n"


def generation_path(store: Path, generation: int) -> Path:
    """Give the file that keeps a generation's manifest."""
    return store / "generations" / f"{generation}.json"


def generations(store: Path) -> list[int]:
    """Give the numbers of the generations that are kept, ascending."""
    return sorted(int(path.stem) for path in (store / "generations").glob("*.json") if path.stem.isdecimal())


def read_manifest(store: Path, generation: int | None = None) -> Manifest:
    """Read and check a store's manifest: the newest, or that of a generation.

    Raises:
        StoreError: where the path holds no store, the generation is gone, or the format is newer than this reader.
        CorruptError: where the document is damaged or was edited by hand.
    """
    path = store / MANIFEST if generation is None else generation_path(store, generation)
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise StoreError(f"{path} is no file; {advice(store)}")
        if size > MAX_MANIFEST_BYTES:
            raise CorruptError(f"{path} has {size} bytes, at most {MAX_MANIFEST_BYTES} are accepted")
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        if generation is not None and (store / MANIFEST).is_file():
            raise StoreError(f"{store} has no generation {generation} any more; open the newest one") from error
        if generation is None and newest_intact(store) is not None:
            raise StoreError(f"{store} has lost its {MANIFEST}; {advice(store)}") from error
        raise StoreError(f"{store} is no store: {why_no_store(store, MANIFEST)}") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return parse_manifest(data, str(path))
    except CorruptError as error:
        raise CorruptError(f"{error}; {advice(store)}") from error


def newest_intact(store: Path) -> Path | None:
    """Give the newest generation's own file that is whole; None where there is none."""
    for generation in reversed(generations(store)):
        path = generation_path(store, generation)
        try:
            parse_manifest(path.read_bytes(), str(path))
        except (OSError, StoreError):
            continue
        return path
    return None


def advice(store: Path) -> str:
    """Say how a damaged or lost manifest is put right."""
    found = newest_intact(store)
    return f"copy {found} to {store / MANIFEST}" if found else "restore it from a backup; no generation of the store is whole"


def parse_manifest(data: bytes, item: str) -> Manifest:
    """Parse and check a manifest's bytes; `item` is named in errors."""
    try:
        document = json.loads(data)
        version = document["format_version"]
        if type(version) is not int:
            raise TypedJsonError(f"format_version is {version!r:.40}")
        if version > FORMAT_VERSION:
            raise StoreError(
                f"{item} has format version {version}, this is a reader of version {FORMAT_VERSION}; update bucketline"
            )
        manifest = decode(Manifest, document)
        digest = manifest.digest if _is_as_written(data, manifest.digest) else sealed(manifest).digest
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError(f"{item} is damaged: {error!s:.300}") from error
    if digest != manifest.digest:
        raise CorruptError(
            f"{item} is damaged or was edited by hand: its digest is {manifest.digest[:40]!r}, its content gives {digest!r}"
        )
    return manifest


def _is_as_written(data: bytes, digest: str) -> bool:
    """Say whether these are the very bytes that a writer wrote, which serialising anew takes most of an open to say."""
    blank = data.replace(
        b'\n "digest": "%b"' % digest.encode("ascii", "replace"), b'\n "digest": ""', 1
    )  # nested ones are indented further
    return bytes_digest(blank) == digest


def write_manifest(store: Path, manifest: Manifest) -> Manifest:
    """Publish a generation: its own file first, then `manifest.json`, each replaced durably. Give what was written.

    Raises:
        StoreError: where one cannot be written; the store is then at the generation before.
    """
    manifest = sealed(manifest)
    data = dump_manifest(manifest)
    (store / "generations").mkdir(exist_ok=True)
    write_or_explain(generation_path(store, manifest.generation), data)
    write_or_explain(store / MANIFEST, data)
    return manifest


def check_fingerprint(stored: Manifest, encoders: Mapping[str, Json], rules: Mapping[str, Json], max_captions: int) -> None:
    """Refuse a run whose provenance differs from the store's.

    Raises:
        FingerprintError: naming the first field that differs, the stored and the present value.
    """
    before: Json = {"encoders": stored.encoders, "rules": stored.rules, "max_captions": stored.max_captions}
    now: Json = {"encoders": dict(encoders), "rules": dict(rules), "max_captions": max_captions}
    if difference := first_difference(before, now, ""):
        field, stored_value, present_value = difference
        if not is_given(before, field):
            raise FingerprintError(
                f"the store does not say its {field}, this run has {present_value!s:.200}: it was made by an earlier version "
                "of bucketline, which packed otherwise; pack into a new store"
            )
        raise FingerprintError(
            f"the store was made with {field} = {stored_value!s:.200}, this run has {present_value!s:.200}; "
            "use the settings the store was made with, or pack into a new store"
        )
