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

from bucketline.command_line import counted
from bucketline.errors import LockedError, StoreError, UsageError
from bucketline.files.locks import FileLock
from bucketline.option_types import expect, unlike
from bucketline.store.change.commit import commit_change, newest_base
from bucketline.store.change.drop import NAMED_SAMPLES
from bucketline.store.format.columns import FLIPPED_SUFFIX, ROLE, role_of, stored_name
from bucketline.store.format.safetensors_header import DTYPES
from bucketline.store.format.schema import AddedColumn, ColumnEntry, column_spec
from bucketline.store.read.iter_samples import live_positions
from bucketline.store.read.lost_files import files_of_column
from bucketline.store.remote.generations import listed_generations, read_generation
from bucketline.store.remote.urls import is_url
from bucketline.store.write.describe import (
    ADDING_LOCK,
    FoundColumn,
    column_files,
    describe_column_shard,
    digest_of_dropped,
    write_column_shard,
)
from bucketline.store.write.publish import prepare_store, remove_unfinished
from bucketline.store.write.row_form import as_array, checked_arrays, dtype_of, is_finite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from bucketline.store.format.block import BlockSpec
    from bucketline.store.format.manifest import Manifest, ShardEntry
    from bucketline.store.read.store import Store
    from bucketline.store.shard.reader import SealedShard
    from bucketline.store.write.change_base import ChangeBase

_ENTRIES = 256  # index entries read at a time


class UnknownFormError(UsageError):
    """No value of a bucket was given, which would say what dtype and shape they have."""


