"""Open a store: buckets, row locations, and samples by id. No torch, no lock, and LMDB is not opened.

A reader stays on the generation that it opened; later generations do not affect it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.command_line import default_cache
from bucketline.errors import CorruptError, StoreError
from bucketline.forks import cached_property
from bucketline.store.format.block import ID, IMAGE_AXES, BlockSpec, Column
from bucketline.store.format.hashing import DIGEST_BYTES, sample_digest
from bucketline.store.format.manifest import BucketEntry, Manifest, read_manifest
from bucketline.store.format.text_block import CHECKSUM, DIGEST, TEXT_GROUP, Caption, TextSpec, caption_checksum, delivered
from bucketline.store.read.located import Located, LocatedCaptions
from bucketline.store.read.preadv import FileGather, check_rows
from bucketline.store.remote.urls import RemoteOptions, is_url, refuse_misspelt
from bucketline.store.shard.reader import SealedShard
from bucketline.store.shard.row_locator import BlockTable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from bucketline.store.format.sample_record import SampleRecord
    from bucketline.store.remote.cache.remote_source import RemoteSource
    from bucketline.typed_json import Json


class Bucket:
    """A bucket of a store: one split and an exact size of each axis, over all shards. Rows are numbered 0 to n - 1."""

    def __init__(self, store: OpenShards, entry: BucketEntry) -> None:
        self._store = store
        self.name = entry.name
        self.axes = {axis.name: axis.size for axis in entry.axes}  # in the order of the name's numbers
        self.height_px = self.axes.get(IMAGE_AXES[0], 0)  # of images and video; of other buckets 0
        self.width_px = self.axes.get(IMAGE_AXES[1], 0)
        self.split = entry.split
        self.spec = store.specs[entry.name]
        live = [group.live if (group := shard.entry.groups.get(entry.name)) else 0 for shard in store.shards]
        self._ends = np.cumsum(live, dtype=np.int64)
        self._starts = self._ends - np.array(live, dtype=np.int64)

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.spec.columns

    @property
    def num_rows(self) -> int:
        """Number of live rows, over all shards."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def runs(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return runs of consecutive row numbers that one shard holds, in row order: (shard, repeat, rows), `[N]` each.

        `repeat` counts how often the shard has come before: 0, unless a mixture repeats its store.
        """
        live = self._ends - self._starts
        shard = np.flatnonzero(live)
        return shard, np.zeros_like(shard), live[shard]

    def shard_of(self, row: int) -> tuple[int, int]:
        """Return the ordinal of the shard that holds a row, and the bucket's first row in that shard."""
        ordinal = int(np.searchsorted(self._ends, row, side="right"))
        return ordinal, int(self._starts[ordinal])

    def locate(self, rows: NDArray[np.int64]) -> Located:
        """Locate rows by number, `[B]`, each from 0 to `num_rows` - 1.

        Raises:
            CorruptError: if a shard's sidecars do not cover a row.
            StoreError: if a row is out of range, or a shard's file is missing.
        """
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= self.num_rows):
            raise StoreError(
                f"{self.name} has the rows 0 to {self.num_rows - 1}, requested were {int(rows.min())} to {int(rows.max())}"
            )
        return self._locate_live(self._live(rows))

    def _live(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the live row, counted over all shards, for each row number; rows of a repeated store share one."""
        return rows

    def _locate_live(self, rows: NDArray[np.int64]) -> Located:
        """Locate live rows by their number over all shards."""
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
        """Return rows of one column, `[B, …]` of the column's dtype (bfloat16 as its bits, uint16), with plain reads.

        Rows are read into `out` (C-contiguous) if given. With `verify`, all columns are read and checksums compared.

        Raises:
            StoreError: if a row is not in the bucket, a shard's file is missing, or the medium fails.
            CorruptError: if a file is damaged; with `verify`, the message names the first damaged row's sample.
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
        """Return the sample ids of rows, through the index and the sample records."""
        located = self.locate(rows)
        return [
            self._store.record_of(int(shard), digest.tobytes()).id
            for shard, digest in zip(located.shard, self.read(rows, ID), strict=True)
        ]


class OpenShards:
    """A set of open shards with their buckets, rows and captions: the loader's view of one store or several."""

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
        plain_reads: bool = False,
    ) -> None:
        """Take shards with rows of these buckets and captions of this spec. `plain_reads`: do not map sidecars."""
        self.where = where  # the shards' name in errors
        self.generations = generations  # each store's id, generation and digest; plans are bound to it
        self.shards = tuple(shards)
        self.specs = specs
        self.text = text
        self.encoders = encoders  # provenance of the columns
        self.plain_reads = plain_reads
        self.table = BlockTable(
            [shard.entry for shard in self.shards],
            [shard.paths for shard in self.shards],
            plain_reads=plain_reads,
            sources=[shard.source for shard in self.shards],
        )
        for ordinal, shard in enumerate(self.shards):
            shard.share(self.table, ordinal)
        self.max_tokens = max((shard.entry.max_tokens for shard in self.shards), default=0)
        self._entries = tuple(buckets)

    def buckets(self, split: str | None = None) -> list[Bucket]:
        """Return the buckets that have live rows, sorted by name: those of one split, or all."""
        entries = [entry for entry in self._entries if split in (None, entry.split)]
        return [bucket for bucket in (self._buckets[entry.name] for entry in entries) if bucket.num_rows]

    @cached_property
    def _buckets(self) -> Mapping[str, Bucket]:
        return {entry.name: self._open_bucket(entry) for entry in self._entries}

    def _open_bucket(self, entry: BucketEntry) -> Bucket:
        return Bucket(self, entry)

    def bucket(self, name: str) -> Bucket:
        """Return a bucket by name.

        Raises:
            StoreError: if there is none.
        """
        if name not in self._buckets:
            raise StoreError(f"{self.where} has no bucket {name!r}; it has {', '.join(self._buckets) or 'none'}")
        return self._buckets[name]

    def record_of(self, shard: int, digest: bytes) -> SampleRecord:
        """Return a sample's record by the digest in its shard's row.

        Raises:
            CorruptError: if the shard's index does not have it.
        """
        reader = self.shards[shard]
        if (entry := reader.find(digest)) is None:
            raise CorruptError(
                f"{reader.paths.index}: has no sample with the digest {digest.hex()}, which a row of the shard has"
            )
        return reader.record(entry)

    def find_digest(self, digest: bytes) -> tuple[SealedShard, SampleRecord] | None:
        """Return a sample's shard and record by the digest of its id, by index lookup; None if no shard has it."""
        for shard in reversed(self.shards):
            if entry := shard.find(digest):
                return shard, shard.record(entry)
        return None

    def locate_captions(self, shard: NDArray[np.int64], rows: NDArray[np.int64]) -> LocatedCaptions:
        """Locate captions by shard and caption row, `[B]` each.

        Raises:
            CorruptError: if a shard's sidecars do not cover a caption.
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
        """Return the byte offset of each caption's tokens of a column in the shard's file, `[B]`.

        `first_token` is each caption's first entry of `starts`. A block's tensors: starts, checksums, fixed, tokens, digests.
        """
        at = located.data + 8 + located.captions * (8 + 8 + self.text.fixed_bytes)
        for token_column in self.text.tokens:
            if token_column.name == column:
                return at + first_token * token_column.row_bytes
            at = at + located.tokens * token_column.row_bytes
        raise StoreError(f"{self.where} has no text column {column!r}")

    def check_starts(self, located: LocatedCaptions, starts: NDArray[np.int64], max_tokens: int) -> None:
        """Check the `starts` pairs that were read for captions, `[B, 2]`, before they are used as offsets.

        Raises:
            CorruptError: if a pair is impossible, or a caption has more than `max_tokens` tokens.
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
        """Return one caption's embedding, read as in `caption`: token columns `[T, …]`, fixed columns in their shape.

        Quantised tokens are returned as they are delivered, in F16.
        """
        caption, text = delivered(self.text, self.caption(shard, row)), self.text.delivered
        values = {c.name: np.frombuffer(caption.tokens[c.name], dtype=c.numpy_dtype).reshape(-1, *c.shape) for c in text.tokens}
        for c in text.fixed:
            values[c.name] = np.frombuffer(caption.fixed[c.name], dtype=c.numpy_dtype).reshape(c.shape)
        return values

    def caption(self, shard: int, row: int) -> Caption:
        """Return one caption's embedding, with plain reads and its checksum verified.

        Raises:
            CorruptError: if it does not match; the message names shard and caption row.
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
            raise CorruptError(f"{item}: its bytes do not match their checksum; run `store verify`")
        return caption


class Store(OpenShards):
    """An open store at one generation."""

    def __init__(
        self, path: Path, manifest: Manifest, *, plain_reads: bool = False, source: RemoteSource | None = None
    ) -> None:
        """`source`: of a store in object storage, whose files in the cache are at `path`."""
        super().__init__(
            where=str(path) if source is None else source.url,
            generations=f"{manifest.store_id}:{manifest.generation}:{manifest.digest}",
            shards=[SealedShard(path, entry, plain_reads=plain_reads, source=source) for entry in manifest.shards],
            buckets=manifest.buckets,
            specs=manifest.specs,
            text=manifest.text.spec(),
            encoders=manifest.encoders,
            plain_reads=plain_reads,
        )
        self.path = path
        self.manifest = manifest
        self.source = source

    @classmethod
    def open(
        cls,
        path: Path | str,
        generation: int | None = None,
        *,
        plain_reads: bool = False,
        remote: RemoteOptions | None = None,
    ) -> Store:
        """Open a store at its newest generation, or at `generation`. Reads only the manifest.

        `path` is a folder, or the URL of one in object storage (`s3://bucket/photos.store`), which `remote` tells how to reach
        and where to cache. Such a store's files are read through the cache, line by line.

        With `plain_reads` no file is mapped: a truncated file or a failing disk raises an error instead of SIGBUS.

        Raises:
            StoreError: if there is no store, the generation is gone, or its format is newer than this reader.
            CorruptError: if the manifest is damaged.
            UsageError: if a URL cannot be a store's.
        """
        if not is_url(path):
            refuse_misspelt(str(path))
            return cls(Path(path), read_manifest(Path(path), generation), plain_reads=plain_reads)
        from bucketline.store.remote.cache.remote_source import open_remote  # imports what a local store does without

        options = remote or RemoteOptions()
        manifest, source = open_remote(str(path), options, options.cache or default_cache(), generation)
        return cls(source.path, manifest, plain_reads=plain_reads, source=source)

    @property
    def place(self) -> Path | str:
        """The store's folder, or its URL."""
        return self.path if self.source is None else self.source.url

    @property
    def absolute(self) -> Path | str:
        """`place`, such that another process finds it from any folder."""
        return self.path.absolute() if self.source is None else self.source.url

    def with_plain_reads(self) -> Store:
        """Return the store, opened so that nothing is mapped."""
        return Store(self.path, self.manifest, plain_reads=True, source=self.source)

    def sample(self, sample_id: str) -> tuple[SealedShard, SampleRecord]:
        """Return a sample's record and its shard, by index lookup.

        Raises:
            StoreError: if the store has no such sample.
        """
        if (found := self.find_digest(sample_digest(sample_id))) is None:
            raise StoreError(f"{self.path} has no sample {sample_id!r:.200}; ids are paths in the source, with their extension")
        return found
