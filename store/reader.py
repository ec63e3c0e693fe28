"""Reading a store: its buckets, where their rows lie, and samples by id. No torch, no lock, and LMDB is never opened.

A reader keeps the generation that it opened; what is published later changes nothing under it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.store.block import ID, BlockSpec, Column
from bucketline.store.digests import sample_digest
from bucketline.store.manifest import BucketEntry, Manifest, read_manifest
from bucketline.store.sealed_shard import SealedShard
from bucketline.store.text_block import STARTS, TEXT_GROUP, TextSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from bucketline.store.record import SampleRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where some rows of one bucket lie: one entry per row asked for, in that order."""

    bucket: str
    shard: NDArray[np.int64]  # [B] ordinal of the shard in the store
    row: NDArray[np.int64]  # [B] row number in the shard's bucket
    data: NDArray[np.int64]  # [B] byte in the shard's file at which the block's columns begin
    rows: NDArray[np.int64]  # [B] K of the block
    row_in_block: NDArray[np.int64]  # [B]

    def offsets(self, spec: BlockSpec, column: str) -> NDArray[np.int64]:
        """Give the byte of the shard's file at which each row's value of a column begins, `[B]`."""
        return self.data + self.rows * spec.prefix_bytes[column] + self.row_in_block * spec.column(column).row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedCaptions:
    """Where some captions lie: one entry per caption asked for, in that order."""

    shard: NDArray[np.int64]  # [B] ordinal of the shard in the store
    row: NDArray[np.int64]  # [B] caption row in the shard
    data: NDArray[np.int64]  # [B] byte in the shard's file at which the block's tensors begin
    captions: NDArray[np.int64]  # [B] N of the block
    tokens: NDArray[np.int64]  # [B] T of the block
    row_in_block: NDArray[np.int64]  # [B]

    def starts_offsets(self) -> NDArray[np.int64]:
        """Give the byte at which each caption's own two `starts` begin, `[B]`."""
        return self.data + 8 * self.row_in_block


class Bucket:
    """One bucket of a store: an exact height and width and a split, over all shards. Rows are numbered 0 to n - 1."""

    def __init__(self, store: Store, entry: BucketEntry) -> None:
        self._store = store
        self.name = entry.name
        self.height_px = entry.height_px
        self.width_px = entry.width_px
        self.split = entry.split
        self.spec = store.manifest.specs[entry.name]
        live = [group.rows - group.dropped if (group := shard.entry.groups.get(entry.name)) else 0 for shard in store.shards]
        self._ends = np.cumsum(live, dtype=np.int64)

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.spec.columns

    @property
    def num_rows(self) -> int:
        """Live rows, over all shards."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def locate(self, rows: NDArray[np.int64]) -> Located:
        """Find rows by number, `[B]`, each from 0 to `num_rows` - 1.

        Raises:
            CorruptError: where a shard's sidecars do not say where a row lies.
            StoreError: where a shard's file is missing.
        """
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= self.num_rows):
            raise StoreError(
                f"{self.name} has the rows 0 to {self.num_rows - 1}, asked for {int(rows.min())} to {int(rows.max())}"
            )
        shard = np.searchsorted(self._ends, rows, side="right").astype(np.int64)
        own = np.empty_like(shard)
        data, num_rows, in_block = np.empty_like(shard), np.empty_like(shard), np.empty_like(shard)
        for ordinal in np.unique(shard):
            here = np.flatnonzero(shard == ordinal)
            reader = self._store.shards[ordinal]
            first = int(self._ends[ordinal - 1]) if ordinal else 0
            own[here] = reader.live_rows(self.name, rows[here] - first)
            ranges = reader.block_ranges(self.name, own[here])
            if (ranges.length != self.spec.header_bytes + ranges.rows * self.spec.row_bytes).any():
                raise CorruptError(f"{reader.paths.extents}: a block of {self.name} has an impossible length")
            data[here] = ranges.offset + self.spec.header_bytes
            num_rows[here] = ranges.rows
            in_block[here] = ranges.row_in_block
        return Located(bucket=self.name, shard=shard, row=own, data=data, rows=num_rows, row_in_block=in_block)

    def read(self, rows: NDArray[np.int64], column: str) -> NDArray[Any]:
        """Read rows of one column by plain reads, `[B, …]` of the column's dtype (bfloat16 as its bits, uint16)."""
        located = self.locate(rows)
        wanted = self.spec.column(column)
        values = np.empty((len(rows), *wanted.shape), dtype=wanted.numpy_dtype)
        flat = values.reshape(len(rows), math.prod(wanted.shape))
        for at, offset in enumerate(located.offsets(self.spec, column)):
            data = self._store.shards[located.shard[at]].read(int(offset), wanted.row_bytes)
            flat[at] = np.frombuffer(data, dtype=wanted.numpy_dtype)
        return values

    def sample_ids(self, rows: NDArray[np.int64]) -> list[str]:
        """Give the ids of rows: by the row's digest, the index, and the sample's record."""
        located = self.locate(rows)
        return [
            self._store.record_of(int(shard), digest.tobytes()).id
            for shard, digest in zip(located.shard, self.read(rows, ID), strict=True)
        ]


