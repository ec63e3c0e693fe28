"""The manifest: a JSON document that lists a generation's shards, with the digest of every file; the store's files by name.

`manifest.json` is the newest generation; `generations/N.json` keeps each one, so that readers stay on theirs.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from bucketline.errors import CorruptError, FingerprintError, StoreError
from bucketline.files.atomic_write import write_or_explain
from bucketline.files.paths import read_regular, why_no_store
from bucketline.forks import cached_property, without_collections
from bucketline.store.format.block import LATENT, MAX_HEADER_BYTES, RAGGED_PREFIX, EntriesOf, bytes_digest
from bucketline.store.format.schema import Schema
from bucketline.store.format.text import (
    TEXT_GROUP,
    TextError,
    is_bucket,
)
from bucketline.typed_json import Json, TypedJsonError, decode, encode, first_difference, is_given

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


# ---------------------------------------------------------------------------------------------------------------------- layout
# The file layout of a store, and the keys in a shard.

FORMAT_VERSION = 1
BLOCK_PREFIX = b"block/"  # blocks come before records, which are appended when all are known
SAMPLE_PREFIX = b"sample/"
META_KEY = b"meta"
TEXT_ERROR = "text_error"  # in the value of META_KEY: what quantising the shard's captions cost
SHARD_ID_BYTES = 16
COPY_PREFIX = "copy-"  # prefix of shards written by `store compact`, which hold the rows of existing shards
DROPPED_SUFFIX = ".dropped"
ENGINE = "lmdb-0.9"  # py-lmdb's default engine, which cannot read files of its other one (1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPaths:
    """The files of one sealed shard."""

    folder: Path  # STORE/shards
    name: str

    @property
    def lmdb(self) -> Path:
        return self.folder / f"{self.name}.lmdb"

    @property
    def meta(self) -> Path:
        return self.folder / f"{self.name}.meta"


def shard_paths(store: Path, name: str) -> ShardPaths:
    return ShardPaths(folder=store / "shards", name=name)


def dropped_path(store: Path, listed: DroppedEntry) -> Path:
    """Return the path of a list of dropped rows, whose name has its digest: two writers of a generation never share one."""
    return store / "generations" / f"{listed.generation}-{listed.digest}{DROPPED_SUFFIX}"


def object_name(path: Path) -> str:
    """Return the name in the store's folder of a shard's file, or of a list of dropped rows, by its path on this machine."""
    return f"{'generations' if path.suffix == DROPPED_SUFFIX else 'shards'}/{path.name}"


def pending_path(store: Path, name: str) -> Path:
    """Return the path of the shard `name` while it is being written."""
    return store / "pending" / f"{name}.lmdb"


def block_key(group: str, block: int) -> bytes:
    """Return a block's key, `block/train/256x192/00000042`; caption blocks are `block/text/00000042`."""
    return BLOCK_PREFIX + f"{group}/{block:08d}".encode("ascii")


def split_block_key(key: bytes) -> tuple[str, int] | None:
    """Return a block key's group and number; None for other keys."""
    group, _, number = key.removeprefix(BLOCK_PREFIX).rpartition(b"/")
    if not number.isdigit() or not key.startswith(BLOCK_PREFIX):
        return None
    name = group.decode("ascii", "replace")
    return (name, int(number)) if name == TEXT_GROUP or "/" in name else None


def sample_key(digest: bytes) -> bytes:
    return SAMPLE_PREFIX + digest


# -------------------------------------------------------------------------------------------------------------------- manifest

SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
SHARD_ID = re.compile(r"[0-9a-f]{32}")
COLUMN_SHARD_NAME = re.compile(rf"({SHARD_NAME.pattern})\.({SHARD_ID.pattern})")  # of an added column's files


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file's length and digest."""

    num_bytes: int
    digest: str  # XXH3, 128 bits, hexadecimal


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedEntry(FileEntry):
    """The list of the dropped rows of all shards."""

    generation: int  # the first one that lists it

    def __post_init__(self) -> None:
        if not SHARD_ID.fullmatch(self.digest) or self.generation < 0:
            raise ValueError(f"{self.generation}, {self.digest!r:.80} are not a list's generation and digest")


