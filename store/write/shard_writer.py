"""Write a shard: rows and captions, in blocks, to an LMDB file under `pending/`, and sample records to a file beside it.

A transaction of LMDB commits both: it says how long the records are, which are on the disk before it. Sealing puts both in
order in one file.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
import uuid
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import lmdb
import msgpack
import numpy as np

from bucketline.errors import StoreError
from bucketline.files.atomic_write import CREATE, FILE_MODE, FileLock, remedy_for_failed_write, sync_folder
from bucketline.store.format.block import (
    CAPTIONS,
    CROP,
    DIGEST_BYTES,
    ID,
    ORIGINAL_SIZE,
    TARGET_BLOCK_BYTES,
    BlockSpec,
    Row,
    encode_block,
    make_row,
    sample_digest,
)
from bucketline.store.format.manifest import FORMAT_VERSION, META_KEY, TEXT_ERROR, block_key, pending_path
from bucketline.store.format.schema import MAX_RECORD_BYTES, SampleRecord, encode_record, refuse_unsealable
from bucketline.store.format.text import TEXT_GROUP, Entry, RaggedSpec, TextError, encode_text_block
from bucketline.store.write.seal import RECORD_HEAD, RECORDS, RECORDS_END, RECORDS_KEY, seal
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

COMMIT_BYTES = 16 << 20  # transaction size; each commit waits for one disk sync
MAX_ROWS = 1 << 19  # of a shard, about: sealing takes half a KiB of memory for each
COMMIT_AFTER_S = 30.0
FLUSH_AFTER_S = 300.0  # flush a rare bucket's rows in a smaller block after this time
LONG_BYTES = 32 << 20  # of a block of more than one entry; readers refuse 64 MiB
SPARE_MAP_BYTES = 1 << 30  # in addition to a full shard; the map grows if that is not enough


@dataclass(slots=True)
class _Waiting:
    """A bucket's rows that wait for their block, and their records, each after its RECORD_HEAD."""

    spec: BlockSpec
    since: float
    rows: list[Row]
    records: list[bytes]


