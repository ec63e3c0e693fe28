"""The values that are given for an added column: checked, and brought into the order of the shards' rows.

Pairs of id and value come in any order: they wait in temporary files, one for each bucket, at the places of their rows.
"""

from __future__ import annotations

import os
import tempfile
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from bucketline.command_line import counted
from bucketline.errors import StoreError, UsageError
from bucketline.option_types import unlike
from bucketline.store.change.drop import NAMED_SAMPLES
from bucketline.store.format.columns import FLIPPED_SUFFIX, role_of, stored_name
from bucketline.store.format.hashing import sample_digest
from bucketline.store.format.safetensors_header import DTYPES
from bucketline.store.format.schema import ColumnEntry, column_spec
from bucketline.store.read.iter_samples import live_positions
from bucketline.store.shard.reader import KEY, as_keys
from bucketline.store.write.arrays import as_array, checked_arrays, dtype_of, is_finite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.format.block import BlockSpec
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.read.store import Store
    from bucketline.store.shard.reader import SealedShard

_ENTRIES = 256  # index entries read at a time


class UnknownFormError(UsageError):
    """No value of a bucket was given, which would say what dtype and shape they have."""


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
        self._fill: Any = None

    def set_fill(self, fill: Any) -> None:  # noqa: ANN401 - a number or an array
        """Store this in rows that have no value."""
        self._fill = fill

    def note(self, forms: Mapping[str, ColumnEntry]) -> None:
        """Take the forms of values that were given before.

        Raises:
            UsageError: if they differ from those that are known.
        """
        for bucket, form in forms.items():
            known = self.found.setdefault(bucket, self._known.get(bucket, form))
            if known != form:
                raise UsageError(
                    f"column {self.name!r} of {bucket} has {_shown(known)}, and a killed call left values of {_shown(form)}; "
                    "`store compact --gc` removes these"
                )

    def bytes_of(self, sample_id: str, bucket: str, value: Any) -> bytes:  # noqa: ANN401 - an array or a tensor
        """Return a value's bytes.

        Raises:
            UsageError: if it is not an array of the bucket's dtype and shape, or not finite.
        """
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
        """Return the columns of a bucket's blocks.

        Raises:
            UnknownFormError: if no value of the bucket was given.
        """
        form = self.found.get(bucket) or self._known.get(bucket)
        if form is None:
            raise UnknownFormError(
                f"no row of {bucket} has a value of {self.name!r}, so its shape there is unknown; give one of them a value"
            )
        self.found[bucket] = form
        return column_spec(bucket, self._axes[bucket], self.name, form)

    def blank(self, bucket: str) -> bytes:
        """Return what rows without a value have: the fill value, or zeros.

        Raises:
            UsageError: if the fill value cannot be stored exactly.
        """
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


class ShardValues:
    """The values of one shard's rows, and which live rows have none."""

    def __init__(self, shard: SealedShard, forms: ColumnForms) -> None:
        self._shard, self._forms = shard, forms
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
        for row, is_live in enumerate(self._shard.is_live(bucket).tolist()):
            value = next(live) if is_live else None
            if is_live and value is None:
                self.num_missing += 1
                if len(self.missing) < NAMED_SAMPLES:
                    self.missing += self._shard.names_of(bucket, [row]).values()
            yield value

    def count_left(self) -> None:
        """Count the rows without a value in the buckets that were not read."""
        for bucket in sorted(self._left):
            for _ in self.rows(bucket):
                pass

    def _live(self, bucket: str) -> Iterator[bytes | None]:
        """Yield the value of each live row of a bucket; None if it has none."""
        raise NotImplementedError


class CalledValues(ShardValues):
    """Values that a function returns by id; None for a row without one."""

    def __init__(self, shard: SealedShard, forms: ColumnForms, value_of: Callable[[str], Any]) -> None:
        super().__init__(shard, forms)
        self._value_of = value_of

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
                yield None if value is None else self._forms.bytes_of(sample_id, bucket, value)


class SpooledValues(ShardValues):
    """Values that were given with their ids."""

    def __init__(self, shard: SealedShard, forms: ColumnForms, spool: Spool, ordinal: int) -> None:
        super().__init__(shard, forms)
        self._spool, self._ordinal = spool, ordinal

    def _live(self, bucket: str) -> Iterator[bytes | None]:
        for row in np.flatnonzero(self._shard.is_live(bucket)).tolist():
            yield self._spool.value(self._ordinal, bucket, row)