class GroupEntry(NamedTuple):
    """A shard's share of one bucket (or of the captions): rows, and the position of its blocks in the sidecar.

    A manifest has it as four numbers, about 30 bytes: 2,900 shards of 1,026 buckets take 87 MiB, by name 311 MiB.
    """

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
class ColumnShardEntry:
    """The file with an added column's values of a shard's rows, and its sidecar."""

    shard_id: str  # 32 random hexadecimal digits, also stored in its files, and part of their names
    lmdb: FileEntry
    meta: FileEntry
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
    meta: FileEntry
    groups: dict[str, GroupEntry]  # by bucket name, `text`, and `ragged/NAME` where the shard has such entries
    samples: int  # rows of all buckets, including dropped ones
    record_bytes: int  # of the live rows' sample records
    caption_bytes: int  # of the caption embeddings
    max_tokens: int  # of the longest caption
    ragged: dict[str, RaggedTotals] = field(default_factory=dict)  # by name, of the groups of which it has entries
    added: dict[str, ColumnShardEntry] = field(default_factory=dict)  # by column, of the added columns that its rows have
    cut: dict[str, int] = field(default_factory=dict)  # by text encoder: captions of live rows that it cut; 0 stays

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
            meta=own.meta,
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
        return sum(self.live.values())


MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 28
_MAX_SHARD_BYTES = 1 << 44  # a few GiB is usual
EXTENT_BYTES = 4 * 8  # per block: offset, length, first row, rows


