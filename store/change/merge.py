"""Merge stores into a new one: shards are copied file by file and verified by digest, never through LMDB.

The new store is built in a hidden folder next to it and renamed at the end.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from bucketline.dtype_names import dtype_name
from bucketline.errors import FingerprintError, UsageError
from bucketline.files.atomic_folder import refuse_existing, staged_folder
from bucketline.files.atomic_write import move_durably, write_durably
from bucketline.files.disk_space import refuse_too_little_disk
from bucketline.store.change.commit import work_folder
from bucketline.store.change.copy_file import copy_file
from bucketline.store.change.merge_rows import merged_parts
from bucketline.store.format.hashing import bytes_digest
from bucketline.store.format.layout import shard_paths
from bucketline.store.format.manifest import sealed, write_manifest
from bucketline.store.format.manifest_entries import DroppedEntry
from bucketline.store.read.store import Store
from bucketline.store.remote.generations import newest_generation
from bucketline.store.transfer.download import Downloader
from bucketline.store.write.publish import encode_dropped, prepare_store
from bucketline.typed_json import encode, first_difference

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bucketline.store.change.merge_rows import MergedShard
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.manifest_entries import FileEntry, ShardEntry
    from bucketline.store.format.schema import AddedColumn, BucketEntry
    from bucketline.store.remote.cache.remote_source import RemoteSource
    from bucketline.store.remote.objects import ObjectFolder
    from bucketline.typed_json import Json

_TEXT_DTYPE = "encoders.text_encoder.stored_dtype"
_GENERATION = 1  # of a merged store: 0 is the empty store


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Result of a merge or of its dry run."""

    samples: int
    shards: int
    replaced: int  # samples of earlier stores replaced by a later store's
    num_bytes: int  # of the copied files


