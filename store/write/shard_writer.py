"""Write a shard: rows, captions and sample records, committed together to one LMDB file under `pending/`."""

from __future__ import annotations

import contextlib
import time
import uuid
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import lmdb
import msgpack
import numpy as np

from bucketline.errors import StoreError
from bucketline.files.atomic_write import FILE_MODE, FileLock, remedy_for_failed_write, sync_folder
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
from bucketline.store.format.manifest import FORMAT_VERSION, META_KEY, TEXT_ERROR, block_key, pending_path, sample_key
from bucketline.store.format.schema import MAX_RECORD_BYTES, SampleRecord, encode_record, refuse_unsealable
from bucketline.store.format.text import TEXT_GROUP, Entry, RaggedSpec, TextError, encode_text_block
from bucketline.store.write.seal import seal
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

COMMIT_BYTES = 16 << 20  # transaction size; each commit waits for one disk sync
COMMIT_AFTER_S = 30.0
FLUSH_AFTER_S = 300.0  # flush a rare bucket's rows in a smaller block after this time
LONG_BYTES = 32 << 20  # of a block of more than one entry; readers refuse 64 MiB
SPARE_MAP_BYTES = 1 << 30  # in addition to a full shard; the map grows if that is not enough


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """A sample waiting for its block; the record gets its row and caption rows when it is written."""

    spec: BlockSpec
    row: Row
    record: SampleRecord
    digest: bytes  # of its id
    caption_rows: tuple[int, ...]


@dataclass(slots=True)
class _Buffer:
    samples: list[_Taken]
    since: float


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
            sync_folder(self.path.parent)  # LMDB syncs only the file; a power failure could lose its folder entry
        except (lmdb.Error, OSError) as error:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
            self._release()
            raise StoreError(f"cannot create {self.path}: {error}; is the disk full?") from error
        self._blocks: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        self._buffers: dict[str, _Buffer] = {}
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
        return self.num_bytes + self._taken_bytes >= self._max_bytes

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
        values = {
            **latents,
            **{group: np.array(number, dtype="<i4") for group, number in numbers.items()},
            CAPTIONS: np.array(padded, dtype="<i4"),
            ORIGINAL_SIZE: np.array(record.original_size, dtype="<i4"),
            CROP: np.array(record.crop[:2], dtype="<i4"),
            ID: np.frombuffer(digest, dtype="<u8"),
        }
        row = make_row(spec, values)
        for caption in new:  # not before the row is known to be sound
            self.add_caption(caption)
        for group, entry in entries.items():
            if entry is not None and numbers[group] == self._num_entries[group]:
                self._append(group, entry)
        buffer = self._buffers.setdefault(spec.bucket, _Buffer(samples=[], since=time.monotonic()))
        buffer.samples.append(_Taken(spec=spec, row=row, record=record, digest=digest, caption_rows=caption_rows))
        self._taken_bytes += spec.row_bytes + len(encode_record(record, caption_rows=caption_rows)) + DIGEST_BYTES
        now = time.monotonic()
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
        if not self._lock.is_released:
            with contextlib.suppress(OSError):  # read-only disk: a lock file without a holder is harmless
                self.path.with_suffix(".lock").unlink(missing_ok=True)
            self._lock.release()

    def _commit(self, *, whole_only: bool) -> None:
        """Write blocks in one transaction; with `whole_only`, incomplete blocks wait unless they are old."""
        now = time.monotonic()
        chosen: list[tuple[BlockSpec, list[_Taken]]] = []
        kept: dict[str, _Buffer] = {}
        for bucket, buffer in self._buffers.items():
            spec = buffer.samples[0].spec
            whole = len(buffer.samples) // spec.rows_per_block * spec.rows_per_block
            if not whole_only or now - buffer.since > FLUSH_AFTER_S:
                whole = len(buffer.samples)
            ends = [*range(spec.rows_per_block, whole, spec.rows_per_block), whole] if whole else []
            chosen.extend((spec, buffer.samples[begin:end]) for begin, end in zip([0, *ends], ends, strict=False))
            if rest := buffer.samples[whole:]:
                kept[bucket] = _Buffer(samples=rest, since=buffer.since if whole == 0 else now)
        if chosen or (self._new[TEXT_GROUP] and not whole_only) or self._new_bytes >= (COMMIT_BYTES if whole_only else 1):
            self._write(chosen)
        self._buffers = kept
        self._taken_bytes = 0
        self._last_commit = now

    def _write(self, chosen: list[tuple[BlockSpec, list[_Taken]]]) -> None:
        try:
            while not self._has_written(chosen):
                self._env.set_mapsize(2 * self._env.info()["map_size"])  # address space, not disk space
        except lmdb.Error as error:
            remedy = remedy_for_failed_write(self.path.parent, is_full=isinstance(error, lmdb.DiskError))
            raise StoreError(f"{self.path} cannot be written: {error}; {remedy}") from error
        self._new = {group: [] for group in self._specs}
        self._new_bytes = 0

    def _has_written(self, chosen: list[tuple[BlockSpec, list[_Taken]]]) -> bool:
        """Write in one transaction. Return False, with nothing written, if LMDB's map is too small."""
        blocks, rows, num_bytes = dict(self._blocks), dict(self._rows), self.num_bytes
        try:
            with self._env.begin(write=True) as txn:
                self._put_error(txn)
                for group, new in self._new.items():
                    for entries in _entry_blocks(new):
                        block = encode_text_block(self._specs[group], entries, rows.get(group, 0))
                        num_bytes += _put_block(txn, blocks, rows, group, block, len(entries))
                for spec, samples in chosen:
                    first_row = rows.get(spec.bucket, 0)
                    block = encode_block(spec, [sample.row for sample in samples], first_row)
                    num_bytes += _put_block(txn, blocks, rows, spec.bucket, block, len(samples))
                    for row, sample in enumerate(samples, first_row):
                        num_bytes += self._put_record(txn, sample, row)
        except lmdb.MapFullError:
            return False
        self._blocks, self._rows, self.num_bytes = blocks, rows, num_bytes
        return True

    def _put_error(self, txn: Any) -> None:  # noqa: ANN401 - lmdb has no types
        """Keep the error of the captions so far with them, so that a shard that is adopted has it too."""
        if self._errors:
            self._error = TextError.joined([self._error, TextError.of(np.stack(self._errors))])
            self._errors = []
        if self._error is not None:
            txn.put(META_KEY, msgpack.packb({**self._meta, TEXT_ERROR: encode(self._error)}))

    def _put_record(self, txn: Any, sample: _Taken, row: int) -> int:  # noqa: ANN401 - lmdb has no types
        record = encode_record(sample.record, row=row, caption_rows=sample.caption_rows)
        if len(record) > MAX_RECORD_BYTES:
            raise StoreError(f"sample {sample.record.id!r} has a record of {len(record)} bytes, at most {MAX_RECORD_BYTES} fit")
        if not txn.put(sample_key(sample.digest), record, overwrite=False):
            raise StoreError(f"sample {sample.record.id!r} is in shard {self.name} twice; ids must be unique")
        return len(record) + DIGEST_BYTES


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