@dataclass(frozen=True, kw_only=True)
class Manifest(Schema):
    """One generation of a store."""

    format_version: int
    store_id: str  # random, created once with the store
    generation: int
    engine: str  # the LMDB data format of the shards
    page_bytes: int
    shards: tuple[ShardEntry, ...]
    retired: tuple[str, ...]  # shards of an earlier generation that this one no longer lists; their files may still exist
    digest: str  # of this document with an empty digest
    dropped: DroppedEntry | None = None  # None if every row of the shards is live
    text_error: TextError | None = None  # of its captions, measured when they were quantised; None if none was
    withdrawn: tuple[str, ...] = ()  # sorted ids that `store drop` withdrew: a pack leaves their images out

    def __post_init__(self) -> None:
        Schema.__post_init__(self)
        listed = {shard.name for shard in self.shards}
        if len(listed) != len(self.shards):
            raise ValueError("a shard is listed twice")
        if not self.groups[TEXT_GROUP].is_quantised and self.text_error is not None:
            raise ValueError("it has an error of quantised text but no such text")
        if not all(map(operator.lt, self.withdrawn, self.withdrawn[1:])):
            raise ValueError("its withdrawn ids are not in order, or one is listed twice")
        for name in self.retired:
            if name in listed or not SHARD_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a retired shard")
        num_dropped = sum(group.dropped for shard in self.shards for group in shard.groups.values())
        if (num_dropped > 0) != (self.dropped is not None):
            raise ValueError(f"it has {num_dropped} dropped rows and {'no' if self.dropped is None else 'a'} list of them")
        if self.dropped is not None and not 0 < self.dropped.num_bytes - 4 * num_dropped <= MAX_HEADER_BYTES:
            raise ValueError(f"its list of {num_dropped} dropped rows has {self.dropped.num_bytes} bytes")
        form = tuple(getattr(self, field.name) for field in dataclasses.fields(Schema))
        for shard in self.shards:
            if _last.form != form or _last.checked.get(shard.name) is not shard:
                self._check_shard(shard)
                self._check_entries(shard)
                for name, own in shard.added.items():
                    self._check_column_shard(shard, name, own)
        _last.form, _last.checked = form, {shard.name: shard for shard in self.shards}

    def _check_column_shard(self, shard: ShardEntry, name: str, own: ColumnShardEntry) -> None:
        item = f"shard {shard.name}, added column {name!r:.80}"
        specs = self.added_specs.get(name, {})
        if own.lmdb.num_bytes >= _MAX_SHARD_BYTES or not 0 < own.meta.num_bytes <= own.lmdb.num_bytes + 2 * MAX_HEADER_BYTES:
            raise ValueError(f"{item}: its files have impossible lengths")
        if lacking := [bucket for bucket, rows in shard.live.items() if rows and bucket not in own.groups]:
            raise ValueError(f"{item}: it lacks the rows of {lacking[0]}")
        for bucket, group in own.groups.items():
            rows = shard.groups[bucket].rows if bucket in shard.groups else -1
            if bucket not in specs or group.rows != rows or not 0 < group.blocks <= rows or group.dropped:
                raise ValueError(f"{item}: {group.rows} rows of {bucket!r:.80} in {group.blocks} blocks, the shard has {rows}")
            has_room = group.rows * specs[bucket].row_bytes <= own.lmdb.num_bytes
            if not has_room or (group.first_block + group.blocks) * EXTENT_BYTES > own.meta.num_bytes:
                raise ValueError(f"{item}: it cannot hold {group.rows} rows of {bucket} in {group.blocks} blocks")

    def _check_shard(self, shard: ShardEntry) -> None:
        """Check a shard's numbers against its file lengths, so that no later read exceeds them."""
        if shard.is_of_column:
            raise ValueError(f"{shard.name!r} is not a shard name")
        # a sidecar entry is shorter than the block, row or caption that it describes
        lmdb_bytes, meta_bytes, samples = shard.lmdb.num_bytes, shard.meta.num_bytes, 0
        if lmdb_bytes >= _MAX_SHARD_BYTES or not 0 < meta_bytes <= lmdb_bytes + 2 * MAX_HEADER_BYTES:
            raise ValueError(f"shard {shard.name} has files of impossible lengths")
        for name, group in shard.groups.items():
            rows, blocks, first_block, dropped = group
            if name not in self._row_bytes:
                what, listed = ("rows", "bucket") if is_bucket(name) else ("entries", "ragged group")
                raise ValueError(f"shard {shard.name} holds {what} of {name!r:.80}, which is not listed as a {listed}")
            if not 0 < blocks <= rows:
                raise ValueError(f"shard {shard.name} has {rows} rows of {name} in {blocks} blocks")
            if dropped > rows or rows * self._row_bytes[name] > lmdb_bytes:
                raise ValueError(f"shard {shard.name} cannot hold {rows} rows of {name} in {blocks} blocks")
            if (first_block + blocks) * EXTENT_BYTES > meta_bytes:
                raise ValueError(f"shard {shard.name} has a sidecar too short for the blocks of {name}")
            samples += rows if name in self.specs else 0
        if TEXT_GROUP not in shard.groups:
            raise ValueError(f"shard {shard.name} has no captions, not even the empty one")
        if samples != shard.samples:
            raise ValueError(f"shard {shard.name} says it has {shard.samples} samples, its buckets hold a different number")
        longest_bytes = shard.max_tokens * self.groups[TEXT_GROUP].token_bytes
        if not longest_bytes <= shard.caption_bytes <= shard.lmdb.num_bytes:
            raise ValueError(f"shard {shard.name} cannot hold a caption of {shard.max_tokens} tokens")

    @cached_property
    def _row_bytes(self) -> dict[str, int]:
        """Return the bytes of a bucket's row, or at least of a group's entry, by the name in a shard's groups."""
        return {name: s.entry_bytes for name, s in self.groups.items()} | {name: s.row_bytes for name, s in self.specs.items()}

    def _check_entries(self, shard: ShardEntry) -> None:
        """Check a shard's numbers of ragged entries, as `_check_shard`."""
        for name, totals in shard.ragged.items():
            num_bytes = totals.tokens * self.groups[RAGGED_PREFIX + name].token_bytes if name in self.ragged else -1
            if not 0 <= num_bytes <= shard.lmdb.num_bytes or totals.max_tokens > totals.tokens:
                raise ValueError(f"shard {shard.name} cannot hold {totals.tokens} tokens of {name!r:.80}")
        if {RAGGED_PREFIX + name for name in shard.ragged} != {name for name in shard.groups if name.startswith(RAGGED_PREFIX)}:
            raise ValueError(f"shard {shard.name} does not have the numbers of tokens of exactly its ragged groups")
        for name, group in self.ragged.items():
            if (own := shard.groups.get(RAGGED_PREFIX + name)) is None:
                if group.of is EntriesOf.CAPTIONS or not group.optional:
                    raise ValueError(f"shard {shard.name} has no entries of {name}")
            elif own.dropped or (group.of is EntriesOf.CAPTIONS and own.rows != shard.groups[TEXT_GROUP].rows):
                raise ValueError(f"shard {shard.name} has {own.rows} entries of {name}, {own.dropped} of them dropped")

    @property
    def known_shards(self) -> set[str]:
        return {*self.retired, *(shard.name for shard in self.shards)}

    @property
    def payload_bytes(self) -> int:
        """Bytes of live rows' columns and sample records, and of all caption embeddings and ragged entries."""
        return sum(
            shard.record_bytes + shard.caption_bytes + self.ragged_bytes(shard) + self.row_bytes(shard) for shard in self.shards
        )

    def row_bytes(self, shard: ShardEntry) -> int:
        """Return the bytes of a shard's live rows, with their added columns."""
        added = (self.added_specs[name] for name in shard.added)
        specs = (self.specs, *added)
        return sum(rows * spec[bucket].row_bytes for spec in specs for bucket, rows in shard.live.items() if bucket in spec)

    def ragged_bytes(self, shard: ShardEntry) -> int:
        """Return the bytes of a shard's ragged entries."""
        return sum(
            totals.tokens * (spec := self.groups[RAGGED_PREFIX + name]).token_bytes
            + shard.groups[spec.group].rows * spec.fixed_bytes
            for name, totals in shard.ragged.items()
        )

    @property
    def samples(self) -> int:
        """Live rows of all buckets."""
        return sum(shard.live_samples for shard in self.shards)

    @property
    def captions_cut(self) -> dict[str, int]:
        """By text encoder, the captions of live rows that it did not see to their end."""
        names = sorted({name for shard in self.shards for name in shard.cut})
        found = {name: sum(shard.cut.get(name, 0) for shard in self.shards) for name in names}
        return {name: count for name, count in found.items() if count}


