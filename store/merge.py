"""Merging stores into a new one: their shards copied file by file, checked by their digests, never through LMDB.

The new store is built aside, in a hidden folder beside it, and renamed at the end.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import FingerprintError, StoreError, UsageError
from bucketline.store.copied_file import copy_file
from bucketline.store.digests import bytes_digest
from bucketline.store.durable import sync_folder, write_durably
from bucketline.store.free_disk import refuse_too_little_disk
from bucketline.store.json_difference import first_difference
from bucketline.store.layout import shard_paths
from bucketline.store.manifest import MANIFEST, DroppedEntry, sealed, write_manifest
from bucketline.store.merged_rows import merged_parts
from bucketline.store.publish import encode_dropped, lock_store, prepare_store
from bucketline.store.reader import Store
from bucketline.store.typed_json import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bucketline.store.manifest import BucketEntry, FileEntry, Manifest, ShardEntry
    from bucketline.store.merged_rows import Part
    from bucketline.store.typed_json import Json

GENERATION = 1  # of a merged store: 0 is the empty one


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What was merged, or would be."""

    samples: int
    shards: int
    replaced: int  # samples of earlier stores that gave way to a later store's
    num_bytes: int  # of the files that were copied


def merge(
    out: Path,
    sources: Sequence[Path],
    *,
    replace: bool = False,
    dry_run: bool = False,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005
) -> Merged:
    """Make the store `out` of all live samples of `sources`, each at its newest generation; they are only read.

    With `replace`, a later store's sample takes the place of an earlier one's of the same id. `on_bytes` is told how many
    bytes are copied, of how many. Where anything fails, nothing stands under the name `out`.

    Raises:
        UsageError: where `out` exists or lies in a source, or there are no sources.
        FingerprintError: where the stores were not made alike, naming the first field that differs.
        StoreError: where two stores have a sample of the same id, a file is missing, or the disk cannot hold the copies.
        CorruptError: where a file is not what its manifest lists.
        LockedError: where another process merges into the same name.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100 - links in it stay as they are
    _refuse_places(out, sources)
    stores = [Store.open(path) for path in sources]
    buckets = _agreed_buckets(stores)
    parts, num_replaced = merged_parts(stores, replace=replace)
    total = sum(file.num_bytes for part in parts for _, file in _files(part))
    refuse_too_little_disk(out.parent, total, f"merging into {out}")
    samples = sum(part.samples for part in parts)
    done = [0]

    def copied(num_bytes: int) -> None:
        done[0] += num_bytes
        on_bytes(done[0], total)

    if not dry_run:
        with _aside(out) as folder:
            shards = [_copy(folder, part, name, copied) for part, name in zip(parts, _names(parts), strict=True)]
            first = stores[0].manifest
            manifest = dataclasses.replace(
                first, store_id=uuid.uuid4().hex, generation=GENERATION, buckets=buckets, shards=tuple(shards), retired=()
            )
            written = write_manifest(folder, sealed(manifest))
            if written.samples != samples:
                raise AssertionError(f"{samples} samples were to be merged, the store has {written.samples}")
    return Merged(samples=samples, shards=len(parts), replaced=num_replaced, num_bytes=total)


def _refuse_places(out: Path, sources: Sequence[Path]) -> None:
    if not sources:
        raise UsageError(f"there is nothing to merge into {out}; name one store or more")
    if os.path.lexists(out):
        raise UsageError(f"{out} exists; name a path where there is nothing")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent} is no folder; make it first, or choose another place for {out.name}")
    above = [Path(os.path.realpath(out.parent)), *Path(os.path.realpath(out.parent)).parents]
    for n, source in enumerate(sources):
        if not source.exists():
            continue  # opening it says what is wrong
        if any(folder.samefile(source) for folder in above):
            raise UsageError(f"{out} lies inside the store {source}; choose a place outside of all the stores")
        if any(source.samefile(other) for other in sources[:n]):
            raise UsageError(f"the store {source} is named twice; name each store once")


def _agreed_buckets(stores: Sequence[Store]) -> tuple[BucketEntry, ...]:
    """Give the buckets of all stores.

    Raises:
        FingerprintError: where the stores, or buckets of the same name, were not made alike.
    """
    buckets: dict[str, tuple[BucketEntry, Path]] = {}
    for store in stores:
        _compare("", _fingerprint(stores[0].manifest), _fingerprint(store.manifest), stores[0].path, store.path)
        for bucket in store.manifest.buckets:
            stored, path = buckets.setdefault(bucket.name, (bucket, store.path))
            _compare(f"buckets.{bucket.name}", encode(stored), encode(bucket), path, store.path)
    return tuple(buckets[name][0] for name in sorted(buckets))


def _fingerprint(manifest: Manifest) -> Json:
    return {
        "encoders": manifest.encoders,
        "rules": manifest.rules,
        "max_captions": manifest.max_captions,
        "text": encode(manifest.text),
        "engine": manifest.engine,
    }


def _compare(at: str, one: Json, two: Json, first: Path, second: Path) -> None:
    if difference := first_difference(one, two, at):
        field, first_value, second_value = difference
        raise FingerprintError(
            f"{first} was made with {field} = {first_value!s:.200}, {second} with {second_value!s:.200}; "
            "stores are merged only where they were made alike: pack one of the sources anew"
        )


def _files(part: Part) -> list[tuple[Path, FileEntry]]:
    paths, entry = part.shard.paths, part.shard.entry
    return [(paths.extents, entry.extents), (paths.index, entry.index), (paths.lmdb, entry.lmdb)]


def _names(parts: Sequence[Part]) -> list[str]:
    """Give every shard a name of its own: the one that it has, or where another has that, one made of its id."""
    names: list[str] = []
    for part in parts:
        name, shard_id = part.shard.name, part.shard.entry.shard_id
        candidates = (name, f"{name[:91]}-{shard_id[:8]}", f"{name[:67]}-{shard_id}")
        names.append(next(candidate for candidate in candidates if candidate not in names))
    return names


def _copy(store: Path, part: Part, name: str, on_bytes: Callable[[int], None]) -> ShardEntry:
    """Copy a shard's files and write its list of dropped rows; give its entry."""
    paths = shard_paths(store, name)
    for (source, file), target in zip(_files(part), (paths.extents, paths.index, paths.lmdb), strict=True):
        copy_file(source, target, file, on_bytes)
    dropped = None
    if part.dropped:
        data = encode_dropped(part.dropped)
        write_durably(paths.dropped(GENERATION), data)
        dropped = DroppedEntry(generation=GENERATION, num_bytes=len(data), digest=bytes_digest(data))
    entry = part.shard.entry
    groups = {
        group: dataclasses.replace(place, dropped=len(part.dropped.get(group, ()))) for group, place in entry.groups.items()
    }
    return dataclasses.replace(entry, name=name, groups=groups, record_bytes=part.record_bytes, dropped=dropped)


@contextmanager
def _aside(out: Path) -> Iterator[Path]:
    """Give an empty store's folder beside `out`; it is renamed to `out` at the end, or removed where something fails."""
    folder = out.with_name(f".{out.name}.merging")
    prepare_store(folder)
    with lock_store(folder):
        try:
            for left in ("shards", "generations"):  # of a run that was killed
                shutil.rmtree(folder / left)
            (folder / MANIFEST).unlink(missing_ok=True)
            prepare_store(folder)
            yield folder
            for inner in (folder / "shards", folder / "pending", folder):
                sync_folder(inner)
            if os.path.lexists(out):
                raise UsageError(f"{out} exists by now; name a path where there is nothing")
            folder.rename(out)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise StoreError(
                f"{out} cannot be written: {error.strerror or error}; make room, or choose another disk"
            ) from error
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    sync_folder(out.parent)
