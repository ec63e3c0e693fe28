"""Changing what a store is: adopting finished shards, dropping rows, and publishing the next generation.

One process at a time does any of this; it holds the store's writer lock.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.store.block import BlockSpec, Column
from bucketline.store.block_table import DROPPED_FORMAT, EXTENTS_FORMAT
from bucketline.store.digests import DIGEST_BYTES, bytes_digest, file_digest
from bucketline.store.durable import explaining, sync_folder, write_or_explain
from bucketline.store.layout import COPY_PREFIX, ENGINE, shard_paths
from bucketline.store.locks import FileLock
from bucketline.store.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    BucketEntry,
    DroppedEntry,
    FileEntry,
    GroupEntry,
    Manifest,
    ShardEntry,
    TextEntry,
    bucket_entry,
    generations,
    newest_intact,
    read_manifest,
    sealed,
    write_manifest,
)
from bucketline.store.paged_file import PagedFile, encode_paged
from bucketline.store.seal import seal_apart
from bucketline.store.sealed_shard import KEY, SealedShard, as_keys
from bucketline.store.tensor_file import LENGTH_BYTES, MAX_HEADER_BYTES, read_header
from bucketline.store.text_block import TEXT_GROUP
from bucketline.store.typed_json import decode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.typed_json import Json

WRITER_LOCK = "writer.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a store is to hold, fixed when it is made: provenance and text columns."""

    encoders: dict[str, Json]
    rules: dict[str, Json]
    max_captions: int
    text: TextEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class _TextTotals:
    """What a shard's extents say of its captions."""

    tokens: int
    max_tokens: int


def prepare_store(store: Path) -> None:
    """Make a store's folders, durably: else what is committed in them could be gone with their names after a power loss.

    Raises:
        StoreError: where the path is a file, or cannot be written.
    """
    try:
        made = [folder for folder in (store, *store.absolute().parents) if not folder.exists()]
        for folder in (store, store / "shards", store / "pending", store / "generations"):
            folder.mkdir(exist_ok=True, parents=folder == store)
        for folder in (store, *(folder.parent for folder in made)):
            sync_folder(folder)
    except OSError as error:
        raise StoreError(f"{store} cannot be made a store: {error.strerror}") from error


def lock_store(store: Path) -> FileLock:
    """Take the lock of the one process that may change the store.

    Raises:
        LockedError: where another process holds it.
    """
    return FileLock(store / "pending" / WRITER_LOCK)


def new_manifest(contents: Contents) -> Manifest:
    """Give the manifest of a store without samples, generation 0, not yet written."""
    return sealed(
        Manifest(
            format_version=FORMAT_VERSION,
            store_id=uuid.uuid4().hex,
            generation=0,
            engine=ENGINE,
            page_bytes=os.sysconf("SC_PAGE_SIZE"),
            max_captions=contents.max_captions,
            encoders=contents.encoders,
            rules=contents.rules,
            text=contents.text,
            buckets=(),
            shards=(),
            retired=(),
            digest="",
        )
    )


def newest_manifest(store: Path) -> Manifest | None:
    """Give the store's newest manifest; None where there is no store yet.

    Where a crash left generations and no `manifest.json`, it is the newest generation's that is whole.
    """
    if (store / MANIFEST).exists():
        return read_manifest(store)
    left = newest_intact(store)
    return None if left is None else read_manifest(store, int(left.stem))


@contextmanager
def changing(store: Path) -> Iterator[Manifest]:
    """Hold the lock of a store that is there, and give its newest generation, what an interrupted run left taken into it.

    Raises:
        StoreError: where there is no store, a pending shard cannot be sealed, or the store cannot be written.
        LockedError: where another process changes the store.
    """
    if newest_manifest(store) is None:
        read_manifest(store)  # says what is wrong
    prepare_store(store)
    with lock_store(store):
        try:
            manifest = newest_manifest(store) or read_manifest(store)  # again: the lock is ours only now
            if not (store / MANIFEST).exists():  # lost between two writes of a crash
                manifest = write_manifest(store, manifest)
            yield publish(store, manifest, adopt(store, manifest), ())
        except OSError as error:
            raise StoreError(f"{store} cannot be changed: {error.strerror or error}; run the same command again") from error


def adopt(store: Path, manifest: Manifest) -> list[str]:
    """Finish what an interrupted run left: seal pending shards, and name all shards that no generation lists yet.

    A retired shard is never named, nor is a copy that an interrupted compact left: the rows of both are, or were, in other
    shards, and what has been dropped from those since would come back with them.

    Raises:
        LockedError: where a shard's writer is still at work: a rank whose rank 0 is gone, and which has not noticed yet.
        StoreError: where a pending shard cannot be sealed.
    """
    with explaining(store):
        return _adopt(store, manifest)


