"""Check the file of an added column as a shard is checked: its digest, its blocks, and that its rows are the shard's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.errors import StoreError
from bucketline.store.format.block import ID, bad_rows, decode_block
from bucketline.store.shard.reader import SealedShard
from bucketline.store.verify.faults import Fault, Faults
from bucketline.store.verify.shard import ShardCheck
from bucketline.store.write.column_shard import ids_by_row

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from bucketline.store.format.manifest_entries import ShardEntry
    from bucketline.store.read.store import Store
    from bucketline.store.verify.extents import BlockPlace


class ColumnCheck(ShardCheck):
    """Checks the values of an added column of one shard's rows."""

    def __init__(self, store: Store, entry: ShardEntry, column: str, on_bytes: Callable[[int], None]) -> None:
        """Open nothing yet; `on_bytes` as in `ShardCheck`."""
        super().__init__(store, entry.column_shard(column), on_bytes)
        self._specs, self._has_lines = store.manifest.added_specs[column], True
        self._column, self._owner = column, SealedShard(store.path, entry)
        self._faults = Faults(entry.name)
        self._ids: dict[str, NDArray[np.uint8]] = {}

    @property
    def faults(self) -> tuple[Fault, ...]:
        return self._faults.found

    def run(self) -> None:
        """Run the check."""
        self._sidecar(self._shard.paths.extents, self._shard.entry.extents)
        with self._faults.guard():
            self._file()
            self._tell(self._shard.entry.lmdb.num_bytes)

    def _row_block(self, place: BlockPlace, data: memoryview, item: str) -> None:
        spec = self._specs[place.group]
        first_row, columns = decode_block(spec, data, item)
        self._is_expected(place, first_row, len(columns[ID]))
        bad = bad_rows(spec, columns)
        names = self._owner.names_of(place.group, [first_row + k for k in bad])
        for k in bad:
            error = f"the bytes of the row's {self._column} do not match their checksum"
            self._faults.add(error, place.group, place.block, first_row + k, names.get(first_row + k))
        own = self._own_ids(place.group)
        for k in range(len(columns[ID])) if own is not None else ():
            if k not in bad and own is not None and columns[ID][k].tobytes() != own[first_row + k].tobytes():
                error = f"the {self._column} in the row's place is another sample's"
                self._faults.add(error, place.group, place.block, first_row + k)

    def _own_ids(self, bucket: str) -> NDArray[np.uint8] | None:
        """Return the digests of the shard's rows; None if its index is damaged, which is reported elsewhere."""
        if bucket not in self._ids:
            try:
                self._ids[bucket] = ids_by_row(self._owner, bucket)
            except StoreError:
                return None
        return self._ids[bucket]
