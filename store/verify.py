"""Reading a whole store once, and naming every fault.

A shard's digest is compared by plain reads. Blocks are then read by their extents and held against their own headers and
checksums, so that a fault is named by its row and sample where it lies in one. Only a shard whose digest is right is also
walked through LMDB, which follows pointers in the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import lmdb
import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.store.block import ID, bad_rows, decode_block
from bucketline.store.digests import file_digest, sample_digest
from bucketline.store.layout import SAMPLE_PREFIX, block_key, sample_key, split_block_key
from bucketline.store.text_block import TEXT_GROUP, decode_text_block

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.store.manifest import DroppedEntry, FileEntry
    from bucketline.store.reader import Store
    from bucketline.store.sealed_shard import SealedShard


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong. Fields are None where the fault is not in a bucket, a block or a row."""

    shard: str | None
    bucket: str | None
    block: int | None
    row: int | None
    sample: str | None
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What was read, and what was wrong."""

    blocks: int
    rows: int
    corrupt: tuple[Fault, ...]


def verify(store: Store, on_bytes: Callable[[int], None]) -> Verified:
    """Read every file of the store's generation; `on_bytes` is told of progress, in bytes of shard files."""
    blocks = rows = 0
    faults: list[Fault] = []
    for shard in store.shards:
        found = _ShardCheck(store, shard)
        found.run()
        blocks, rows = blocks + found.blocks, rows + found.rows
        faults.extend(found.faults)
        on_bytes(shard.entry.lmdb.num_bytes)
    return Verified(blocks=blocks, rows=rows, corrupt=tuple(faults))


class _ShardCheck:
    def __init__(self, store: Store, shard: SealedShard) -> None:
        self.store, self.shard = store, shard
        self.blocks = self.rows = 0
        self.faults: list[Fault] = []

    def run(self) -> None:
        entry, paths = self.shard.entry, self.shard.paths
        sound = self._digest(paths.lmdb, entry.lmdb)
        sidecars = [self._digest(paths.extents, entry.extents), self._digest(paths.index, entry.index)]
        if entry.dropped is not None:
            sidecars.append(self._digest(paths.dropped(entry.dropped.generation), entry.dropped))
        for group in sorted(entry.groups):
            self._guard(group, None, lambda group=group: self._group(group))  # type: ignore[misc]
        if sound and all(sidecars):
            self._guard(None, None, self._walk)

    def _fault(
        self,
        error: str,
        group: str | None = None,
        block: int | None = None,
        row: int | None = None,
        sample: str | None = None,
    ) -> None:
        self.faults.append(Fault(shard=self.shard.name, bucket=group, block=block, row=row, sample=sample, error=error))

    def _guard(self, group: str | None, block: int | None, check: Callable[[], None]) -> None:
        try:
            check()
        except (StoreError, lmdb.Error, OSError, ValueError, LookupError, ArithmeticError, MemoryError) as error:
            self._fault(str(error) or type(error).__name__, group, block)

    def _digest(self, path: Path, expected: FileEntry | DroppedEntry) -> bool:
        try:
            num_bytes, digest = file_digest(path)
        except OSError as error:
            self._fault(f"{path.name} cannot be read: {error.strerror}")
            return False
        if num_bytes != expected.num_bytes:
            self._fault(f"{path.name} has {num_bytes} bytes, the manifest says {expected.num_bytes}")
        elif digest != expected.digest:
            self._fault(f"{path.name} has the digest {digest}, the manifest says {expected.digest}")
        return num_bytes == expected.num_bytes and digest == expected.digest

    def _group(self, group: str) -> None:
        entry = self.shard.entry.groups[group]
        row = 0
        for block in range(entry.blocks):
            place = np.array([entry.first_block + block])
            offset, length, first_row, rows = (
                int(self.shard.extents.take(name, place)[0]) for name in ("offset", "length", "first_row", "rows")
            )
            if first_row != row:
                raise CorruptError(f"block {block} begins with row {first_row}, expected {row}")
            row += rows
            self.blocks += 1
            self.rows += rows if group != TEXT_GROUP else 0
            self._guard(group, block, lambda: self._block(group, block, offset, length, (first_row, rows)))  # noqa: B023
        if row != entry.rows:
            raise CorruptError(f"the blocks hold {row} rows, the manifest says {entry.rows}")

    def _block(self, group: str, block: int, offset: int, length: int, expected: tuple[int, int]) -> None:
        if offset + length > self.shard.entry.lmdb.num_bytes:
            raise CorruptError(f"the extents place the block at bytes {offset} to {offset + length}, beyond the file")
        data = self.shard.read(offset, length)
        item = f"shard {self.shard.name}, block {block} of {group}"
        if group == TEXT_GROUP:
            first_row, captions, bad = decode_text_block(self.store.text, data, item)
            found = (first_row, len(captions))
            samples: dict[int, str | None] = {}
        else:
            spec = self.store.manifest.specs[group]
            first_row, columns = decode_block(spec, data, item)
            bad = bad_rows(spec, columns)
            found = (first_row, len(columns[ID]))
            samples = {row: self._name(columns[ID][row].tobytes()) for row in bad}
        if found != expected:
            raise CorruptError(f"the block says first row and rows are {found}, the extents say {expected}")
        for row in bad:
            self._fault("the row's bytes are not those that were written", group, block, first_row + row, samples.get(row))

    def _name(self, digest: bytes) -> str | None:
        """Name the sample of a damaged row, where its digest and the index still allow it."""
        try:
            entry = self.shard.find(digest)
            return self.shard.record(entry).id if entry else None
        except (StoreError, OSError):
            return None

    def _walk(self) -> None:
        """Hold LMDB's own view of a sound file against the sidecars: the same blocks and records, and nothing else."""
        blocks, records = set(), 0
        with (
            lmdb.open(str(self.shard.paths.lmdb), subdir=False, lock=False, readonly=True, create=False) as env,
            env.begin(buffers=True) as txn,
        ):
            for key in txn.cursor().iternext(values=False):
                if (found := split_block_key(bytes(key))) is not None:
                    blocks.add(found)
                records += bytes(key[: len(SAMPLE_PREFIX)]) == SAMPLE_PREFIX
            listed = {(name, n) for name, group in self.shard.entry.groups.items() for n in range(group.blocks)}
            if blocks != listed:
                name, number = min(blocks ^ listed)
                raise CorruptError(f"{block_key(name, number)!r} is in only one of the shard's file and its extents")
            if records != self.shard.entry.samples:
                raise CorruptError(f"the file has {records} sample records, the manifest says {self.shard.entry.samples}")
            for position in range(records):
                entry = self.shard.index_entry(position)
                record = self.shard.record(entry)
                if txn.get(sample_key(sample_digest(record.id))) is None:
                    raise CorruptError(f"the record of {record.id!r} does not stand under its id")