class ColumnForms:
    """A column's dtype and its shape in each bucket, as the first values say; every other value must be alike."""

    def __init__(self, manifest: Manifest, name: str, fill: Any = None) -> None:  # noqa: ANN401 - a number or an array
        """Begin with what the store has: of the column itself, and of the one whose mirror image it is.

        `fill` is stored in rows that have no value.
        """
        self.name = name
        self._axes = {bucket.name: tuple(axis.name for axis in bucket.axes) for bucket in manifest.buckets}
        base = stored_name(role_of(name).removesuffix(FLIPPED_SUFFIX))
        self._known: dict[str, ColumnEntry] = {}
        for column in (base, name):
            self._known |= {own.name: own.columns[column] for own in manifest.buckets if column in own.columns}
            self._known |= manifest.added[column].buckets if column in manifest.added else {}
        self.found: dict[str, ColumnEntry] = {}  # by bucket, of values that were given
        self._fill = fill

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
        """Return a value's bytes."""
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
        """Return the columns of a bucket's blocks."""
        form = self.found.get(bucket) or self._known.get(bucket)
        if form is None:
            raise UnknownFormError(
                f"no row of {bucket} has a value of {self.name!r}, so its shape there is unknown; give one of them a value"
            )
        self.found[bucket] = form
        return column_spec(bucket, self._axes[bucket], self.name, form)

    def blank(self, bucket: str) -> bytes:
        """Return what rows without a value have: the fill value, or zeros."""
        column = self.spec(bucket).column(self.name)
        array = np.zeros(column.shape, dtype=column.numpy_dtype)
        if self._fill is not None:
            given = as_array(self._fill, column.dtype)
            is_bits = column.dtype == "BF16" or column.dtype.startswith("F8")
            try:
                array[...] = given
                is_same = bool((array == given).all()) and (not is_bits or given.dtype == array.dtype or not given.any())
            except (ValueError, TypeError, OverflowError):
                is_same = False
            if not is_same or not is_finite(array, column.dtype):
                raise UsageError(
                    f"fill is {self._fill!s:.80}, and {self.name!r} of {bucket} is {column.dtype} {list(column.shape)}; give a "
                    "finite number, or an array of them, that this holds exactly"
                )
        return array.tobytes()


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
    """The values of one shard's rows, which a function returns by id, and which live rows have none."""

    def __init__(self, shard: SealedShard, forms: ColumnForms, value_of: Callable[[str], Any]) -> None:
        self._shard, self._forms, self._value_of = shard, forms, value_of
        self._left = {bucket for bucket, live in shard.entry.live.items() if live}
        self.num_missing, self.missing = 0, list[str]()  # live rows without a value; the first ids

    def spec(self, bucket: str) -> BlockSpec:
        return self._forms.spec(bucket)

    def blank(self, bucket: str) -> bytes:
        return self._forms.blank(bucket)

    def rows(self, bucket: str) -> Iterator[bytes | None]:
        """Yield the value of each row of a bucket, in order; None for a row that is not live, or has none."""
        self._left.discard(bucket)
        live = self._live(bucket)
        for is_live in self._shard.is_live(bucket).tolist():
            yield next(live) if is_live else None

    def count_left(self) -> None:
        """Count the rows without a value in the buckets that were not read."""
        for bucket in sorted(self._left):
            for _ in self.rows(bucket):
                pass

    def _live(self, bucket: str) -> Iterator[bytes | None]:
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
                    self.num_missing += 1
                    self.missing += [sample_id] if len(self.missing) < NAMED_SAMPLES else []
                yield None if value is None else self._forms.bytes_of(sample_id, bucket, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnAdded:
    """Result of adding a column."""

    generation: int  # newest generation afterwards
    rows: int  # that have got a value
    filled: int  # of them, those that have got the fill value
    rows_without: int  # live rows that lack the column: another writer has added them meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """A column's files that no generation lists yet."""

    forms: ColumnForms
    files: dict[str, FoundColumn]  # by shard
    shards: dict[str, SealedShard]  # by name, with the rows that were dropped when the files were made
    rows: int
    filled: int


def add_column(
    store: Path | str,
    name: str,
    values: Callable[[str], Any],
    *,
    fill: Any = None,  # noqa: ANN401 - a number or an array
) -> ColumnAdded:
    """Add a column to the rows of a store on a disk, and publish a generation with it; nothing that is there is written again.

    `name` is a role: `mask`, `audio`, `control/NAME`, `reference/NAME`, `features/NAME`, or one of these (or `target`) with
    `/flipped` appended. `values` returns the array or tensor of a sample's id, or None, and is called shard by shard; of a
    mapping, its `get` does. All have one dtype, and those of a bucket one shape.

    Rows without a value are refused, or get `fill`, a number or an array. Rows that have the column keep it, so a second call
    changes nothing, and one after new rows were packed gives it to these. A killed call begins again at its shard.

    Raises:
        UsageError: if the column cannot be added, or a value does not fit.
        StoreError: if rows have no value, or something cannot be read or written; nothing is published.
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
            made = _make(base.store, path, name, values, fill)
        try:
            _, after = commit_change(path, lambda base: _with_column(base, made), adopting=False)
        except LockedError as error:
            raise LockedError(f"{error}; the values are kept: the same call publishes them then") from error
    return ColumnAdded(
        generation=after.generation,
        rows=made.rows,
        filled=made.filled,
        rows_without=sum(entry.live_samples for entry in after.shards if made.forms.name not in entry.added),
    )


def _make(store: Store, path: Path, role: str, values: Callable[[str], Any], fill: Any) -> _Made:  # noqa: ANN401
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
    forms = ColumnForms(store.manifest, name, fill)
    files = _left_by_a_killed_call(store, path, name, forms)
    rows = sum(entry.live_samples for entry in store.manifest.shards if entry.name in files)
    missing, filled = list[CalledValues](), 0
    for shard in store.shards:
        if shard.name in files or name in shard.entry.added or not shard.entry.live_samples:
            continue
        own = CalledValues(shard, forms, values)
        found = _write_one(path, shard, name, own, is_filled=fill is not None)
        rows, filled = rows + shard.entry.live_samples, filled + own.num_missing
        if found is None:
            missing.append(own)
        else:
            files[shard.name] = found
    if number := sum(own.num_missing for own in missing):
        ids = [one for own in missing for one in own.missing][:NAMED_SAMPLES]
        named = (
            f"{', '.join(f'{one!r:.200}' for one in ids)}{' and others' if number > len(ids) else ''} ({counted(number, 'id')})"
        )
        raise StoreError(
            f"{number} of {store.manifest.samples} rows of {store.place} have no value of {role!r}: {named}; nothing was "
            "added; give them one, or a fill value for all of them (fill=0), or `store drop` them"
        )
    shards = {shard.name: shard for shard in store.shards if shard.name in files}
    return _Made(forms=forms, files=files, shards=shards, rows=rows, filled=filled)


def _left_by_a_killed_call(store: Store, path: Path, name: str, forms: ColumnForms) -> dict[str, FoundColumn]:
    """Return the intact files of a column that no generation has listed, by shard, and note the forms of their values.

    What an earlier generation lists was taken back, or damaged, and is not taken again; nor is what was made while other rows
    were dropped: if a restore brought them back, they have no value there.
    """
    if not (there := column_files(path)):
        return {}
    listed = {entry.column_shard(column).name for entry in _every_entry(store) for column in entry.added}
    entries = {entry.name: entry for entry in store.manifest.shards if name not in entry.added and entry.live_samples}
    left = dict[str, FoundColumn]()
    for file in there:
        entry = entries.get(file.partition(".")[0])
        if file in listed or entry is None:
            continue
        try:
            found = describe_column_shard(path, file)
        except StoreError:
            continue  # it is damaged, and made again
        made_for = (found.column, found.rows_of, found.dropped)
        if made_for == (name, entry.shard_id, digest_of_dropped(entry)) and not found.filled:
            left[entry.name] = found
            forms.note(found.forms)
    return left


def _every_entry(store: Store) -> Iterator[ShardEntry]:
    """Yield the shards of all generations that can be read."""
    yield from store.manifest.shards
    for generation in listed_generations(store.folder):
        with suppress(StoreError):
            yield from read_generation(store.folder, generation, store.manifest).shards


def _write_one(path: Path, shard: SealedShard, name: str, values: CalledValues, *, is_filled: bool) -> FoundColumn | None:
    """Write a column's file for a shard; None, and no file, if rows have no value and are not filled."""
    try:
        found = write_column_shard(path, shard, name, values)
    except UnknownFormError:
        if is_filled:
            raise
        values.count_left()
        return None
    if is_filled or not values.num_missing:
        return found
    with_file = dataclasses.replace(shard.entry, added={name: found.entry})
    for file, _ in reversed(list(files_of_column(path, with_file, name))):
        file.unlink()
    return None


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


def _fits(base: ChangeBase, entry: ShardEntry, made: _Made, found: FoundColumn) -> bool:
    """Return whether a column's file is of a shard as it is now: every live row was live when the file was made."""
    if found.rows_of != entry.shard_id or found.dropped == digest_of_dropped(entry):
        return found.rows_of == entry.shard_id
    then, now = made.shards[entry.name], base.shard(entry)
    return all(bool((then.is_live(bucket) | ~now.is_live(bucket)).all()) for bucket in entry.live)