def _adopt(store: Path, manifest: Manifest) -> list[str]:
    _remove_copies(store, manifest)
    for path in sorted((store / "pending").glob("*.lmdb")):
        lock = path.with_suffix(".lock")
        with FileLock(lock):  # nobody takes it again: a name has one writer
            # one that ends before LMDB's first two pages was never committed to
            has_rows = path.exists() and path.stat().st_size >= 2 * mmap.PAGESIZE
        if has_rows and not shard_paths(store, path.stem).lmdb.exists():
            seal_apart(store, path.stem)
        path.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
    for left in (*(store / "pending").glob("*.sealing"), *store.glob("*.tmp"), *store.glob("*/*.tmp")):
        left.unlink()
    known = {*(shard.name for shard in manifest.shards), *manifest.retired}
    found = {path.stem for path in (store / "shards").glob("*.lmdb")} - known
    return sorted(name for name in found if not name.startswith(COPY_PREFIX))


def _remove_copies(store: Path, manifest: Manifest) -> None:
    """Remove what an interrupted compact left; a copy that any generation lists stays."""
    for path in (store / "pending").glob(f"{COPY_PREFIX}*"):
        path.unlink()
    known = {*(shard.name for shard in manifest.shards), *manifest.retired}
    left = [path for path in (store / "shards").glob(f"{COPY_PREFIX}*") if path.name.partition(".")[0] not in known]
    if not left:
        return
    try:  # where an older manifest was put back, newer generations list what it does not
        known |= {shard.name for n in generations(store) for shard in read_manifest(store, n).shards}
    except StoreError:
        return  # nobody knows what a damaged generation lists
    for path in left:
        if path.name.partition(".")[0] not in known:
            path.unlink()


def publish(store: Path, manifest: Manifest, new: Iterable[str], dropped: Iterable[bytes]) -> Manifest:
    """Publish the next generation: with the sealed shards `new`, and without the samples whose digests are `dropped`.

    A sample that a new shard holds replaces the one of the same id in an older shard. Where nothing changes, nothing is
    written and `manifest` is given back.

    Raises:
        StoreError: where a shard's files are missing, or its columns are not those of the store's bucket.
    """
    with explaining(store):
        return _publish(store, manifest, new, dropped)


def _publish(store: Path, manifest: Manifest, new: Iterable[str], dropped: Iterable[bytes]) -> Manifest:
    buckets = {bucket.name: bucket for bucket in manifest.buckets}
    added: list[ShardEntry] = []
    for name in sorted(new):
        entry, own = describe_shard(store, name, manifest)
        for bucket in own:
            if buckets.setdefault(bucket.name, bucket) != bucket:
                raise StoreError(f"shard {name} has other columns in {bucket.name} than the store's other shards")
        added.append(entry)
    generation = next_generation(store, manifest)
    newer = as_keys(list(dropped))  # what an older shard's rows give way to, gathered from the newest shard back
    shards: list[ShardEntry] = []
    for entry in reversed((*manifest.shards, *added)):
        shards.insert(0, _without(store, entry, newer, generation))
        if entry in added:
            keys = SealedShard(store, entry).index.slice("digest", 0, entry.samples).reshape(-1).view(KEY)
            newer = np.concatenate([newer, keys])
    if tuple(shards) == manifest.shards:
        return manifest
    ordered = tuple(buckets[name] for name in sorted(buckets))
    return publish_shards(store, dataclasses.replace(manifest, buckets=ordered), shards, generation)


def publish_shards(store: Path, manifest: Manifest, shards: Sequence[ShardEntry], generation: int) -> Manifest:
    """Publish `manifest` anew as `generation`, made of `shards`; those that are in it no more are retired."""
    names = {shard.name for shard in shards}
    before = {*manifest.retired, *(shard.name for shard in manifest.shards)}
    retired = tuple(sorted(name for name in before - names if shard_paths(store, name).lmdb.exists()))
    try:
        changed = dataclasses.replace(manifest, generation=generation, shards=tuple(shards), retired=retired)
    except ValueError as error:
        raise CorruptError(f"{store / 'shards'}: {error}; move that shard away and pack again") from error
    return write_manifest(store, changed)


def next_generation(store: Path, manifest: Manifest) -> int:
    """Give a number that no generation has had, also where an older manifest was put back."""
    return 1 + max([manifest.generation, *generations(store)])


