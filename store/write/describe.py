"""Describe a sealed shard: its entry in a manifest, and its buckets, read from its files.

Of a shard whose file is no longer here, since it was sent to object storage, the description is noted next to it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.files.atomic_write import write_or_explain
from bucketline.files.regular_file import read_regular
from bucketline.store.format.block import IMAGE_AXES, BlockSpec, Column
from bucketline.store.format.hashing import file_digest
from bucketline.store.format.layout import pending_path, shard_paths
from bucketline.store.format.manifest import FileEntry, RaggedTotals, ShardEntry, group_entry
from bucketline.store.format.safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES, read_header
from bucketline.store.format.schema import BucketEntry, bucket_entry
from bucketline.store.format.text_block import TEXT_GROUP, is_bucket
from bucketline.store.format.text_codec import TextError
from bucketline.store.shard.reader import SealedShard
from bucketline.store.shard.row_locator import EXTENTS_FORMAT
from bucketline.store.shard.sidecar import PagedFile
from bucketline.store.write.column_shard import found_columns
from bucketline.typed_json import decode, encode

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.store.format.manifest import Manifest

SENT = ".sent"
_MAX_NOTE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _TextTotals:
    """Caption totals from a shard's extents."""

    tokens: int
    max_tokens: int
    error: TextError | None  # of quantised tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A sealed shard's manifest entry and its buckets' entries, and the error of the captions that were quantised for it."""

    entry: ShardEntry
    buckets: tuple[BucketEntry, ...]
    text_error: TextError | None = None


def sent_note(store: Path, name: str) -> Path:
    """Return the path of a shard's description, which is there if the shard was sent."""
    return store / "shards" / f"{name}{SENT}"


def note_description(store: Path, described: Described) -> None:
    """Write a shard's description next to it."""
    write_or_explain(sent_note(store, described.entry.name), json.dumps(encode(described)).encode())


def noted_description(store: Path, name: str) -> Described | None:
    """Return the description that is noted next to a shard; None if there is none."""
    path = sent_note(store, name)
    try:
        found = decode(Described, json.loads(read_regular(path, _MAX_NOTE_BYTES)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptError(f"{path} is damaged ({error!s:.200}); remove shards/{name}.* and rerun the command") from error
    if found.entry.name != name:
        raise CorruptError(f"{path} describes the shard {found.entry.name}; remove shards/{name}.* and rerun the command")
    return found


def describe_shard(store: Path, name: str, manifest: Manifest) -> Described:
    """Return what a sealed shard is, noted or read from its files.

    A copy of rows has their added columns in files of its own, which `RowCopier` has written.
    """
    if (noted := noted_description(store, name)) is not None:
        return noted
    paths = shard_paths(store, name)
    again = f"move {paths.lmdb} to {pending_path(store, name)} and rerun the command, which seals it again"
    files = []
    for path in (paths.lmdb, paths.extents, paths.index):
        try:
            num_bytes, digest = file_digest(path)
        except FileNotFoundError as error:
            raise StoreError(f"{path} is missing, although its shard exists; {again}") from error
        files.append(FileEntry(num_bytes=num_bytes, digest=digest))
    try:
        found = _described(store, name, manifest, files)
    except CorruptError as error:
        raise CorruptError(f"{error}; {again}") from error
    if not manifest.added:
        return found
    return dataclasses.replace(found, entry=dataclasses.replace(found.entry, added=found_columns(store, found.entry)))


def _described(store: Path, name: str, manifest: Manifest, files: list[FileEntry]) -> Described:
    """Return what a shard's sidecars and blocks say of it. `files` are its own file, its extents and its index."""
    extents = PagedFile(shard_paths(store, name).extents, files[1].num_bytes, EXTENTS_FORMAT)
    entry = entry_of_extents(name, files, extents, manifest)
    shard = SealedShard(store, entry)
    record_bytes = int(shard.index.column("record_bytes").sum(dtype=np.int64))
    buckets = tuple(_bucket_of(shard, group) for group in entry.groups if is_bucket(group))
    error = dict(extents.metadata["text"]).get("error")  # which `entry_of_extents` has checked
    text_error = None if error is None else decode(TextError, error)
    return Described(entry=dataclasses.replace(entry, record_bytes=record_bytes), buckets=buckets, text_error=text_error)


def entry_of_extents(name: str, files: list[FileEntry], extents: PagedFile, manifest: Manifest) -> ShardEntry:
    """Return a shard's manifest entry as its extents describe it, with no dropped row, and 0 for `record_bytes`."""
    spec = manifest.text.spec()
    try:
        groups = {group: group_entry(place) for group, place in dict(extents.metadata["groups"]).items()}
        text = decode(_TextTotals, {"error": None, **dict(extents.metadata["text"])})
        return ShardEntry(
            name=name,
            shard_id=str(extents.metadata["shard_id"]),
            lmdb=files[0],
            extents=files[1],
            index=files[2],
            dropped=None,
            groups=groups,
            samples=sum(group.rows for name, group in groups.items() if is_bucket(name)),
            record_bytes=0,
            caption_bytes=text.tokens * spec.token_bytes + groups[TEXT_GROUP].rows * spec.fixed_bytes,
            max_tokens=text.max_tokens,
            ragged=decode(dict[str, RaggedTotals], extents.metadata.get("ragged", {})),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{extents.path} does not describe a shard ({error!r:.200})") from error


def _bucket_of(shard: SealedShard, group: str) -> BucketEntry:
    """Return a bucket's entry, its columns read from the header of its first block."""
    place = shard.block_ranges(group, np.array([0]))
    block_bytes = int(place.length[0])
    head = shard.read(int(place.offset[0]), min(block_bytes, LENGTH_BYTES + MAX_HEADER_BYTES))
    tensors, metadata, _ = read_header(head, block_bytes, f"shard {shard.name}, block 0 of {group}")
    columns = tuple(Column(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape[1:]) for tensor in tensors)
    axes = tuple(metadata["axes"].split(",")) if "axes" in metadata else IMAGE_AXES
    return bucket_entry(BlockSpec(bucket=group, columns=columns, axes=axes))
