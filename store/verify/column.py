"""Check the file of an added column as a shard is checked: its digest, its blocks, and that its rows are the shard's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bucketline.store.format.block import ID
from bucketline.store.shard.reader import SealedShard
from bucketline.store.verify.faults import Faults
from bucketline.store.verify.shard import ShardCheck
from bucketline.store.write.column_shard import ids_by_row

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.store.format.manifest_entries import ShardEntry
    from bucketline.store.read.store import Store
    from bucketline.store.shard.sidecar import PagedFile
    from bucketline.store.verify.extents import BlockPlace
    from bucketline.store.write.shard_contents import ShardContents


class ColumnCheck(ShardCheck):
    """Checks the values of an added column of one shard's rows."""

    def __init__(self, store: Store, entry: ShardEntry, column: str, on_bytes: Callable[[int], None]) -> None:
        """Open nothing yet; `on_bytes` as in `ShardCheck`."""
        super().__init__(store, entry.column_shard(column), on_bytes)
        self._specs = store.manifest.added_specs[column]
        self._column, self._owner = column, SealedShard(store.path, entry)
        self._faults = Faults(entry.name)
        self.bad_row = f"the bytes of the row's {column} do not match their checksum"

    def _names(self, place: BlockPlace, rows: list[int]) -> dict[int, str]:
        return self._owner.names_of(place.group, [place.first_row + k for k in rows])

    def _compare_rows(self, contents: ShardContents, extents: PagedFile, damaged: set[Path]) -> None:  # noqa: ARG002
        for bucket in self._shard.entry.groups:
            with self._faults.guard(bucket):
                wrong = (contents.digests(bucket, ID) != ids_by_row(self._owner, bucket)).any(axis=1)
                for row in np.flatnonzero(wrong).tolist():
                    self._faults.add(f"the {self._column} in the row's place is another sample's", bucket, row=row)