def describe_shard(store: Path, name: str, manifest: Manifest) -> tuple[ShardEntry, list[BucketEntry]]:
    """Make a sealed shard's manifest entry, and its buckets' entries, out of its files.

    Raises:
        StoreError: where a file is missing.
        CorruptError: where the sidecars or a block's header are damaged.
    """
    paths = shard_paths(store, name)
    files = []
    for path in (paths.lmdb, paths.extents, paths.index):
        try:
            num_bytes, digest = file_digest(path)
        except FileNotFoundError as error:
            raise StoreError(f"{path} is missing beside its shard; move {paths.lmdb} away and pack again") from error
        files.append(FileEntry(num_bytes=num_bytes, digest=digest))
    extents = PagedFile(paths.extents, files[1].num_bytes, EXTENTS_FORMAT)
    spec = manifest.text.spec()
    fixed_bytes = sum(column.row_bytes for column in spec.fixed)
    try:
        groups = {
            group: decode(GroupEntry, {**place, "dropped": 0}) for group, place in dict(extents.metadata["groups"]).items()
        }
        text = decode(_TextTotals, extents.metadata["text"])
        entry = ShardEntry(
            name=name,
            shard_id=str(extents.metadata["shard_id"]),
            lmdb=files[0],
            extents=files[1],
            index=files[2],
            dropped=None,
            groups=groups,
            samples=sum(group.rows for name, group in groups.items() if name != TEXT_GROUP),
            record_bytes=0,
            caption_bytes=text.tokens * spec.token_bytes + groups[TEXT_GROUP].rows * fixed_bytes,
            max_tokens=text.max_tokens,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(
            f"{paths.extents} does not describe a shard ({error!r:.200}); move {paths.lmdb} away and pack again"
        ) from error
    shard = SealedShard(store, entry)
    record_bytes = int(shard.index.column("record_bytes").sum(dtype=np.int64))
    buckets = [_bucket_of(shard, group) for group in groups if group != TEXT_GROUP]
    return dataclasses.replace(entry, record_bytes=record_bytes), buckets


def _bucket_of(shard: SealedShard, group: str) -> BucketEntry:
    """Read a bucket's columns off the header of its first block."""
    place = shard.block_ranges(group, np.array([0]))
    block_bytes = int(place.length[0])
    head = shard.read(int(place.offset[0]), min(block_bytes, LENGTH_BYTES + MAX_HEADER_BYTES))
    tensors, _, _ = read_header(head, block_bytes, f"shard {shard.name}, block 0 of {group}")
    columns = tuple(Column(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape[1:]) for tensor in tensors)
    return bucket_entry(BlockSpec(bucket=group, columns=columns))


def _without(store: Path, entry: ShardEntry, digests: NDArray[np.bytes_], generation: int) -> ShardEntry:
    """Give a shard's entry after some samples are dropped (those that it has); their rows go on its sorted list."""
    shard = SealedShard(store, entry)
    rows: dict[str, list[int]] = {}
    record_bytes = entry.record_bytes
    there = digests[shard.positions(digests) >= 0] if len(digests) else digests
    for digest in set(there.tolist()):
        found = shard.find(digest.ljust(DIGEST_BYTES, b"\0"))
        if found is not None:
            rows.setdefault(found.bucket, []).append(found.row)
            record_bytes -= found.record_bytes
    if not rows:
        return entry
    merged = {
        group: np.union1d(shard.dropped_rows(group), np.array(rows.get(group, []), dtype="<u4"))
        for group in entry.groups
        if group != TEXT_GROUP
    }
    data = encode_dropped({group: values for group, values in merged.items() if len(values)})
    write_or_explain(shard.paths.dropped(generation), data)
    groups: Mapping[str, GroupEntry] = {
        name: dataclasses.replace(group, dropped=len(merged.get(name, ()))) for name, group in entry.groups.items()
    }
    return dataclasses.replace(
        entry,
        groups=dict(groups),
        record_bytes=record_bytes,
        dropped=DroppedEntry(generation=generation, num_bytes=len(data), digest=bytes_digest(data)),
    )


def encode_dropped(rows: dict[str, NDArray[np.uint32]]) -> bytes:
    """Give the file that lists dropped rows, sorted, by bucket; a bucket that is named has at least one."""
    groups, at = {}, 0
    for group, values in sorted(rows.items()):
        groups[group] = {"first": at, "count": len(values)}
        at += len(values)
    joined = np.concatenate([values for _, values in sorted(rows.items())])
    return encode_paged([("rows", "U32", joined)], {"format": DROPPED_FORMAT, "groups": groups})
