"""Reading a store: its buckets, where their rows lie, and samples by id. No torch, no lock, and LMDB is never opened.

A reader keeps the generation that it opened; what is published later changes nothing under it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.store.block import ID, BlockSpec, Column
from bucketline.store.block_table import BlockTable
from bucketline.store.digests import DIGEST_BYTES, sample_digest
from bucketline.store.file_gather import FileGather, check_rows
from bucketline.store.manifest import BucketEntry, Manifest, read_manifest
from bucketline.store.sealed_shard import SealedShard
from bucketline.store.text_block import CHECKSUM, DIGEST, TEXT_GROUP, Caption, TextSpec, caption_checksum

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from bucketline.store.record import SampleRecord
    from bucketline.store.typed_json import Json


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

    def part(self, begin: int, end: int) -> Located:
        """Give the entries from `begin` to `end`: many batches are located at once, and used one after the other."""
        return Located(
            bucket=self.bucket,
            shard=self.shard[begin:end],
            row=self.row[begin:end],
            data=self.data[begin:end],
            rows=self.rows[begin:end],
            row_in_block=self.row_in_block[begin:end],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedCaptions:
    """Where some captions lie: one entry per caption asked for, in that order."""

    shard: NDArray[np.int64]  # [B] ordinal of the shard in the store
    row: NDArray[np.int64]  # [B] caption row in the shard
    data: NDArray[np.int64]  # [B] byte in the shard's file at which the block's tensors begin
    captions: NDArray[np.int64]  # [B] N of the block
    tokens: NDArray[np.int64]  # [B] T of the block
    row_in_block: NDArray[np.int64]  # [B]

    def part(self, begin: int, end: int) -> LocatedCaptions:
        """Give the entries from `begin` to `end`."""
        return LocatedCaptions(**{field.name: getattr(self, field.name)[begin:end] for field in fields(self)})

    def starts_offsets(self) -> NDArray[np.int64]:
        """Give the byte at which each caption's own two `starts` begin, `[B]`."""
        return self.data + 8 * self.row_in_block

    def fixed_offsets(self, spec: TextSpec, column: str) -> NDArray[np.int64]:
        """Give the byte at which each caption's value of a fixed column begins, `[B]`."""
        names = [fixed.name for fixed in spec.fixed]
        before = sum(fixed.row_bytes for fixed in spec.fixed[: names.index(column)])
        row_bytes = spec.fixed[names.index(column)].row_bytes
        return self.data + 8 + self.captions * (8 + 8 + before) + self.row_in_block * row_bytes


