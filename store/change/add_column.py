"""Add a column to rows that are there: a file next to each shard, of the same rows in the same order; nothing is rewritten.

A file is complete when it has its name under `shards/`. Those that a killed call left are found again: the
next one begins at the first shard without one. All are published in one generation.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import LockedError, StoreError, UsageError
from bucketline.files.atomic_write import FileLock
from bucketline.option_value import expect, unlike
from bucketline.store.change.commit import commit_change, newest_base
from bucketline.store.format.block import DTYPES, FLIPPED_SUFFIX, ROLE, role_of, stored_name
from bucketline.store.format.schema import AddedColumn, ColumnEntry, column_spec
from bucketline.store.read.files import files_of_column
from bucketline.store.read.samples import live_positions
from bucketline.store.remote.generations import listed_generations, read_generation
from bucketline.store.remote.urls import is_url
from bucketline.store.shard.meta import ColumnMeta, column_files, read_column_meta
from bucketline.store.write.column import ADDING_LOCK, digest_of_dropped, write_column_shard
from bucketline.store.write.publish import prepare_store, remove_unfinished
from bucketline.store.write.row_form import checked_arrays, dtype_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from bucketline.store.format.block import BlockSpec
    from bucketline.store.format.manifest import Manifest, ShardEntry
    from bucketline.store.read.store import Store
    from bucketline.store.shard.reader import SealedShard
    from bucketline.store.write.publish import ChangeBase

_ENTRIES = 256  # index entries read at a time


class ColumnForms:
    """A column's dtype and its shape in each bucket, as the first values say; every other value must be alike."""

    def __init__(self, manifest: Manifest, name: str) -> None:
        """Begin with what the store has: of the column itself, and of the one whose mirror image it is."""
        self.name = name
        self._axes = {bucket.name: tuple(axis.name for axis in bucket.axes) for bucket in manifest.buckets}
        base = stored_name(role_of(name).removesuffix(FLIPPED_SUFFIX))
        self._known: dict[str, ColumnEntry] = {}
        for column in (base, name):
            self._known |= {own.name: own.columns[column] for own in manifest.buckets if column in own.columns}
            self._known |= manifest.added[column].buckets if column in manifest.added else {}
        self.found: dict[str, ColumnEntry] = {}  # by bucket, of values that were given

    def note(self, forms: Mapping[str, ColumnEntry]) -> None:
        """Take the forms of values that were given before."""
        for bucket, form in forms.items():
            known = self.found.setdefault(bucket, self._known.get(bucket, form))
            if known != form:
                raise UsageError(
                    f"column {self.name!r} of {bucket} has {_shown(known)}, and a killed call left values of {_shown(form)}; "
                    "`store compact --gc` removes these"
                )

    def bytes_of(self, sample_id: str, bucket: str, value: Any) -> bytes:  # noqa: ANN401 - an array or a tensor
        item = f"sample {sample_id!r:.200}, column {self.name!r}"
        form = self.found.get(bucket) or self._known.get(bucket)
        others = iter(self.found.values() or self._known.values())
        dtype = (form or next(others, None) or ColumnEntry(dtype=_dtype_of(item, value), shape=())).dtype
        array = checked_arrays(item, [(self.name, dtype)], {self.name: value}, {self.name})[self.name]
        form = self.found.setdefault(bucket, form or ColumnEntry(dtype=dtype, shape=array.shape))
        if array.dtype != DTYPES[dtype] or array.shape != form.shape:
            raise UsageError(
                f"{item}: {array.dtype} {list(array.shape)}, the others of {bucket} are {_shown(form)}; give all values of a "
                "bucket one shape, and all buckets one dtype"
            )
        return array.tobytes()

    def spec(self, bucket: str) -> BlockSpec:
        """Return the columns of a bucket's blocks, once it has a value."""
        return column_spec(bucket, self._axes[bucket], self.name, self.found[bucket])


def _shown(form: ColumnEntry) -> str:
    return f"{form.dtype} {list(form.shape)}"


def _dtype_of(item: str, value: Any) -> str:  # noqa: ANN401 - anything
    try:
        dtype = dtype_of(value)
    except (
        ValueError,
        TypeError,
        RuntimeError,
    ):  # torch's, of a tensor that is sparse or has no data; numpy's, of a ragged list
        dtype = None
    if dtype is None:
        found = f"{type(value).__name__} of dtype {value.dtype!s:.40}" if hasattr(value, "dtype") else type(value).__name__
        raise UsageError(
            f"{item} is a {found}, expected an array of one of {', '.join(DTYPES)}, in this machine's order of bytes; "
            "give a numpy array or a dense tensor"
        )
    return dtype


