"""Compare LMDB's view of an intact shard with its sidecars: the same blocks and records, nothing else."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgpack
import numpy as np

from bucketline.errors import CorruptError
from bucketline.store.format.hashing import sample_digest
from bucketline.store.format.layout import META_KEY, SAMPLE_PREFIX, block_key, split_block_key
from bucketline.store.format.sample_record import SampleRecord, decode_record
from bucketline.store.format.text_block import TEXT_GROUP
from bucketline.store.shard.read_lmdb import read_lmdb

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.store.shard.reader import IndexEntry, SealedShard
    from bucketline.store.verify.faults import Faults

_AT_ONCE = 1024  # index entries read at a time


class ShardWalk:
    """Walks a shard's keys; `records` and `record_bytes` (of live rows) count what was found."""

    def __init__(self, shard: SealedShard, faults: Faults, on_bytes: Callable[[int], None]) -> None:
        """Open nothing yet; `on_bytes` is called with 0 at intervals, so that it can end the walk by raising."""
        self._shard, self._faults, self._on_bytes = shard, faults, on_bytes
        self._blocks = dict.fromkeys(shard.entry.groups, 0)
        self._entries: list[IndexEntry] = []
        self._first = 0  # index position of the first of them
        self.records = self.record_bytes = 0

    def run(self) -> None:
        """Walk the shard."""
        self._is_live = self._shard.live_entries()
        with read_lmdb(self._shard.paths.lmdb, readahead=False) as (_, txn), self._shard.opened() as fd:
            cursor, has_meta = txn.cursor(), False
            for key in map(bytes, cursor.iternext(values=False)):
                if (block := split_block_key(key)) is not None:
                    self._block(*block)
                elif key.startswith(SAMPLE_PREFIX):
                    self._record(key[len(SAMPLE_PREFIX) :], cursor.value(), fd)
                else:
                    has_meta |= self._meta(key, cursor.value())
        for name, group in self._shard.entry.groups.items():
            if self._blocks[name] != group.blocks:
                self._faults.add(f"the file has {self._blocks[name]} blocks, the manifest says {group.blocks}", name)
        if not has_meta:
            self._faults.add(f"the value of {META_KEY!r} is missing or is another shard's")

    def _block(self, group: str, number: int) -> None:
        if self._blocks.get(group) != number:
            raise CorruptError(f"{block_key(group, number)!r} is in only one of the shard's file and its extents")
        self._blocks[group] = number + 1
        self._on_bytes(0)

    def _meta(self, key: bytes, value: memoryview) -> bool:
        if key != META_KEY:
            self._faults.add(f"the key {key!r:.200} is not one of the format's")
            return False
        try:
            return bytes(msgpack.unpackb(value)["shard_id"]).hex() == self._shard.entry.shard_id
        except (ValueError, TypeError, KeyError, msgpack.UnpackException):
            return False

    def _record(self, digest: bytes, value: memoryview, fd: int) -> None:
        position = self.records
        self.records += 1
        if position >= self._first + len(self._entries):
            self._read_index(position)
        if position >= self._first + len(self._entries) or self._entries[position - self._first].digest != digest:
            raise CorruptError(f"the sample with the digest {digest.hex()} is in only one of the shard's file and its index")
        entry = self._entries[position - self._first]
        group, row, offset, num_bytes = entry.bucket, entry.row, entry.record_offset, entry.record_bytes
        self.record_bytes += num_bytes if self._is_live[position] else 0
        data = bytes(value)
        if os.pread(fd, num_bytes, offset) != data or num_bytes != len(data):
            self._faults.add("the index does not lead to the sample's record", group, row=row)
            return
        try:
            record = decode_record(data, f"shard {self._shard.name}, row {row} of {group}")
        except CorruptError as error:
            self._faults.add(str(error), group, row=row)
            return
        if sample_digest(record.id) != digest:
            self._faults.add(f"the record of {record.id!r:.200} is not stored under its id", group, row=row)
        elif not entry.describes(record):
            self._faults.add("the sample's record and its index entry differ", group, row=row, sample=record.id)
        elif not self._has_captions(record):
            self._faults.add(
                "the sample's record names captions that the shard does not have", group, row=row, sample=record.id
            )

    def _has_captions(self, record: SampleRecord) -> bool:
        num_captions = self._shard.entry.groups[TEXT_GROUP].rows
        return len(record.caption_rows) >= 1 and all(0 <= row < num_captions for row in record.caption_rows)

    def _read_index(self, first: int) -> None:
        self._on_bytes(0)
        self._first = first
        self._entries = self._shard.index_entries(np.arange(first, min(first + _AT_ONCE, self._shard.entry.samples)))