class Bucket:
    """One bucket of a store: an exact height and width and a split, over all shards. Rows are numbered 0 to n - 1."""

    def __init__(self, store: OpenShards, entry: BucketEntry) -> None:
        self._store = store
        self.name = entry.name
        self.height_px = entry.height_px
        self.width_px = entry.width_px
        self.split = entry.split
        self.spec = store.specs[entry.name]
        live = [group.rows - group.dropped if (group := shard.entry.groups.get(entry.name)) else 0 for shard in store.shards]
        self._ends = np.cumsum(live, dtype=np.int64)
        self._starts = self._ends - np.array(live, dtype=np.int64)

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.spec.columns

    @property
    def num_rows(self) -> int:
        """Live rows, over all shards."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def shard_of(self, row: int) -> tuple[int, int]:
        """Give the ordinal of the shard that holds a row, and the first of the bucket's rows in it."""
        ordinal = int(np.searchsorted(self._ends, row, side="right"))
        return ordinal, int(self._starts[ordinal])

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
        return self._locate_live(self._live(rows))

    def _live(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give the live row, counted over all shards, that each row number stands for; a repeated store's has several."""
        return rows

    def _locate_live(self, rows: NDArray[np.int64]) -> Located:
        """Find live rows by their number over all shards, each of them once."""
        shard = np.searchsorted(self._ends, rows, side="right").astype(np.int64)
        own = self._store.table.live_rows(self.name, shard, rows - self._starts[shard])
        ranges = self._store.table.find(self.name, shard, own)
        wrong = ranges.length != self.spec.header_bytes + ranges.rows * self.spec.row_bytes
        if wrong.any():
            path = self._store.shards[int(shard[np.argmax(wrong)])].paths.extents
            raise CorruptError(f"{path}: a block of {self.name} has an impossible length; run `store verify`")
        return Located(
            bucket=self.name,
            shard=shard,
            row=own,
            data=ranges.offset + self.spec.header_bytes,
            rows=ranges.rows,
            row_in_block=ranges.row_in_block,
        )

    def read(
        self, rows: NDArray[np.int64], column: str, *, out: NDArray[Any] | None = None, verify: bool = False
    ) -> NDArray[Any]:
        """Read rows of one column by plain reads, `[B, …]` of the column's dtype (bfloat16 as its bits, uint16).

        They go into `out` if it is given (C-contiguous). With `verify`, whole rows are read and held against their checksums.

        Raises:
            StoreError: where a row is not in the bucket, a shard's file is missing, or the medium fails.
            CorruptError: where a file is not what was written; with `verify`, naming the first bad row's sample.
        """
        wanted = self.spec.column(column)
        values = np.empty((len(rows), *wanted.shape), dtype=wanted.numpy_dtype) if out is None else out
        with FileGather(self._store) as gather:
            located = self.locate(rows)
            gather.rows(located, wanted, values)
            if verify:
                own = {column: values}
                others = (c for c in self.columns if c.name != column)
                for other in others:
                    own[other.name] = np.empty((len(rows), *other.shape), dtype=other.numpy_dtype)
                    gather.rows(located, other, own[other.name])
                check_rows(self._store, located, own)
        return values

    def sample_ids(self, rows: NDArray[np.int64]) -> list[str]:
        """Give the ids of rows: by the row's digest, the index, and the sample's record."""
        located = self.locate(rows)
        return [
            self._store.record_of(int(shard), digest.tobytes()).id
            for shard, digest in zip(located.shard, self.read(rows, ID), strict=True)
        ]


class OpenShards:
    """Some open shards: their buckets, and where rows and captions lie. What a loader reads by, of one store or of several."""

    def __init__(
        self,
        *,
        where: str,
        generations: str,
        shards: Sequence[SealedShard],
        buckets: Sequence[BucketEntry],
        specs: Mapping[str, BlockSpec],
        text: TextSpec,
        encoders: Mapping[str, Json],
    ) -> None:
        """Take shards that hold rows of these buckets, and captions of this form."""
        self.where = where  # what errors call them
        self.generations = generations  # what a plan over the rows is bound to: each store's id, generation and digest
        self.shards = tuple(shards)
        self.specs = specs
        self.text = text
        self.encoders = encoders  # what made the columns
        self.table = BlockTable([shard.entry for shard in self.shards], [shard.paths for shard in self.shards])
        self.max_tokens = max((shard.entry.max_tokens for shard in self.shards), default=0)
        self._entries = tuple(buckets)

    def buckets(self, split: str | None = None) -> list[Bucket]:
        """Give the buckets that have live rows, by name; those of one split, or all."""
        entries = [entry for entry in self._entries if split in (None, entry.split)]
        return [bucket for bucket in (self._buckets[entry.name] for entry in entries) if bucket.num_rows]

    @cached_property
    def _buckets(self) -> Mapping[str, Bucket]:
        return {entry.name: self._open_bucket(entry) for entry in self._entries}

    def _open_bucket(self, entry: BucketEntry) -> Bucket:
        return Bucket(self, entry)

    def bucket(self, name: str) -> Bucket:
        """Give a bucket by its name.

        Raises:
            StoreError: where there is none.
        """
        if name not in self._buckets:
            raise StoreError(f"{self.where} has no bucket {name!r}; it has {', '.join(self._buckets) or 'none'}")
        return self._buckets[name]

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
        ranges = self.table.find(TEXT_GROUP, shard, rows)
        fixed = self.text.header_bytes + 8 + ranges.rows * self.text.caption_bytes
        tokens = (ranges.length - fixed) // self.text.token_bytes
        wrong = (ranges.length != fixed + tokens * self.text.token_bytes) | (tokens < 0)
        if wrong.any():
            path = self.shards[int(shard[np.argmax(wrong)])].paths.extents
            raise CorruptError(f"{path}: a text block has an impossible length; run `store verify`")
        return LocatedCaptions(
            shard=shard,
            row=rows,
            data=ranges.offset + self.text.header_bytes,
            captions=ranges.rows,
            tokens=tokens,
            row_in_block=ranges.row_in_block,
        )

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
        raise StoreError(f"{self.where} has no text column {column!r}")

    def check_starts(self, located: LocatedCaptions, starts: NDArray[np.int64], max_tokens: int) -> None:
        """Check captions' own pairs of `starts`, `[B, 2]`, as they were read, before anything is read by them.

        Raises:
            CorruptError: where a pair is impossible, or a caption has more than `max_tokens` tokens.
        """
        first, end = starts.T
        bad = (first < 0) | (end < first) | (end > located.tokens) | (end - first > max_tokens)
        if bad.any():
            at = int(np.argmax(bad))
            name = self.shards[int(located.shard[at])].name
            raise CorruptError(
                f"shard {name}: caption {int(located.row[at])} has the `starts` {int(first[at])} and {int(end[at])} "
                f"in a block of {int(located.tokens[at])} tokens, at most {max_tokens} to a caption; run `store verify`"
            )

    def read_caption(self, shard: int, row: int) -> dict[str, NDArray[Any]]:
        """Read one caption's embedding as `caption` does: per token column `[T, …]`, per fixed column its shape."""
        caption = self.caption(shard, row)
        values = {
            c.name: np.frombuffer(caption.tokens[c.name], dtype=c.numpy_dtype).reshape(-1, *c.shape) for c in self.text.tokens
        }
        for c in self.text.fixed:
            values[c.name] = np.frombuffer(caption.fixed[c.name], dtype=c.numpy_dtype).reshape(c.shape)
        return values

    def caption(self, shard: int, row: int) -> Caption:
        """Read one caption's embedding by plain reads, held against its checksum.

        Raises:
            CorruptError: where its bytes are not those that were written, naming shard and caption row.
        """
        reader = self.shards[shard]
        located = self.locate_captions(np.array([shard]), np.array([row]))
        item = f"shard {reader.name}, caption {row}"
        starts = np.frombuffer(reader.read(int(located.starts_offsets()[0]), 16), dtype="<i8").reshape(1, 2)
        self.check_starts(located, starts, int(located.tokens[0]))
        first, end = starts[0].tolist()
        block = {
            tensor.name: int(located.data[0]) + tensor.begin
            for tensor in self.text.tensors(int(located.captions[0]), int(located.tokens[0]))
        }
        at = int(located.row_in_block[0])

        def entry(name: str, item_bytes: int, index: int, count: int = 1) -> bytes:
            return reader.read(block[name] + index * item_bytes, count * item_bytes)

        caption = Caption(
            digest=entry(DIGEST, DIGEST_BYTES, at),
            num_tokens=end - first,
            tokens={c.name: entry(c.name, c.row_bytes, first, end - first) for c in self.text.tokens},
            fixed={c.name: entry(c.name, c.row_bytes, at) for c in self.text.fixed},
        )
        if caption_checksum(self.text, caption) != int.from_bytes(entry(CHECKSUM, 8, at), "little"):
            raise CorruptError(f"{item}: its bytes are not those that were written; run `store verify`")
        return caption


class Store(OpenShards):
    """An open store, of one generation."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(
            where=str(path),
            generations=f"{manifest.store_id}:{manifest.generation}:{manifest.digest}",
            shards=[SealedShard(path, entry) for entry in manifest.shards],
            buckets=manifest.buckets,
            specs=manifest.specs,
            text=manifest.text.spec(),
            encoders=manifest.encoders,
        )
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: Path | str, generation: int | None = None) -> Store:
        """Open a store: the newest generation, or the one named. Reads the manifest, nothing else.

        Raises:
            StoreError: where there is no store, the generation is gone, or its format is newer than this reader.
            CorruptError: where the manifest is damaged.
        """
        return cls(Path(path), read_manifest(Path(path), generation))

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