class CalledValues:
    """The values of one shard's rows, which a function returns by id."""

    def __init__(self, shard: SealedShard, forms: ColumnForms, value_of: Callable[[str], Any]) -> None:
        self._shard, self._forms, self._value_of = shard, forms, value_of
        self.spec = forms.spec

    def rows(self, bucket: str) -> Iterator[bytes | None]:
        """Yield the value of each row of a bucket, in order; None for a row that is not live."""
        live = self._live(bucket)
        for is_live in self._shard.is_live(bucket).tolist():
            yield next(live) if is_live else None

    def _live(self, bucket: str) -> Iterator[bytes]:
        positions = live_positions(self._shard, bucket).astype(np.int64)
        for first in range(0, len(positions), _ENTRIES):
            for entry in self._shard.index_entries(positions[first : first + _ENTRIES]):
                sample_id = self._shard.record(entry).id
                try:
                    value = self._value_of(sample_id)
                except Exception as error:
                    error.add_note(f"This was the value of {self._forms.name!r} for sample {sample_id!r:.200}.")
                    raise
                if value is None:
                    raise StoreError(
                        f"sample {sample_id!r:.200} has no value of {role_of(self._forms.name)!r}; nothing was added: give "
                        "every sample one, such as zeros, or `store drop` it"
                    )
                yield self._forms.bytes_of(sample_id, bucket, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnAdded:
    """Result of adding a column."""

    generation: int  # newest generation afterwards
    rows: int  # that have got a value
    rows_without: int  # live rows that lack the column: another writer has added them meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """A column's files that no generation lists yet."""

    forms: ColumnForms
    files: dict[str, ColumnMeta]  # by shard
    shards: dict[str, SealedShard]  # by name, with the rows that were dropped when the files were made
    rows: int


def add_column(store: Path | str, name: str, values: Callable[[str], Any]) -> ColumnAdded:
    """Add a column to the rows of a store on a disk, and publish a generation with it; nothing that is there is written again.

    `name` is a role: `mask`, `audio`, `control/NAME`, `reference/NAME`, `features/NAME`, or one of these (or `target`) with
    `/flipped` appended. `values` returns the array or tensor of a sample's id, and is called shard by shard; of a
    mapping, its `get` does. All have one dtype, and those of a bucket one shape.

    Rows that have the column keep it, so a second call changes nothing, and one after new rows were packed gives it to these.
    A killed call begins again at its shard.

    Raises:
        UsageError: if the column cannot be added, or a value does not fit.
        StoreError: if a row has no value, or something cannot be read or written; nothing is published.
        LockedError: if another process adds a column, or changes the store when the values are to be published.
    """
    expect("a store's place", store or None, str | Path, "a path, such as 'photos.store'")
    expect("name", name, str, "a role, such as 'mask' or 'features/dino'")
    if is_url(store):
        raise UsageError(f"{store} is a URL; add the column to the store on a disk, and push it")
    if not callable(values):
        raise unlike("values", values, "a function of an id; of a mapping, its get")
    if not ROLE.fullmatch(role_of(name)):
        raise UsageError(
            f"name is {name!r:.80}, expected mask, audio, control/NAME, reference/NAME or features/NAME, or one of "
            "these with /flipped appended, for mirror images"
        )
    path = Path(store)
    with newest_base(path):
        prepare_store(path)
    with FileLock(path / "pending" / ADDING_LOCK):
        with newest_base(path) as base:
            made = _make(base.store, path, name, values)
        try:
            _, after = commit_change(path, lambda base: _with_column(base, made), adopting=False)
        except LockedError as error:
            raise LockedError(f"{error}; the values are kept: the same call publishes them then") from error
    return ColumnAdded(
        generation=after.generation,
        rows=made.rows,
        rows_without=sum(entry.live_samples for entry in after.shards if made.forms.name not in entry.added),
    )


def _make(store: Store, path: Path, role: str, values: Callable[[str], Any]) -> _Made:
    """Write the files of a column for the shards that lack it, and publish nothing."""
    name = stored_name(role)
    if holders := [bucket.name for bucket in store.manifest.buckets if name in bucket.columns]:
        raise UsageError(
            f"{store.place} has a column {role!r} already, written with the rows of {holders[0]}; choose another name"
        )
    base = stored_name(role_of(name).removesuffix(FLIPPED_SUFFIX))
    has_base = base in store.manifest.added or all(base in bucket.columns for bucket in store.manifest.buckets)
    if base != name and not has_base:
        raise UsageError(f"{role!r} is the mirror image of {role_of(base)!r}, which {store.place} lacks; add that first")
    remove_unfinished(path)
    forms = ColumnForms(store.manifest, name)
    files = _left_by_a_killed_call(store, path, name, forms)
    rows = sum(entry.live_samples for entry in store.manifest.shards if entry.name in files)
    for shard in store.shards:
        if shard.name in files or name in shard.entry.added or not shard.entry.live_samples:
            continue
        files[shard.name] = write_column_shard(path, shard, name, CalledValues(shard, forms, values))
        rows += shard.entry.live_samples
    shards = {shard.name: shard for shard in store.shards if shard.name in files}
    return _Made(forms=forms, files=files, shards=shards, rows=rows)


def _left_by_a_killed_call(store: Store, path: Path, name: str, forms: ColumnForms) -> dict[str, ColumnMeta]:
    """Return the intact files of a column that no generation has listed, by shard, and note the forms of their values.

    What an earlier generation lists was taken back, or damaged, and is not taken again; nor is what was made while other rows
    were dropped: if a restore brought them back, they have no value there.
    """
    if not (there := column_files(path)):
        return {}
    listed = {entry.column_shard(column).name for entry in _every_entry(store) for column in entry.added}
    shards = {shard.name: shard for shard in store.shards if name not in shard.entry.added and shard.entry.live_samples}
    left = dict[str, ColumnMeta]()
    for file in there:
        shard = shards.get(file.partition(".")[0])
        if file in listed or shard is None:
            continue
        try:
            found = read_column_meta(path, file)
        except StoreError:
            continue  # it is damaged, and made again
        made_for = (found.column, found.rows_of, found.dropped)
        if made_for == (name, shard.entry.shard_id, digest_of_dropped(shard)):
            left[shard.name] = found
            forms.note(found.forms)
    return left


def _every_entry(store: Store) -> Iterator[ShardEntry]:
    yield from store.manifest.shards
    for generation in listed_generations(store.folder):
        with suppress(StoreError):
            yield from read_generation(store.folder, generation, store.manifest).shards


def _with_column(base: ChangeBase, made: _Made) -> Manifest:
    """Return the base's manifest with a column for the shards that its files were made for; the same one if there are none.

    Shards that have it meanwhile, are not listed any more, or have rows again that were dropped when their values were
    requested, stay as they are.
    """
    manifest, name = base.manifest, made.forms.name
    shards = tuple(
        dataclasses.replace(entry, added={**entry.added, name: found.entry})
        if (found := made.files.get(entry.name)) and name not in entry.added and _fits(base, entry, made, found)
        else entry
        for entry in manifest.shards
    )
    if shards == manifest.shards:
        return manifest
    before = manifest.added.get(name, AddedColumn(role=role_of(name), buckets={})).buckets
    if other := [bucket for bucket, form in made.forms.found.items() if before.get(bucket, form) != form]:
        raise StoreError(
            f"{base.folder.place('')}: another writer has added {name!r} in another form to {other[0]}; choose another name"
        )
    for entry, without in zip(shards, manifest.shards, strict=True):
        for file, _ in files_of_column(base.made, entry, name) if entry is not without else ():
            if not file.exists():
                raise StoreError(f"{file} is gone; nothing was added: rerun the call")
    column = AddedColumn(role=role_of(name), buckets={**before, **made.forms.found})
    return dataclasses.replace(manifest, added={**manifest.added, name: column}, shards=shards)


def _fits(base: ChangeBase, entry: ShardEntry, made: _Made, found: ColumnMeta) -> bool:
    """Return whether a column's file is of a shard as it is now: every live row was live when the file was made."""
    then, now = made.shards[entry.name], base.shard(entry)
    if found.rows_of != entry.shard_id or found.dropped == digest_of_dropped(now):
        return found.rows_of == entry.shard_id
    return all(bool((then.is_live(bucket) | ~now.is_live(bucket)).all()) for bucket in entry.live)