class _Last:
    """The last manifest of this process: entries that the next one has, too, are not checked, decoded or encoded again."""

    form: tuple[object, ...] = ()  # the schema that the entries suit
    checked: Mapping[str, ShardEntry] = MappingProxyType({})  # by name
    read: Mapping[str, tuple[Json, ShardEntry]] = MappingProxyType({})  # by name: the entry as JSON, too


_last = _Last()
_MAX_KEPT_BYTES = 1 << 22  # of a manifest, whose entries as JSON take ten times as much


def sealed(manifest: Manifest) -> Manifest:
    """Return the manifest as it is written: with its digest."""
    return _sealed(manifest)[0]


def _sealed(manifest: Manifest) -> tuple[Manifest, bytes]:
    data = dump_manifest(dataclasses.replace(manifest, digest=""))
    digest = bytes_digest(data)
    return dataclasses.replace(manifest, digest=digest), data.replace(b'"digest":""', b'"digest":"%b"' % digest.encode(), 1)


def dump_manifest(manifest: Manifest) -> bytes:
    names = [field.name for field in dataclasses.fields(Manifest) if field.name != "shards"]
    shards: list[Json] = []
    for entry in manifest.shards:
        document, known = _last.read.get(entry.name, (None, None))
        shards.append(document if known is entry else encode(entry))
    return _serialised({**{name: encode(getattr(manifest, name)) for name in names}, "shards": shards})


