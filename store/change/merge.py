"""Merge stores on a disk into a new one: shards are copied file by file and verified by digest, never through LMDB.

No sample may be in two of the stores. The new store is built in a hidden folder next to it and renamed at the end.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import CorruptError, FingerprintError, StoreError, UsageError
from bucketline.files.atomic_write import copy_some, refuse_existing, refuse_too_little_disk, staged_folder, write_durably
from bucketline.store.format.block import bytes_digest, file_digest, sample_digest
from bucketline.store.format.manifest import DroppedEntry, dropped_path, sealed, write_manifest
from bucketline.store.format.text import TextError
from bucketline.store.read.files import files_of
from bucketline.store.read.store import Store
from bucketline.store.shard.sidecar import dropped_counts, encode_dropped, open_listed
from bucketline.store.write.publish import prepare_store
from bucketline.typed_json import encode, first_difference

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bucketline.store.format.manifest import FileEntry, Manifest, ShardEntry
    from bucketline.store.format.schema import AddedColumn, BucketEntry
    from bucketline.typed_json import Json

_GENERATION = 1  # of a merged store: 0 is the empty store
_CHUNK_BYTES = 64 << 20  # per system call; progress is reported after each
_NAMED = 5  # ids that an error lists by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Result of a merge or of its dry run."""

    samples: int
    shards: int
    num_bytes: int  # of the copied files