def merge(
    out: Path,
    sources: Sequence[Path | ObjectFolder],
    *,
    replace: bool = False,
    dry_run: bool = False,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005
) -> Merged:
    """Create the store `out` from all live samples of `sources`, each at its newest generation, opened read-only.

    Of a store in object storage, indexes are read where it is, and only shards with live samples are got. With `replace`, a
    later store's sample replaces an earlier one's with the same id. `on_bytes` is called with the bytes copied so far and in
    total. If anything fails, `out` does not exist.

    Raises:
        UsageError: if `out` exists or is in a source, or there are no sources.
        FingerprintError: if the stores have different provenance, naming the first field that differs.
        StoreError: if two stores have a sample of the same id, a file is missing, or the disk cannot hold the copies.
        CorruptError: if a file's digest differs from its manifest's.
        LockedError: if another process merges to the same output.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100 - keeps its links unresolved
    _refuse_places(out, sources)
    with work_folder() as work:
        stores = [
            Store.open(source) if isinstance(source, Path) else Store.at(source, newest_generation(source), work.cache)
            for source in sources
        ]
        for store in stores:
            store.fetch_indexes()
        return _merged(out, stores, replace=replace, dry_run=dry_run, on_bytes=on_bytes)


def _merged(
    out: Path, stores: Sequence[Store], *, replace: bool, dry_run: bool, on_bytes: Callable[[int, int], None]
) -> Merged:
    buckets, added = _agreed_buckets(stores), added_to(stores)
    parts, num_replaced = merged_parts(stores, replace=replace)
    total = sum(file.num_bytes for part in parts for _, file in _files(part))
    refuse_too_little_disk(out.parent, total, f"merging into {out}")
    samples = sum(part.samples for part in parts)
    done = [0]

    def copied(num_bytes: int) -> None:
        done[0] += num_bytes
        on_bytes(done[0], total)

    if not dry_run:
        with staged_folder(out) as folder:
            prepare_store(folder)
            _fetch_sidecars(parts)
            shards = [_copy(folder, part, name, copied) for part, name in zip(parts, _names(parts), strict=True)]
            first = stores[0].manifest
            manifest = dataclasses.replace(
                first,
                store_id=uuid.uuid4().hex,
                generation=_GENERATION,
                buckets=buckets,
                shards=tuple(shards),
                retired=(),
                added=added,
            )
            written = write_manifest(folder, sealed(manifest))
            if written.samples != samples:
                raise AssertionError(f"expected {samples} merged samples, the store has {written.samples}")
    return Merged(samples=samples, shards=len(parts), replaced=num_replaced, num_bytes=total)


def _refuse_places(out: Path, sources: Sequence[Path | ObjectFolder]) -> None:
    if not sources:
        raise UsageError(f"there is nothing to merge into {out}; name one store or more")
    refuse_existing(out, "path")
    above = [Path(os.path.realpath(out.parent)), *Path(os.path.realpath(out.parent)).parents]
    paths = [source for source in sources if isinstance(source, Path)]
    for n, source in enumerate(paths):
        if not source.exists():
            continue  # opening it raises the precise error
        if any(folder.samefile(source) for folder in above):
            raise UsageError(f"{out} is inside the store {source}; choose a place outside of all the stores")
        if any(source.samefile(other) for other in paths[:n]):
            raise UsageError(f"the store {source} is named twice; name each store once")


def _agreed_buckets(stores: Sequence[Store]) -> tuple[BucketEntry, ...]:
    """Return the buckets of all stores.

    Raises:
        FingerprintError: if the stores, or buckets of the same name, have different provenance.
    """
    buckets: dict[str, tuple[BucketEntry, Path | str]] = {}
    for store in stores:
        _compare("", fingerprint_of(stores[0].manifest), fingerprint_of(store.manifest), stores[0].place, store.place)
        for bucket in store.manifest.buckets:
            stored, path = buckets.setdefault(bucket.name, (bucket, store.place))
            _compare(f"buckets.{bucket.name}", encode(stored), encode(bucket), path, store.place)
    return tuple(buckets[name][0] for name in sorted(buckets))


def added_to(stores: Sequence[Store]) -> dict[str, AddedColumn]:
    """Return the added columns of all stores; rows of those that lack one lack it in the merged store.

    Raises:
        FingerprintError: if two stores have one in different forms.
    """
    added: dict[str, AddedColumn] = {}
    holders: dict[tuple[str, str], Path | str] = {}
    for store in stores:
        for name, column in store.manifest.added.items():
            before = added.get(name, column).buckets
            for bucket, form in column.buckets.items():
                path = holders.setdefault((name, bucket), store.place)
                _compare(f"added.{name}.{bucket}", encode(before.get(bucket, form)), encode(form), path, store.place)
            added[name] = dataclasses.replace(column, buckets={**column.buckets, **before})
    return added


def fingerprint_of(manifest: Manifest) -> Json:
    """Return all that stores must have in common if their shards are to be in one store."""
    return {**manifest.settings(), "engine": manifest.engine}


def _compare(at: str, one: Json, two: Json, first: Path | str, second: Path | str) -> None:
    if difference := first_difference(one, two, at):
        field, first_value, second_value = difference
        dtypes = ""
        if field == _TEXT_DTYPE and first_value and second_value:
            dtypes = f": --text-dtype {dtype_name(str(first_value))} or {dtype_name(str(second_value))}"
        raise FingerprintError(
            f"{first} was made with {field} = {first_value!s:.200}, {second} with {second_value!s:.200}; "
            "only stores with the same settings can be merged: pack one of the sources again with the "
            f"other's{dtypes}"
        )


def _files(part: MergedShard) -> list[tuple[Path, FileEntry]]:
    paths, entry = part.shard.paths, part.shard.entry
    own = [(paths.extents, entry.extents), (paths.index, entry.index), (paths.lmdb, entry.lmdb)]
    columns = [(column, part.shard.column_shard(column).paths) for column in sorted(entry.added)]
    own += [(files.extents, entry.added[column].extents) for column, files in columns]
    return own + [(files.lmdb, entry.added[column].lmdb) for column, files in columns]


def _names(parts: Sequence[MergedShard]) -> list[str]:
    """Return a unique name per shard: its own, or one with its id appended if that is taken."""
    names: list[str] = []
    for part in parts:
        name, shard_id = part.shard.name, part.shard.entry.shard_id
        candidates = (name, f"{name[:91]}-{shard_id[:8]}", f"{name[:67]}-{shard_id}")
        names.append(next(candidate for candidate in candidates if candidate not in names))
    return names


def _fetch_sidecars(parts: Sequence[MergedShard]) -> None:
    """Get the sidecars of shards in object storage, many at a time."""
    for source in {part.shard.source for part in parts if part.shard.source is not None}:
        own = (file for part in parts if part.shard.source is source for file in _files(part))
        source.fetch([(path, file) for path, file in own if path.suffix != ".lmdb"])


def _copy(store: Path, part: MergedShard, name: str, on_bytes: Callable[[int], None]) -> ShardEntry:
    """Copy a shard's files and write its list of dropped rows. Return its entry."""
    paths = shard_paths(store, name)
    for source, file in _files(part):
        target = paths.folder / f"{name}{source.name.removeprefix(part.shard.name)}"
        if part.shard.source is None or source.suffix != ".lmdb":
            copy_file(source, target, file, on_bytes)
        else:
            here = store / "pending" / source.name
            Downloader(cast("RemoteSource", part.shard.source).objects, on_bytes=on_bytes).get_one(here, file)
            move_durably(here, target)
    entry, data = entry_of(part, _GENERATION)
    if entry.dropped is not None:
        write_durably(paths.dropped(entry.dropped.generation), data)
    return dataclasses.replace(entry, name=name)


def entry_of(part: MergedShard, generation: int) -> tuple[ShardEntry, bytes]:
    """Return a shard's entry with the part's dropped rows as of a generation, and their list, which is empty without any."""
    entry, data, dropped = part.shard.entry, b"", None
    if part.dropped:
        data = encode_dropped(part.dropped, entry.shard_id)
        dropped = DroppedEntry(generation=generation, num_bytes=len(data), digest=bytes_digest(data))
    groups = {
        group: dataclasses.replace(place, dropped=len(part.dropped.get(group, ()))) for group, place in entry.groups.items()
    }
    return dataclasses.replace(entry, groups=groups, record_bytes=part.record_bytes, dropped=dropped), data
