"""Add a column to rows that are there: a file next to each shard, of the same rows in the same order; nothing is rewritten.

A file is complete when it has its name under `shards/`. Those that a killed call left are found again, so that only the other
shards' values are requested. All are published in one generation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from bucketline.errors import LockedError, StoreError, UsageError
from bucketline.files.locks import FileLock
from bucketline.option_types import expect, unlike
from bucketline.store.change.column_values import (
    CalledValues,
    ColumnForms,
    ShardValues,
    Spool,
    SpooledValues,
    UnknownFormError,
    named,
)
from bucketline.store.change.commit import commit_change, newest_base
from bucketline.store.change.drop import NAMED_SAMPLES
from bucketline.store.format.columns import FLIPPED_SUFFIX, ROLE, role_of, stored_name
from bucketline.store.format.schema import AddedColumn
from bucketline.store.read.lost_files import files_of_column
from bucketline.store.remote.generations import listed_generations, read_generation
from bucketline.store.write.column_shard import (
    ADDING_LOCK,
    FoundColumn,
    column_files,
    describe_column_shard,
    digest_of_dropped,
    write_column_shard,
)
from bucketline.store.write.publish import prepare_store, remove_unfinished

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bucketline.store.change.commit import WorkFolder
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.manifest_entries import ShardEntry
    from bucketline.store.read.store import Store
    from bucketline.store.remote.objects import ObjectFolder
    from bucketline.store.shard.reader import SealedShard
    from bucketline.store.write.change_base import ChangeBase

Values: TypeAlias = Mapping[str, Any] | Iterable[tuple[str, Any]] | Callable[[str], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnAdded:
    """Result of adding a column."""

    generation: int  # newest generation afterwards
    rows: int  # that have got a value
    filled: int  # of them, those that have got the fill value
    ignored: int  # values of ids that the store lacks
    rows_without: int  # live rows that lack the column: another writer has added them meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeColumn:
    """A column's files that no generation lists yet."""

    name: str
    forms: ColumnForms
    files: dict[str, FoundColumn]  # by shard
    shards: dict[str, SealedShard]  # by name, with the rows that were dropped when the files were made
    rows: int
    filled: int
    ignored: int

    def result(self, newest: Manifest) -> ColumnAdded:
        """Return the result of adding the column, as of the newest generation."""
        return ColumnAdded(
            generation=newest.generation,
            rows=self.rows,
            filled=self.filled,
            ignored=self.ignored,
            rows_without=sum(entry.live_samples for entry in newest.shards if self.name not in entry.added),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRequest:
    """A column to add."""

    role: str
    values: Values
    fill: Any = None  # what rows without a value get; None: these are refused
    ignore_unknown: bool = False  # whether values of ids that the store lacks are left out, not refused

    @property
    def called(self) -> Callable[[str], Any]:
        """The function that returns the value of an id."""
        assert callable(self.values)
        return self.values

    def __post_init__(self) -> None:
        expect("name", self.role, str, "a role, such as 'mask' or 'features/dino'")
        if not callable(self.values) and not isinstance(self.values, Iterable):
            raise unlike("values", self.values, "pairs (id, array), a mapping, or a function of an id")
        if not ROLE.fullmatch(role_of(self.role)):
            raise UsageError(
                f"name is {self.role!r:.80}, expected mask, audio, control/NAME, reference/NAME or features/NAME, or one of "
                "these with /flipped appended, for mirror images"
            )


def add_to(place: Path | ObjectFolder, request: ColumnRequest, work: WorkFolder | None = None) -> ColumnAdded:
    """Add a column to a store; see `store.sync.add_column`. `work`: of a store in object storage."""
    path = work.made if work is not None else place
    assert isinstance(path, Path)
    with newest_base(place, work):
        prepare_store(path)
    with FileLock(path / "pending" / ADDING_LOCK):
        with newest_base(place, work) as base:
            made = make_column(base.store, path, request)
        try:
            _, after = commit_change(place, lambda base: with_column(base, made), adopting=False, work=work)
        except LockedError as error:
            raise LockedError(f"{error}; the values are kept: the same call publishes them then") from error
        if work is not None:  # they are in the bucket
            for entry in after.shards:
                for file, _ in files_of_column(path, entry, made.name) if made.name in entry.added else ():
                    file.unlink(missing_ok=True)
    return made.result(after)


def make_column(store: Store, path: Path, request: ColumnRequest) -> MadeColumn:
    """Write the files of a column for the shards that lack it, and publish nothing. Call under `ADDING_LOCK`.

    `path` is the folder of the files, laid out as a store: on a disk the store's.

    Raises:
        UsageError: if the column cannot be added, a value does not fit, or an id is given twice.
        StoreError: if rows get no value, or ids are unknown; the message has their number and the first of them.
    """
    name = stored_name(request.role)
    if holders := [bucket.name for bucket in store.manifest.buckets if name in bucket.columns]:
        raise UsageError(
            f"{store.place} has a column {request.role!r} already, written with the rows of {holders[0]}; choose another name"
        )
    base = stored_name(role_of(name).removesuffix(FLIPPED_SUFFIX))
    if (
        base not in store.manifest.added
        and any(base not in bucket.columns for bucket in store.manifest.buckets)
        and base != name
    ):
        raise UsageError(
            f"{request.role!r} is the mirror image of {role_of(base)!r}, which {store.place} lacks; add that first"
        )
    remove_unfinished(path)
    forms = ColumnForms(store.manifest, name)
    files = _left_by_a_killed_call(store, path, name, forms)
    lacking = [n for n, shard in enumerate(store.shards) if name not in shard.entry.added and shard.entry.live_samples]
    wanted = [n for n in lacking if store.shards[n].name not in files]
    if callable(request.values):
        return _written(store, path, request, forms, files, wanted, None)
    with closing(Spool(store, path, wanted, forms)) as spool:
        spool.take(request.values.items() if isinstance(request.values, Mapping) else request.values)
        if not request.ignore_unknown:
            spool.refuse_unknown()
        return _written(store, path, request, forms, files, wanted, spool)


def _written(
    store: Store,
    path: Path,
    request: ColumnRequest,
    forms: ColumnForms,
    files: dict[str, FoundColumn],
    wanted: list[int],
    spool: Spool | None,
) -> MadeColumn:
    """Write the files of a column for the shards `wanted`, whose values wait in `spool` or are requested."""
    forms.set_fill(request.fill)
    missing, filled = list[ShardValues](), 0
    rows = sum(entry.live_samples for entry in store.manifest.shards if entry.name in files)
    for n in wanted:
        shard = store.shards[n]
        own = SpooledValues(shard, forms, spool, n) if spool else CalledValues(shard, forms, request.called)
        found = _write_one(path, shard, forms.name, own, is_filled=request.fill is not None)
        rows, filled = rows + shard.entry.live_samples, filled + own.num_missing
        if found is None:
            missing.append(own)
        else:
            files[shard.name] = found
    _refuse_missing(store, request.role, missing)
    return MadeColumn(
        name=forms.name,
        forms=forms,
        files=files,
        shards={shard.name: shard for shard in store.shards if shard.name in files},
        rows=rows,
        filled=filled,
        ignored=spool.num_unknown if spool else 0,
    )


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


def _write_one(path: Path, shard: SealedShard, name: str, values: ShardValues, *, is_filled: bool) -> FoundColumn | None:
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


def _refuse_missing(store: Store, role: str, missing: list[ShardValues]) -> None:
    if number := sum(own.num_missing for own in missing):
        ids = [one for own in missing for one in own.missing][:NAMED_SAMPLES]
        raise StoreError(
            f"{number} of {store.manifest.samples} rows of {store.place} have no value of {role!r}: {named(ids, number)}; "
            "nothing was added; give them one, or a fill value for all of them (fill=0), or `store drop` them"
        )


def with_column(base: ChangeBase, made: MadeColumn) -> Manifest:
    """Return the base's manifest with a column for the shards that its files were made for; the same one if there are none.

    Shards that have it meanwhile, are not listed any more, or have rows again that were dropped when their values were
    requested, stay as they are.

    Raises:
        StoreError: if another writer has added a column of that name and another form, or a file is gone.
    """
    manifest = base.manifest
    shards = tuple(
        dataclasses.replace(entry, added={**entry.added, made.name: found.entry})
        if (found := made.files.get(entry.name)) and made.name not in entry.added and _fits(base, entry, made, found)
        else entry
        for entry in manifest.shards
    )
    if shards == manifest.shards:
        return manifest
    before = manifest.added.get(made.name, AddedColumn(role=role_of(made.name), buckets={})).buckets
    if other := [bucket for bucket, form in made.forms.found.items() if before.get(bucket, form) != form]:
        raise StoreError(
            f"{base.folder.place('')}: another writer has added {made.name!r} in another form to {other[0]}; choose "
            "another name"
        )
    for entry, without in zip(shards, manifest.shards, strict=True):
        for file, _ in files_of_column(base.made, entry, made.name) if entry is not without else ():
            if not file.exists():
                raise StoreError(f"{file} is gone; nothing was added: rerun the call")
    column = AddedColumn(role=role_of(made.name), buckets={**before, **made.forms.found})
    return dataclasses.replace(manifest, added={**manifest.added, made.name: column}, shards=shards)


def _fits(base: ChangeBase, entry: ShardEntry, made: MadeColumn, found: FoundColumn) -> bool:
    """Return whether a column's file is of a shard as it is now: every live row was live when the file was made."""
    if found.rows_of != entry.shard_id or found.dropped == digest_of_dropped(entry):
        return found.rows_of == entry.shard_id
    then, now = made.shards[entry.name], base.shard(entry)
    return all(bool((then.is_live(bucket) | ~now.is_live(bucket)).all()) for bucket in entry.live)