class Store:
    """An open store, of one generation."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.shards = tuple(SealedShard(path, entry) for entry in manifest.shards)
        self.text: TextSpec = manifest.text.spec()
        self.max_tokens = max((shard.max_tokens for shard in manifest.shards), default=0)

    @classmethod
    def open(cls, path: Path | str, generation: int | None = None) -> Store:
        """Open a store: the newest generation, or the one named. Reads the manifest, nothing else.

        Raises:
            StoreError: where there is no store, the generation is gone, or its format is newer than this reader.
            CorruptError: where the manifest is damaged.
        """
        return cls(Path(path), read_manifest(Path(path), generation))

    def buckets(self, split: str | None = None) -> list[Bucket]:
        """Give the buckets that have live rows, by name; those of one split, or all."""
        entries = [entry for entry in self.manifest.buckets if split in (None, entry.split)]
        return [bucket for bucket in (self._buckets[entry.name] for entry in entries) if bucket.num_rows]

    @cached_property
    def _buckets(self) -> Mapping[str, Bucket]:
        return {entry.name: Bucket(self, entry) for entry in self.manifest.buckets}

    def bucket(self, name: str) -> Bucket:
        """Give a bucket by its name.

        Raises:
            StoreError: where there is none.
        """
        if name not in self._buckets:
            raise StoreError(f"{self.path} has no bucket {name!r}; it has {', '.join(self._buckets) or 'none'}")
        return self._buckets[name]

    def sample(self, sample_id: str) -> tuple[SealedShard, SampleRecord]:
        """Give a sample's record and the shard that holds it, by index, without a scan.

        Raises:
            StoreError: where the store has no such sample.
        """
        digest = sample_digest(sample_id)
        for shard in reversed(self.shards):
            if entry := shard.find(digest):
                return shard, shard.record(entry)
        raise StoreError(f"{self.path} has no sample {sample_id!r:.200}; ids are paths in the source, with their extension")

    def record_of(self, shard: int, digest: bytes) -> SampleRecord:
        """Give the record of a sample that a shard's row names by its digest.

        Raises:
            CorruptError: where the shard's index does not have it.
        """
        reader = self.shards[shard]
        if (entry := reader.find(digest)) is None:
            raise CorruptError(f"{reader.paths.index}: has no sample with the digest {digest.hex()}, a row of the shard has it")
        return reader.record(entry)

    def locate_captions(self, shard: NDArray[np.int64], rows: NDArray[np.int64]) -> LocatedCaptions:
        """Find captions by shard and caption row, `[B]` each.

        Raises:
            CorruptError: where a shard's sidecars do not say where a caption lies.
        """
        data, captions = np.empty_like(rows), np.empty_like(rows)
        tokens, in_block = np.empty_like(rows), np.empty_like(rows)
        for ordinal in np.unique(shard):
            here = np.flatnonzero(shard == ordinal)
            reader = self.shards[ordinal]
            ranges = reader.block_ranges(TEXT_GROUP, rows[here])
            fixed = self.text.header_bytes + 8 + ranges.rows * self.text.caption_bytes
            tokens[here] = (ranges.length - fixed) // self.text.token_bytes
            if (ranges.length != fixed + tokens[here] * self.text.token_bytes).any() or (tokens[here] < 0).any():
                raise CorruptError(f"{reader.paths.extents}: a text block has an impossible length")
            data[here] = ranges.offset + self.text.header_bytes
            captions[here] = ranges.rows
            in_block[here] = ranges.row_in_block
        return LocatedCaptions(shard=shard, row=rows, data=data, captions=captions, tokens=tokens, row_in_block=in_block)

    def token_offsets(self, located: LocatedCaptions, column: str, first_token: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give the byte of the shard's file at which each caption's tokens of a column begin, `[B]`.

        `first_token` is each caption's own entry of `starts`. A block's tensors: starts, checksums, fixed, tokens, digests.
        """
        before = sum(fixed.row_bytes for fixed in self.text.fixed)
        at = located.data + 8 + located.captions * (8 + 8 + before)
        for token_column in self.text.tokens:
            if token_column.name == column:
                return at + first_token * token_column.row_bytes
            at = at + located.tokens * token_column.row_bytes
        raise StoreError(f"{self.path} has no text column {column!r}")

    def read_caption(self, shard: int, row: int) -> dict[str, NDArray[Any]]:
        """Read one caption's tokens by plain reads: per token column, `[T, …]`."""
        located = self.locate_captions(np.array([shard]), np.array([row]))
        reader = self.shards[shard]
        first, end = np.frombuffer(reader.read(int(located.starts_offsets()[0]), 16), dtype="<i8")
        if not 0 <= first <= end <= located.tokens[0]:
            raise CorruptError(f"shard {reader.name}: `{STARTS}` of caption {row} are {first} to {end}; run `store verify`")
        values = {}
        for column in self.text.tokens:
            offset = int(self.token_offsets(located, column.name, np.array([first]))[0])
            data = reader.read(offset, int(end - first) * column.row_bytes)
            values[column.name] = np.frombuffer(data, dtype=column.numpy_dtype).reshape(-1, *column.shape)
        return values