def _serialised(document: Json) -> bytes:
    return json.dumps(document, sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"


def generation_path(store: Path, generation: int) -> Path:
    return store / "generations" / f"{generation}.json"


def generations(store: Path) -> list[int]:
    """Return the numbers of the existing generations, ascending."""
    with suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(store / "generations")  # noqa: PTH208 - there may be thousands
        return sorted(int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdecimal())
    return []


def read_manifest(store: Path, generation: int | None = None) -> Manifest:
    """Return a store's checked manifest: the newest, or that of a generation.

    Raises:
        StoreError: if the path is not a store, the generation is gone, or the store has another format version.
        CorruptError: if the document is damaged or was edited by hand.
    """
    path = store / MANIFEST if generation is None else generation_path(store, generation)
    try:
        data = read_regular(path, MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        if generation is not None and (store / MANIFEST).is_file():
            raise StoreError(f"{store} has no generation {generation} any more; open the newest one") from error
        if generation is None and newest_intact(store) is not None:
            raise StoreError(f"{store} has lost its {MANIFEST}; {_advice(store)}") from error
        raise StoreError(f"{store} is not a store: {why_no_store(store, MANIFEST)}") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}; {_advice(store)}") from error
    try:
        if len(data) > MAX_MANIFEST_BYTES:
            raise CorruptError(f"{path} has more than the {MAX_MANIFEST_BYTES} bytes that are accepted")
        return parse_manifest(data, str(path))
    except CorruptError as error:
        raise CorruptError(f"{error}; {_advice(store)}") from error


def newest_intact(store: Path) -> Path | None:
    """Return the path of the newest intact generation; None if there is none."""
    with suppress(OSError):  # of the folder: that the manifest cannot be read is told already
        for generation in reversed(generations(store)):
            path = generation_path(store, generation)
            with suppress(OSError, StoreError):
                parse_manifest(read_regular(path, MAX_MANIFEST_BYTES), str(path))
                return path
    return None


def _advice(store: Path) -> str:
    found = newest_intact(store)
    return f"copy {found} to {store / MANIFEST}" if found else "restore it from a backup; no generation of the store is intact"


@without_collections()
def parse_manifest(data: bytes, item: str) -> Manifest:
    """Return the checked manifest in `data`; errors name `item`."""
    try:
        document = json.loads(data)
        version = document["format_version"]
        if type(version) is not int:
            raise TypedJsonError(f"format_version is {version!r:.40}")
        if version != FORMAT_VERSION:
            raise StoreError(f"{item} has format version {version!s:.40}, expected {FORMAT_VERSION}; pack the store again")
        shards = document.get("shards")
        known = [*map(_known, shards)] if isinstance(shards, list) else shards
        manifest = decode(Manifest, document if known is None else {**document, "shards": known})
        digest = manifest.digest
        if not _is_as_written(data, digest):
            data, digest = _serialised(document), bytes_digest(_serialised({**document, "digest": ""}))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{item} is damaged: {error!s:.300}") from error
    if digest != manifest.digest:
        raise CorruptError(
            f"{item} is damaged or was edited by hand: its digest is {manifest.digest[:40]!r}, its content gives {digest!r}"
        )
    kept = zip(shards, manifest.shards, strict=True) if len(data) <= _MAX_KEPT_BYTES else ()
    _last.read = {entry.name: (own, entry) for own, entry in kept}
    return manifest


def _known(shard: Json) -> Json | ShardEntry:
    """Return a shard's entry if the manifest that was read last has the same one; otherwise the shard."""
    name = shard.get("name") if isinstance(shard, dict) else None
    before, entry = _last.read.get(name, (None, None)) if isinstance(name, str) else (None, None)
    return shard if entry is None or before != shard else entry


def _is_as_written(data: bytes, digest: str) -> bool:
    """Return True if these are exactly the bytes of a writer. Serialising the manifest again would take most of an open."""
    own = digest.encode("ascii", "replace")
    return bytes_digest(data.replace(b'"digest":"%b"' % own, b'"digest":""', 1)) == digest


def finished(manifest: Manifest, store: Path | str) -> tuple[Manifest, bytes]:
    """Return a manifest as it is written, and its bytes."""
    manifest, data = _sealed(manifest)
    if len(data) > MAX_MANIFEST_BYTES:
        raise StoreError(
            f"the manifest of {len(manifest.shards)} shards and {len(manifest.buckets)} buckets has {len(data)} bytes, at most "
            f"{MAX_MANIFEST_BYTES} are read; {store} stays at the previous generation: pack with larger shards or a grid of "
            "fewer buckets, or the rest into a second store (a loader reads several)"
        )
    return manifest, data


def write_manifest(store: Path, manifest: Manifest) -> Manifest:
    """Publish a generation: its own file first, then `manifest.json`, each by an atomic rename. Return the written manifest."""
    manifest, data = finished(manifest, store)
    (store / "generations").mkdir(exist_ok=True)
    write_or_explain(generation_path(store, manifest.generation), data)
    write_or_explain(store / MANIFEST, data)
    return manifest


def check_fingerprint(stored: Schema, present: Schema) -> None:
    """Check that a run's provenance, and then its columns, are those that a store was created with."""
    before, now = stored.settings(), present.settings()
    provenance = ("encoders", "rules", "max_captions")
    refuse_difference({name: before[name] for name in provenance}, {name: now[name] for name in provenance})
    if present.columns and not stored.columns:  # images' latents only, which are not listed
        refuse_difference({"columns": {LATENT: encode(present.columns.get(LATENT))}}, {"columns": now["columns"]})
    refuse_difference(before, now)


def refuse_difference(stored: Json, present: Json) -> None:
    """Check that what a store was made with equals what is to be added to it."""
    if difference := first_difference(stored, present, ""):
        field, stored_value, present_value = difference
        if not is_given(stored, field) and field.partition(".")[0] in ("columns", "ragged", "buckets"):
            raise FingerprintError(
                f"the store has no {field}, this writer has {present_value!s:.200}; a store's columns are fixed when it is "
                "created: write those that it was made with, or write a new store with all of them"
            )
        if not is_given(stored, field):
            raise FingerprintError(
                f"the store does not record its {field}, this run has {present_value!s:.200}; pack into a new store"
            )
        raise FingerprintError(
            f"the store was made with {field} = {stored_value!s:.200}, this run has {present_value!s:.200}; "
            "use the settings the store was made with, or pack into a new store"
        )


# ---------------------------------------------------------------------------------------------------------------- mixture file
# `mixture.json`: names the stores of a folder that are read together, each with its repeats.
#
# `ingest pack` writes it for a data set file. The loader and the trainer take such a folder wherever they take a store.

MIXTURE = "mixture.json"
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedStore:
    """A store of the folder, and the number of times that a pass reads its rows."""

    name: str  # of its folder
    repeats: int

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name in (".", ".."):
            raise ValueError(f"name is {self.name!r}, expected the name of a folder next to {MIXTURE}")
        if self.repeats < 1:
            raise ValueError(f"repeats is {self.repeats}, expected 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureFile:
    """The content of `mixture.json`."""

    version: int
    stores: tuple[MixedStore, ...]

    def __post_init__(self) -> None:
        if self.version != _VERSION:
            raise ValueError(f"version is {self.version}, expected {_VERSION}; a newer bucketline wrote it")


def write_mixture(folder: Path, stores: tuple[MixedStore, ...]) -> None:
    text = json.dumps(encode(MixtureFile(version=_VERSION, stores=stores)), indent=1)
    write_or_explain(folder / MIXTURE, f"{text}\n".encode())


def read_mixture(folder: Path) -> tuple[MixedStore, ...] | None:
    """Return the stores that the folder's `mixture.json` names; None if it has none."""
    path = folder / MIXTURE
    try:
        stores = decode(MixtureFile, json.loads(path.read_bytes()), MIXTURE).stores
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is damaged: {error}; run `ingest pack` with the data set file again") from error
    if not stores:
        raise StoreError(f"{path} names no store; run `ingest pack` with the data set file again")
    return stores