class Spool:
    """Values by their rows' places: of each bucket a temporary file, which has no name and so ends with the process."""

    def __init__(self, store: Store, path: Path, ordinals: list[int], forms: ColumnForms) -> None:
        """Read the indexes of all shards. Values of shards that are not among `ordinals` are not kept. `path`: for files."""
        self._store, self._path, self._forms = store, path, forms
        self._files: dict[str, IO[bytes]] = {}
        self._names = [bucket.name for bucket in store.manifest.buckets]
        self._first: dict[tuple[int, str], int] = {}  # place of a shard's first row in a bucket's file
        num_rows = dict.fromkeys(self._names, 0)
        for n in ordinals:
            for bucket in store.shards[n].entry.live:
                self._first[n, bucket] = num_rows[bucket]
                num_rows[bucket] += store.shards[n].entry.groups[bucket].rows
        self._has = {bucket: np.zeros(count, dtype=bool) for bucket, count in num_rows.items()}
        keys, parts = [np.empty(0, dtype=KEY)], [np.empty((0, 3), dtype="<u4")]
        for n, shard in enumerate(store.shards):
            live = shard.live_entries()
            numbers = np.array([self._number(name) for name in shard.index.metadata["groups"]], dtype="<u4")
            rows, buckets = (shard.index.slice(name, 0, shard.entry.samples)[live] for name in ("row", "bucket"))
            keys.append(shard.keys()[live])
            parts.append(np.stack([np.full(len(rows), n, dtype="<u4"), numbers[buckets], rows], axis=1))
        joined = np.concatenate(keys)
        order = np.argsort(joined, kind="stable")
        self._keys: NDArray[np.bytes_] = joined[order]
        self._places = np.concatenate(parts)[order]  # [live rows, 3] shard, bucket, row
        self.num_unknown, self._unknown = 0, list[str]()

    def _number(self, name: str) -> int:
        return self._names.index(name) if name in self._names else 0  # `text` and ragged groups, which no sample is of

    def take(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Keep values, given with their ids.

        Raises:
            UsageError: if an id is given twice, or what is given are not pairs.
            StoreError: if the disk is full.
        """
        for given in pairs:
            pair: object = given
            if not (isinstance(pair, tuple) and len(pair) == 2):
                raise unlike("values", pair, "pairs (id, array), a mapping, or a function of an id")
            sample_id, value = pair
            key = as_keys([sample_digest(sample_id)])
            at = int(np.searchsorted(self._keys, key)[0])
            if at == len(self._keys) or self._keys[at] != key[0]:
                self.num_unknown += 1
                self._unknown += [sample_id] if len(self._unknown) < NAMED_SAMPLES else []
                continue
            ordinal, number, row = self._places[at].tolist()
            bucket = self._names[number]
            if (ordinal, bucket) in self._first:
                self._keep(sample_id, bucket, self._first[ordinal, bucket] + row, value)

    def _keep(self, sample_id: str, bucket: str, place: int, value: Any) -> None:  # noqa: ANN401 - as `bytes_of`
        if self._has[bucket][place]:
            raise UsageError(f"sample {sample_id!r:.200} is given two values of {self._forms.name!r}; give each id once")
        data = self._forms.bytes_of(sample_id, bucket, value)
        try:
            if bucket not in self._files:
                self._files[bucket] = tempfile.TemporaryFile(dir=self._path / "pending")  # noqa: SIM115 - see `close`
            os.pwrite(self._files[bucket].fileno(), data, place * len(data))
        except OSError as error:
            raise StoreError(f"{self._path / 'pending'} cannot be written: {error.strerror}; make room there") from error
        self._has[bucket][place] = True

    def refuse_unknown(self) -> None:
        """Check that the store has all ids.

        Raises:
            StoreError: if it lacks one, with the number and the first ones.
        """
        if self.num_unknown:
            raise StoreError(
                f"{self._store.place} has no sample {named(self._unknown, self.num_unknown)}; nothing was added; leave them "
                "out, or give ignore_unknown=True"
            )

    def value(self, ordinal: int, bucket: str, row: int) -> bytes | None:
        """Return the value of a row; None if there is none."""
        place = self._first[ordinal, bucket] + row
        if not self._has[bucket][place]:
            return None
        num_bytes = self._forms.spec(bucket).column(self._forms.name).row_bytes
        return os.pread(self._files[bucket].fileno(), num_bytes, place * num_bytes)

    def close(self) -> None:
        """Close the files, which frees their space."""
        for file in self._files.values():
            file.close()


def named(ids: list[str], number: int) -> str:
    """Return the first ids for a message, and how many there are."""
    more = " and others" if number > len(ids) else ""
    return f"{', '.join(f'{one!r:.200}' for one in ids)}{more} ({counted(number, 'id')})"
