"""The values of an added column: requested by id in the order of the shards' rows, and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import UsageError
from bucketline.store.change.drop import NAMED_SAMPLES
from bucketline.store.format.columns import FLIPPED_SUFFIX, role_of, stored_name
from bucketline.store.format.safetensors_header import DTYPES
from bucketline.store.format.schema import ColumnEntry, column_spec
from bucketline.store.read.iter_samples import live_positions
from bucketline.store.write.arrays import as_array, checked_arrays, dtype_of, is_finite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from bucketline.store.format.block import BlockSpec
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.shard.reader import SealedShard

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