class ShardWriter:
    """The only writer of one pending shard. Use it from one thread, as LMDB transactions require."""

    def __init__(
        self,
        store: Path,
        name: str,
        groups: Mapping[str, RaggedSpec],
        empty: Mapping[str, Entry],
        max_bytes: int,
    ) -> None:
        """Create the pending shard and lock it. `groups` are those of captions and rows, `empty` is the empty caption."""
        self.name = name
        self._store = store
        self.path = pending_path(store, name)
        self._max_bytes = max_bytes
        self._lock = FileLock(self.path.with_suffix(".lock"))
        self._records: int | None = None
        try:
            self._env = lmdb.open(
                str(self.path),
                subdir=False,
                lock=False,
                map_size=2 * max_bytes + SPARE_MAP_BYTES,
                meminit=False,
                mode=FILE_MODE,
            )
            self._env.sync(True)  # LMDB's first two pages, before any other: without them the file could not be opened
            with self._env.begin(write=True) as txn:
                self._meta = {"format_version": FORMAT_VERSION, "shard": name, "shard_id": uuid.uuid4().bytes}
                txn.put(META_KEY, msgpack.packb(self._meta))
            self._records = os.open(self.path.with_suffix(RECORDS), CREATE, FILE_MODE)
            sync_folder(self.path.parent)  # LMDB syncs only the file; a power failure could lose its folder entry
        except (lmdb.Error, OSError) as error:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
            self._release()
            raise StoreError(f"cannot create {self.path}: {error}; is the disk full?") from error
        self._end = (0, 0)  # of the committed records: bytes, and how many
        self._digests: set[bytes] = set()  # of the samples' ids
        self._blocks: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._specs = groups
        self._new: dict[str, list[Entry]] = {group: [] for group in groups}  # not written yet
        self._num_entries = dict.fromkeys(groups, 0)
        self._numbers: dict[str, dict[bytes, int]] = {group: {} for group in groups}  # by digest, of entries stored once
        self._error: TextError | None = None  # of the captions that were quantised for this shard
        self._errors: list[NDArray[np.float32]] = []  # of those since, [3] each
        self._new_bytes = 0  # of the ragged entries that are not written yet
        self._taken_bytes = 0  # since the last commit
        self._last_commit = time.monotonic()
        self.num_bytes = 0  # written so far
        self.add_caption(empty)

    @property
    def is_full(self) -> bool:
        return self.num_bytes + self._taken_bytes >= self._max_bytes or self._end[1] >= MAX_ROWS

    def has_caption(self, digest: bytes) -> bool:
        return digest in self._numbers[TEXT_GROUP]

    def add_caption(self, caption: Mapping[str, Entry]) -> None:
        """Add a caption once per shard: its entries in all groups of captions."""
        if not self.has_caption(caption[TEXT_GROUP].digest):
            for group, entry in caption.items():
                self._append(group, entry)

    def _append(self, group: str, entry: Entry) -> None:
        if self._specs[group].stored_once:
            self._numbers[group][entry.digest] = self._num_entries[group]
        self._num_entries[group] += 1
        self._new[group].append(entry)
        self._taken_bytes += entry.num_bytes
        self._new_bytes += 0 if group == TEXT_GROUP else entry.num_bytes
        if entry.error is not None:
            self._errors.append(entry.error)

    def add(
        self,
        *,
        spec: BlockSpec,
        latents: Mapping[str, NDArray[Any]],
        record: SampleRecord,
        captions: Sequence[bytes],
        entries: Mapping[str, Entry | None] = MappingProxyType({}),
        new: Sequence[Mapping[str, Entry]] = (),
    ) -> None:
        """Add a sample. It is written with its block, by `commit` at the latest.

        `latents` holds the bucket's own columns, `[C, h, w]` each; they are copied. `captions` are digests of captions in this
        shard (`has_caption`) or of `new` ones, which are added with the row as `add_caption` does; those beyond V are stored
        only in the record. `entries` are the row's of all groups of rows, None of those of which it has none. Nothing is added
        if the row is refused.
        """
        refuse_unsealable(record)
        known, num_known = self._numbers[TEXT_GROUP], self._num_entries[TEXT_GROUP]
        rows = {caption[TEXT_GROUP].digest: row for row, caption in enumerate(new, num_known)}
        caption_rows = tuple(known.get(digest, rows.get(digest, -1)) for digest in captions)
        max_captions = spec.column(CAPTIONS).shape[0]
        padded = (caption_rows + (-1,) * max_captions)[:max_captions]
        numbers = {group: self._number_of(group, entry) for group, entry in entries.items()}
        digest = sample_digest(record.id)
        values: dict[str, NDArray[Any] | bytes] = {
            **latents,
            **{group: _packed(1, (number,)) for group, number in numbers.items()},
            CAPTIONS: _packed(max_captions, padded),
            ORIGINAL_SIZE: _packed(2, record.original_size),
            CROP: _packed(2, record.crop[:2]),
            ID: digest,
        }
        row = make_row(spec, values)
        now = time.monotonic()
        waiting = self._waiting.get(spec.bucket) or _Waiting(spec, now, [], [])
        number = self._rows.get(spec.bucket, 0) + len(waiting.rows)
        packed = encode_record(record, row=number, caption_rows=caption_rows)
        if len(packed) > MAX_RECORD_BYTES:
            raise StoreError(f"sample {record.id!r} has a record of {len(packed)} bytes, at most {MAX_RECORD_BYTES} fit")
        if digest in self._digests:
            raise StoreError(f"sample {record.id!r} is in shard {self.name} twice; ids must be unique")
        for caption in new:  # not before the row is known to be sound
            self.add_caption(caption)
        for group, entry in entries.items():
            if entry is not None and numbers[group] == self._num_entries[group]:
                self._append(group, entry)
        self._digests.add(digest)
        self._waiting[spec.bucket] = waiting
        waiting.rows.append(row)
        waiting.records.append(RECORD_HEAD.pack(digest, len(packed)) + packed)
        self._taken_bytes += spec.row_bytes + len(packed) + DIGEST_BYTES
        if self._taken_bytes >= COMMIT_BYTES or now - self._last_commit > COMMIT_AFTER_S:
            self._commit(whole_only=True)

    def _number_of(self, group: str, entry: Entry | None) -> int:
        """Return the number that an entry has in its group, or gets if it is new; -1 for none."""
        return -1 if entry is None else self._numbers[group].get(entry.digest, self._num_entries[group])

    def commit(self) -> None:
        """Write all added samples and captions durably."""
        self._commit(whole_only=False)

    def seal(self) -> bool:
        """Commit and seal the shard, and release its lock. Return False if it was empty and was removed."""
        try:
            self.commit()
            self._env.close()
            return seal(self._store, self.name)
        finally:
            self.close()

    def close(self) -> None:
        """Close the file and release the lock; uncommitted samples are discarded."""
        self._env.close()
        self._release()

    def _release(self) -> None:
        if self._records is not None:
            os.close(self._records)
            self._records = None
        if not self._lock.is_released:
            with contextlib.suppress(OSError):  # read-only disk: a lock file without a holder is harmless
                self.path.with_suffix(".lock").unlink(missing_ok=True)
            self._lock.release()

    def _commit(self, *, whole_only: bool) -> None:
        """Write blocks in one transaction; with `whole_only`, incomplete blocks wait unless they are old."""
        now = time.monotonic()
        chosen: list[_Waiting] = []  # a block each
        kept: dict[str, _Waiting] = {}
        for bucket, own in self._waiting.items():
            size, whole = own.spec.rows_per_block, len(own.rows)
            if whole_only and now - own.since <= FLUSH_AFTER_S:
                whole -= whole % size
            for at in range(0, whole, size):
                end = min(at + size, whole)
                chosen.append(_Waiting(own.spec, now, own.rows[at:end], own.records[at:end]))
            if whole < len(own.rows):
                kept[bucket] = _Waiting(own.spec, now if whole else own.since, own.rows[whole:], own.records[whole:])
        if chosen or (self._new[TEXT_GROUP] and not whole_only) or self._new_bytes >= (COMMIT_BYTES if whole_only else 1):
            self._write(chosen)
        self._waiting = kept
        self._taken_bytes = 0
        self._last_commit = now

    def _write(self, chosen: list[_Waiting]) -> None:
        try:
            while not self._has_written(chosen):
                self._env.set_mapsize(2 * self._env.info()["map_size"])  # address space, not disk space
        except (lmdb.Error, OSError) as error:
            remedy = remedy_for_failed_write(self.path.parent, is_full=isinstance(error, lmdb.DiskError))
            raise StoreError(f"{self.path} cannot be written: {error}; {remedy}") from error
        self._new = {group: [] for group in self._specs}
        self._new_bytes = 0

    def _has_written(self, chosen: list[_Waiting]) -> bool:
        """Write in one transaction. Return False, with nothing written, if LMDB's map is too small."""
        blocks, rows, num_bytes = dict(self._blocks), dict(self._rows), self.num_bytes
        records = [record for own in chosen for record in own.records]
        end = self._put_records(records)
        try:
            with self._env.begin(write=True) as txn:
                self._put_error(txn)
                for group, new in self._new.items():
                    for entries in _entry_blocks(new):
                        block = encode_text_block(self._specs[group], entries, rows.get(group, 0))
                        num_bytes += _put_block(txn, blocks, rows, group, block, len(entries))
                for own in chosen:
                    bucket = own.spec.bucket
                    block = encode_block(own.spec, own.rows, rows.get(bucket, 0))
                    num_bytes += _put_block(txn, blocks, rows, bucket, block, len(own.rows))
                if records:
                    txn.put(RECORDS_KEY, RECORDS_END.pack(*end))
        except lmdb.MapFullError:
            return False
        num_bytes += sum(map(len, records))
        self._blocks, self._rows, self._end, self.num_bytes = blocks, rows, end, num_bytes
        return True

    def _put_records(self, records: Sequence[bytes]) -> tuple[int, int]:
        """Write records behind those that are committed, durably. Return where they end, for LMDB to commit."""
        data, (at, num_records) = memoryview(b"".join(records)), self._end
        assert self._records is not None
        while data:
            written = os.pwrite(self._records, data, at)
            data, at = data[written:], at + written
        if records:
            os.fdatasync(self._records)
        return at, num_records + len(records)

    def _put_error(self, txn: Any) -> None:  # noqa: ANN401 - lmdb has no types
        """Keep the error of the captions so far with them, so that a shard that is adopted has it too."""
        if self._errors:
            self._error = TextError.joined([self._error, TextError.of(np.stack(self._errors))])
            self._errors = []
        if self._error is not None:
            txn.put(META_KEY, msgpack.packb({**self._meta, TEXT_ERROR: encode(self._error)}))


def _packed(count: int, numbers: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{count}i", *numbers)
    except struct.error as error:
        raise ValueError(f"a column takes {count} 32-bit integers, got {list(numbers)}") from error


def _put_block(
    txn: Any,  # noqa: ANN401 - lmdb has no types
    blocks: dict[str, int],
    rows: dict[str, int],
    group: str,
    block: bytes,
    num_rows: int,
) -> int:
    number = blocks.get(group, 0)
    txn.put(block_key(group, number), block)
    blocks[group] = number + 1
    rows[group] = rows.get(group, 0) + num_rows
    return len(block)


def _entry_blocks(entries: list[Entry]) -> list[list[Entry]]:
    """Split captions, or another group's entries, into blocks of about 1 MiB; a very long one has its own."""
    blocks: list[list[Entry]] = []
    filled = TARGET_BLOCK_BYTES
    for entry in entries:
        if filled >= TARGET_BLOCK_BYTES or (filled and filled + entry.num_bytes > LONG_BYTES):
            blocks.append([])
            filled = 0
        blocks[-1].append(entry)
        filled += entry.num_bytes
    return blocks