def merge(
    out: Path,
    sources: Sequence[Path],
    *,
    dry_run: bool = False,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005
) -> Merged:
    """Create the store `out` from all live samples of `sources`, each at its newest generation, opened read-only.

    Ids that one store withdrew stay so, unless another store has the sample.
    `on_bytes` is called with the bytes copied so far and in total. If anything fails, `out` does not exist.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100 - keeps its links unresolved
    _refuse_places(out, sources)
    stores = [Store.open(source) for source in sources]
    buckets, added = _agreed_buckets(stores), _added_to(stores)
    _refuse_common(stores)
    parts = [(store.path, entry) for store in stores for entry in store.manifest.shards if entry.live_samples]
    total = sum(file.num_bytes for path, entry in parts for _, file in files_of(path, entry))
    refuse_too_little_disk(out.parent, total, f"merging into {out}")
    samples = sum(entry.live_samples for _, entry in parts)
    done = [0]

    def copied(num_bytes: int) -> None:
        done[0] += num_bytes
        on_bytes(done[0], total)

    if not dry_run:
        with staged_folder(out) as folder:
            prepare_store(folder)
            names = _names([entry for _, entry in parts])
            shards = tuple(_copy(folder, path, entry, name, copied) for (path, entry), name in zip(parts, names, strict=True))
            error = TextError.joined(store.manifest.text_error for store in stores)
            more: dict[str, Any] = {"buckets": buckets, "shards": shards, "retired": (), "added": added, "text_error": error}
            own: dict[str, Any] = {"store_id": uuid.uuid4().hex, "generation": _GENERATION, "withdrawn": _withdrawn(stores)}
            own["dropped"] = _list_dropped(folder, stores)
            merged = replace(stores[0].manifest, **own, **more)
            written = write_manifest(folder, sealed(merged))
            if written.samples != samples:
                raise AssertionError(f"expected {samples} merged samples, the store has {written.samples}")
    return Merged(samples=samples, shards=len(parts), num_bytes=total)


def _refuse_places(out: Path, sources: Sequence[Path]) -> None:
    if not sources:
        raise UsageError(f"there is nothing to merge into {out}; name one store or more")
    refuse_existing(out, "path")
    above = [Path(os.path.realpath(out.parent)), *Path(os.path.realpath(out.parent)).parents]
    for n, source in enumerate(sources):
        if not source.exists():
            continue  # opening it raises the precise error
        if any(folder.samefile(source) for folder in above):
            raise UsageError(f"{out} is inside the store {source}; choose a place outside of all the stores")
        if any(source.samefile(other) for other in sources[:n]):
            raise UsageError(f"the store {source} is named twice; name each store once")


def _agreed_buckets(stores: Sequence[Store]) -> tuple[BucketEntry, ...]:
    buckets: dict[str, tuple[BucketEntry, Path]] = {}
    for store in stores:
        _compare("", fingerprint_of(stores[0].manifest), fingerprint_of(store.manifest), stores[0].path, store.path)
        for bucket in store.manifest.buckets:
            stored, path = buckets.setdefault(bucket.name, (bucket, store.path))
            _compare(f"buckets.{bucket.name}", encode(stored), encode(bucket), path, store.path)
    return tuple(buckets[name][0] for name in sorted(buckets))


def _added_to(stores: Sequence[Store]) -> dict[str, AddedColumn]:
    """Return the added columns of all stores; rows of those that lack one lack it in the merged store."""
    added: dict[str, AddedColumn] = {}
    holders: dict[tuple[str, str], Path] = {}
    for store in stores:
        for name, column in store.manifest.added.items():
            before = added.get(name, column).buckets
            for bucket, form in column.buckets.items():
                path = holders.setdefault((name, bucket), store.path)
                _compare(f"added.{name}.{bucket}", encode(before.get(bucket, form)), encode(form), path, store.path)
            added[name] = replace(column, buckets={**column.buckets, **before})
    return added


def fingerprint_of(manifest: Manifest) -> Json:
    """Return all that stores must have in common if their shards are to be in one store."""
    return {**manifest.settings(), "engine": manifest.engine}


def _compare(at: str, one: Json, two: Json, first: Path, second: Path) -> None:
    if difference := first_difference(one, two, at):
        field, first_value, second_value = difference
        raise FingerprintError(
            f"{first} was made with {field} = {first_value!s:.200}, {second} with {second_value!s:.200}; "
            "only stores with the same settings can be merged: pack one of the sources again with the "
            "other's"
        )


def _refuse_common(stores: Sequence[Store]) -> None:
    """Check that no sample, and no shard, is in two stores."""
    holders: dict[str, Path] = {}
    for store in stores:
        for entry in store.manifest.shards:
            if (first := holders.setdefault(entry.shard_id, store.path)) is not store.path:
                raise StoreError(
                    f"{first} and {store.path} both have the shard {entry.name}, as copies of one store do; merge only stores "
                    "without a common past"
                )
    own = [(store, shard, shard.keys()[shard.live_entries()]) for store in stores for shard in store.shards]
    if not own:
        return
    keys = np.concatenate([keys for _, _, keys in own])
    part = np.repeat(np.arange(len(own)), [len(keys) for _, _, keys in own])
    order = np.argsort(keys, kind="stable")
    again = np.flatnonzero(keys[order][1:] == keys[order][:-1])
    if not len(again):
        return
    named = []
    for at in again[:_NAMED].tolist():
        (first, shard, _), (second, _, _) = own[part[order[at]]], own[part[order[at + 1]]]
        found = shard.record(shard.index_entry(int(shard.positions(keys[order[at : at + 1]])[0])))
        named.append(f"{found.id!r} is in {first.path} and in {second.path}")
    more = f", and {len(again) - _NAMED} more" if len(again) > _NAMED else ""
    raise StoreError(
        f"{len(again)} samples are in two stores: {'; '.join(named)}{more}; `store drop` them from one of the stores first"
    )


def _withdrawn(stores: Sequence[Store]) -> tuple[str, ...]:
    """Return the ids that a store withdrew and no other has."""
    ids = {sample_id for store in stores for sample_id in store.manifest.withdrawn}
    return tuple(sorted(one for one in ids if not any(store.find_digest(sample_digest(one)) for store in stores)))


def _names(entries: Sequence[ShardEntry]) -> list[str]:
    """Return a unique name per shard: its own, or one with its id appended if that is taken."""
    names: list[str] = []
    for entry in entries:
        candidates = (entry.name, f"{entry.name[:91]}-{entry.shard_id[:8]}", f"{entry.name[:67]}-{entry.shard_id}")
        names.append(next(candidate for candidate in candidates if candidate not in names))
    return names


def _list_dropped(out: Path, stores: Sequence[Store]) -> DroppedEntry | None:
    """Write the list of the dropped rows of the copied shards, and return its entry."""
    live = [(store, entry) for store in stores for entry in store.manifest.shards if entry.live_samples]
    rows = [store.dropped.of(entry.name, group) for store, entry in live for group, _ in dropped_counts(entry)]
    if not rows:
        return None
    data = encode_dropped(rows)
    listed = DroppedEntry(generation=_GENERATION, num_bytes=len(data), digest=bytes_digest(data))
    write_durably(dropped_path(out, listed), data)
    return listed


def _copy(out: Path, store: Path, entry: ShardEntry, name: str, on_bytes: Callable[[int], None]) -> ShardEntry:
    """Copy a shard's files, and return its entry."""
    new = replace(entry, name=name)
    targets = (path for path, _ in files_of(out, new))
    for (source, expected), target in zip(files_of(store, entry), targets, strict=True):
        _copy_file(source, target, expected, on_bytes)
    return new


def _copy_file(source: Path, target: Path, expected: FileEntry, on_bytes: Callable[[int], None]) -> None:
    """Copy a file durably; `target` must not exist. Blocks are shared if the file system supports it."""
    with open_listed(source, expected.num_bytes) as reading, target.open("xb", buffering=0) as writing:
        left = expected.num_bytes
        while left and (count := copy_some(reading, writing.fileno(), min(left, _CHUNK_BYTES))):
            left -= count
            on_bytes(count)
        os.fsync(writing.fileno())
    if file_digest(target) != (expected.num_bytes, expected.digest):
        raise CorruptError(f"{source} is damaged: its digest is not the manifest's; run `store verify`")
