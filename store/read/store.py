"""Open a store: buckets, row locations, and samples by id. No torch, no lock, and LMDB is not opened.

A reader stays on the generation that it opened; later generations do not affect it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bucketline.command_line import counted, default_cache, shown_rows
from bucketline.errors import CorruptError, StoreError
from bucketline.files.paths import redacted
from bucketline.forks import cached_property
from bucketline.option_value import expect, expect_int, unlike
from bucketline.store.folder import LocalFolder
from bucketline.store.format.block import (
    CAPTIONS,
    CHECKSUM,
    DIGEST_BYTES,
    ID,
    IMAGE_AXES,
    RAGGED_PREFIX,
    BlockSpec,
    Column,
    EntriesOf,
    references_of,
    sample_digest,
)
from bucketline.store.format.manifest import Manifest, read_manifest
from bucketline.store.format.text import DIGEST, Caption, Entry, RaggedSpec, TextSpec, as_arrays, caption_checksum, delivered
from bucketline.store.read.files import FileGather, check_added, check_rows, list_of
from bucketline.store.remote.urls import RemoteOptions, is_url, refuse_misspelt
from bucketline.store.shard.reader import SealedShard, as_keys
from bucketline.store.shard.row_locator import BlockTable, Located, LocatedEntries
from bucketline.store.shard.sidecar import DroppedRows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from bucketline.store.folder import Folder
    from bucketline.store.format.schema import BucketEntry, RaggedEntry, SampleRecord
    from bucketline.store.remote.cache.remote_source import RemoteSource
    from bucketline.store.remote.objects import ObjectFolder
    from bucketline.typed_json import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRows:
    """The rows that one store has in a bucket, and how many of these a pass reads."""

    first: int  # row of the bucket
    num_rows: int
    per_pass: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedRows:
    """A column that was added to rows after they were written."""

    specs: Mapping[str, BlockSpec]  # of its blocks, by bucket
    shard: NDArray[np.int64]  # [shards] ordinal of the file with the values of a shard's rows; -1 if they have none


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
        self._added = {name: own for name, own in store.added.items() if self.name in own.specs}
        self._starts, self._ends = store.live_bounds[entry.name]

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns that every row has: those of the rows' blocks, then the added ones."""
        added = (own.specs[self.name].column(name) for name, own in self._added.items() if not self.rows_without(name))
        return (*self.spec.columns, *added)

    @property
    def references(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the references that the rows have, by role and in order; one of size 0 they lack."""
        shapes = {column.name: column.shape for column in self.columns}
        return {role: shapes[role] for role in references_of(shapes) if 0 not in shapes[role]}

    def column(self, name: str) -> Column:
        """Return a column by name.

        Raises:
            StoreError: if there is none, or it was added and some rows lack it.
        """
        if name not in self._added:
            return self.spec.column(name)
        if lacking := self.rows_without(name):
            raise StoreError(
                f"{lacking} of {self.num_rows} rows of {self.name} in {self._store.where} have no {name!r}: they "
                f"came after it was added; `add_column` with {name!r} gives it to the rows that lack it"
            )
        return self._added[name].specs[self.name].column(name)

    def rows_without(self, name: str) -> int:
        """Return how many rows lack an added column; all, if there is no column of that name."""
        live = self._ends - self._starts
        return int(live[self._added[name].shard < 0].sum()) if name in self._added else int(live.sum())

    @property
    def num_rows(self) -> int:
        """Number of live rows, over all shards."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def runs(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return runs of consecutive row numbers that one shard holds, in row order: (shard, repeat, rows), `[N]` each.

        `repeat` counts how often the shard has come before: 0, unless a mixture repeats its store. If a pass reads a fraction
        of some store's rows, they are those of its first pass.
        """
        live = self._ends - self._starts
        shard = np.flatnonzero(live)
        return shard, np.zeros_like(shard), live[shard]

    def parts(self) -> tuple[StoreRows, ...]:
        """Return each store's rows, if a pass does not read all rows of the bucket; otherwise nothing."""
        return ()

    def shard_of(self, row: int) -> tuple[int, int]:
        """Return the ordinal of the shard that holds a row, and the bucket's first row in that shard."""
        ordinal = int(np.searchsorted(self._ends, row, side="right"))
        return ordinal, int(self._starts[ordinal])

    def first_rows(self, shard: int) -> list[int]:
        """Return the number of the first row of a shard, by its ordinal; one for each repeat of a mixture."""
        return [int(self._starts[shard])]

    def numbers_of(self, shard: int, row: int) -> list[int]:
        """Return the number of a live row of a shard, one for each repeat of a mixture: the inverse of `locate`.

        `row`: its number in the shard, dropped rows included.
        """
        live = row - int(np.searchsorted(self._store.shards[shard].dropped_rows(self.name), row))
        return [first + live for first in self.first_rows(shard)]

    def locate(self, rows: NDArray[np.int64], added: Sequence[str] = ()) -> Located:
        """Locate rows by number, `[B]`, each from 0 to `num_rows` - 1, and their values of some `added` columns.

        Raises:
            CorruptError: if a shard's sidecars do not cover a row.
            StoreError: if a row is out of range, or a shard's file is missing.
        """
        (located,) = locate_all([(self, rows)], added)
        return located

    def _place(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the shards of rows, and their numbers there, `[B]` each."""
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= self.num_rows):
            raise StoreError(
                f"{self.name} has the rows 0 to {self.num_rows - 1}, requested were {int(rows.min())} to "
                f"{int(rows.max())}; number a bucket's rows from 0 to num_rows - 1"
            )
        live = self._live(rows)
        shard = np.searchsorted(self._ends, live, side="right").astype(np.int64)
        return shard, self._store.table.live_rows(self.name, shard, live - self._starts[shard])

    def _live(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the live row, counted over all shards, for each row number; rows of a repeated store share one."""
        return rows

    def _locate_added(self, name: str, located: Located) -> Located:
        self.column(name)  # which raises if some rows lack it
        added = self._added[name]
        spec = added.specs[self.name]
        (own,) = _find(self._store, [(self, spec, len(located.row))], added.shard[located.shard], located.row)
        return replace(own, spec=spec)

    def read(
        self, rows: NDArray[np.int64], column: str, *, out: NDArray[Any] | None = None, verify: bool = False
    ) -> NDArray[Any]:
        """Return rows of one column, `[B, …]` of the column's dtype (bfloat16 as its bits, uint16), with plain reads.

        Rows are read into `out` (C-contiguous) if given. With `verify`, all columns are read and checksums compared.

        Raises:
            StoreError: if a row is not in the bucket, a shard's file is missing, or the medium fails.
            CorruptError: if a file is damaged; with `verify`, the message names the first damaged row's sample.
        """
        rows = np.asarray(rows)
        if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
            raise unlike(
                "rows", rows, f"whole numbers, 0 to {self.num_rows - 1}, in one dimension: give np.arange(…), or a list"
            )
        rows = rows.astype(np.int64, copy=False)
        wanted, is_added = self.column(column), column in self._added
        values = np.empty((len(rows), *wanted.shape), dtype=wanted.numpy_dtype) if out is None else out
        gather = FileGather(self._store)
        located = self.locate(rows, [column] if is_added else ())
        gather.rows(located.added[column] if is_added else located, wanted, values)
        if verify:
            own = {} if is_added else {column: values}
            others = (c for c in self.spec.columns if c.name not in own)
            for other in others:
                own[other.name] = np.empty((len(rows), *other.shape), dtype=other.numpy_dtype)
                gather.rows(located, other, own[other.name])
            check_rows(self._store, located, own)
            if is_added:
                check_added(self._store, located, column, values, own[ID])
        return values

    def read_ragged(self, row: int, name: str, caption: int = 0) -> dict[str, NDArray[Any]] | None:
        """Return a row's entry of a ragged group, with plain reads, checksums verified: token columns `[T, …]`, fixed `[…]`.

        Of a group of captions it is the entry of the row's n-th caption, or of the empty one if it has none. None if the row
        has no entry, or fewer captions.

        Raises:
            StoreError: if the store has no such row or group, or a shard's file is missing.
            CorruptError: if the row or the entry is damaged.
        """
        spec, rows = self._store.ragged_spec(name), np.array([row])
        own = self.read(rows, CAPTIONS if spec.of is EntriesOf.CAPTIONS else spec.group, verify=True).reshape(-1)
        number = int(own[caption]) if 0 <= caption < len(own) else -1
        return None if number < 0 else self._store.read_entry(name, int(self.locate(rows).shard[0]), number)

    def sample_ids(self, rows: NDArray[np.int64]) -> list[str]:
        """Return the sample ids of rows, through the index and the sample records."""
        located = self.locate(rows)
        return [
            self._store.record_of(int(shard), digest.tobytes()).id
            for shard, digest in zip(located.shard, self.read(rows, ID), strict=True)
        ]


def locate_all(parts: Sequence[tuple[Bucket, NDArray[np.int64]]], added: Sequence[str] = ()) -> list[Located]:
    """Locate rows of several buckets of a store together, which costs little more than one bucket's; see `Bucket.locate`."""
    store = parts[0][0]._store
    places = [bucket._place(rows) for bucket, rows in parts]
    shard, row = places[0] if len(places) == 1 else map(np.concatenate, zip(*places, strict=True))
    located = _find(store, [(bucket, bucket.spec, len(rows)) for bucket, rows in parts], shard, row)
    if not added:
        return located
    return [
        replace(own, added={name: bucket._locate_added(name, own) for name in added})
        for (bucket, _), own in zip(parts, located, strict=True)
    ]


def _find(
    store: OpenShards, parts: Sequence[tuple[Bucket, BlockSpec, int]], shard: NDArray[np.int64], row: NDArray[np.int64]
) -> list[Located]:
    """Locate rows by the ordinals of their files and by their numbers there; `parts`: whose they are, and how many of each."""
    ranges = store.table.find([(bucket.name, count) for bucket, _, count in parts], shard, row)
    counts = [count for _, _, count in parts]
    header, widths = np.repeat([(spec.header_bytes, spec.row_bytes) for _, spec, _ in parts], counts, axis=0).T
    wrong = ranges.length != header + ranges.rows * widths
    if wrong.any():
        worst = int(np.argmax(wrong))
        path = store.files[int(shard[worst])].paths.meta
        name = np.repeat([bucket.name for bucket, _, _ in parts], counts)[worst]
        raise CorruptError(f"{path}: a block of {name} has an impossible length; run `store verify`")
    data = ranges.offset + header
    whole = Located(bucket="", shard=shard, row=row, data=data, rows=ranges.rows, row_in_block=ranges.row_in_block)
    ends = np.cumsum(counts).tolist()
    return [
        whole.where(slice(end - count, end), bucket=bucket.name) for (bucket, _, count), end in zip(parts, ends, strict=True)
    ]


class OpenShards:
    """Open shards with their buckets, rows and captions: what a store and a mixture of several have in common."""

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
        ragged: Mapping[str, RaggedEntry] = MappingProxyType({}),
        added: Mapping[str, Mapping[str, BlockSpec]] = MappingProxyType({}),
        plain_reads: bool = False,
    ) -> None:
        """Take shards with rows of these buckets, captions of this spec, these ragged groups, and added columns by bucket.

        `plain_reads`: do not map sidecars.
        """
        self.where = where  # the shards' name in errors
        self.generations = generations  # each store's id, generation and digest; plans are bound to it
        self.shards = tuple(shards)
        self.specs = specs
        self.text = text
        self.encoders = encoders  # provenance of the columns
        self.ragged = ragged  # by name
        specs_of_ragged = (group.spec(name) for name, group in ragged.items())
        self.groups: dict[str, RaggedSpec] = {spec.group: spec for spec in (text, *specs_of_ragged)}
        self.plain_reads = plain_reads
        files = list(self.shards)
        self.added: dict[str, AddedRows] = {}  # by name
        for name, specs_of_column in added.items():
            ordinals = np.full(len(self.shards), -1, dtype=np.int64)
            for ordinal, shard in enumerate(self.shards):
                if name in shard.entry.added:
                    ordinals[ordinal] = len(files)
                    files.append(shard.column_shard(name))
            self.added[name] = AddedRows(specs=specs_of_column, shard=ordinals)
        self.files = tuple(files)  # the shards, then the files of added columns
        self.table = BlockTable(
            [file.entry for file in self.files],
            [file.paths for file in self.files],
            plain_reads=plain_reads,
            sources=[file.source for file in self.files],
            dropped=[file.dropped for file in self.files],
        )
        for ordinal, shard in enumerate(self.files):
            shard.share(self.table, ordinal)
        self.max_tokens = max((shard.entry.max_tokens for shard in self.shards), default=0)
        self.max_entry_tokens = {  # of the longest entry of each ragged group
            name: max((own.max_tokens for shard in self.shards if (own := shard.entry.ragged.get(name))), default=0)
            for name in ragged
        }
        self._entries = tuple(buckets)

    def spec_with(self, column: str, bucket: str) -> BlockSpec:
        """Return the columns of the blocks of a bucket that have a column: the rows', or the added column's own."""
        return self.added[column].specs[bucket] if column in self.added else self.specs[bucket]

    def store_of_shards(self) -> NDArray[np.int64]:
        """Return the number of each shard's store among those that are read as one, `[shards]`."""
        return np.zeros(len(self.shards), dtype=np.int64)

    def buckets(self, split: str | None = None) -> list[Bucket]:
        """Return the buckets that have live rows, sorted by name: those of one split, or all."""
        entries = [entry for entry in self._entries if split in (None, entry.split)]
        return [bucket for bucket in (self._buckets[entry.name] for entry in entries) if bucket.num_rows]

    @cached_property
    def live_bounds(self) -> dict[str, NDArray[np.int64]]:
        """Return each bucket's live rows before every shard, and those up to its end, `[2, shards]`."""
        numbers = {entry.name: number for number, entry in enumerate(self._entries)}
        live = np.zeros((len(numbers), len(self.shards)), dtype=np.int64)
        for ordinal, shard in enumerate(self.shards):
            for name, group in shard.entry.groups.items():
                if name in numbers:
                    live[numbers[name], ordinal] = group.live
        ends = live.cumsum(axis=1)
        return dict(zip(numbers, np.stack([ends - live, ends], axis=1), strict=True))

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
            raise StoreError(
                f"{self.where} has no bucket {name!r}; it has {', '.join(self._buckets) or 'none'}: name one of these"
            )
        return self._buckets[name]

    def record_of(self, shard: int, digest: bytes) -> SampleRecord:
        """Return a sample's record by the digest in its shard's row.

        Raises:
            CorruptError: if the shard's index does not have it.
        """
        reader = self.shards[shard]
        if (entry := reader.find(digest)) is None:
            raise CorruptError(
                f"{reader.paths.meta}: has no sample with the digest {digest.hex()}, which a row of the shard has"
            )
        return reader.record(entry)

    def find_digest(self, digest: bytes) -> tuple[SealedShard, SampleRecord] | None:
        """Return a sample's shard and record by the digest of its id, by index lookup; None if no shard has it."""
        for shard in reversed(self.shards):
            if entry := shard.find(digest):
                return shard, shard.record(entry)
        return None

    def ids_of(self, digests: Sequence[bytes]) -> list[str]:
        """Return the sample ids of a batch's rows by their digests; reads each sample's record.

        Raises:
            StoreError: if a row is of another store.
        """
        ids = []
        for digest in digests:
            if (found := self.find_digest(digest)) is None:
                raise StoreError(
                    f"{self.where} has no sample with the digest {digest.hex()}: the batch is of another store; give one of "
                    "this loader"
                )
            ids.append(found[1].id)
        return ids

    def locate_entries(self, spec: RaggedSpec, shard: NDArray[np.int64], rows: NDArray[np.int64]) -> LocatedEntries:
        """Locate entries of one of the `groups` by shard and number, `[B]` each.

        Raises:
            CorruptError: if a shard's sidecars do not cover an entry.
        """
        ranges = self.table.find([(spec.group, len(rows))], shard, rows)
        fixed = spec.header_bytes + 8 + ranges.rows * spec.entry_bytes
        tokens = (ranges.length - fixed) // spec.token_bytes
        wrong = (ranges.length != fixed + tokens * spec.token_bytes) | (tokens < 0)
        if wrong.any():
            path = self.shards[int(shard[np.argmax(wrong)])].paths.meta
            raise CorruptError(f"{path}: a {spec.group} block has an impossible length; run `store verify`")
        return LocatedEntries(
            spec=spec,
            shard=shard,
            row=rows,
            data=ranges.offset + spec.header_bytes,
            entries=ranges.rows,
            tokens=tokens,
            row_in_block=ranges.row_in_block,
        )

    def check_starts(self, located: LocatedEntries, starts: NDArray[np.int64], max_tokens: int) -> None:
        """Check the `starts` pairs that were read for entries, `[B, 2]`, before they are used as offsets.

        Raises:
            CorruptError: if a pair is impossible, or an entry has more than `max_tokens` tokens.
        """
        first, end = starts.T
        bad = (first < 0) | (end < first) | (end > located.tokens) | (end - first > max_tokens)
        if bad.any():
            at = int(np.argmax(bad))
            name, label = self.shards[int(located.shard[at])].name, located.spec.label
            raise CorruptError(
                f"shard {name}: {label} {int(located.row[at])} has the `starts` {int(first[at])} and {int(end[at])} "
                f"in a block of {int(located.tokens[at])} tokens, at most {max_tokens} to one; run `store verify`"
            )

    def read_caption(self, shard: int, row: int) -> dict[str, NDArray[Any]]:
        """Return one caption's embedding, read as in `caption`: token columns `[T, …]`, fixed columns in their shape.

        Quantised tokens are returned as they are delivered, in F16.
        """
        return self._arrays(self.text, shard, row)

    def read_entry(self, name: str, shard: int, row: int) -> dict[str, NDArray[Any]]:
        """Return one entry of a ragged group, read as in `entry`: token columns `[T, …]`, fixed columns in their shape.

        Raises:
            StoreError: if the store has no such group.
            CorruptError: as `entry`.
        """
        return self._arrays(self.ragged_spec(name), shard, row)

    def _arrays(self, spec: RaggedSpec, shard: int, row: int) -> dict[str, NDArray[Any]]:
        return as_arrays(spec.delivered, delivered(spec, self.entry(spec, shard, row)))

    def ragged_spec(self, name: str) -> RaggedSpec:
        """Return the columns of a ragged group.

        Raises:
            StoreError: if there is none of that name.
        """
        if name not in self.ragged:
            raise StoreError(f"{self.where} has no ragged group {name!r:.80}; it has {', '.join(self.ragged) or 'none'}")
        return self.groups[RAGGED_PREFIX + name]

    def caption(self, shard: int, row: int) -> Caption:
        """Return one caption's embedding, as `entry`."""
        return self.entry(self.text, shard, row)

    def entry(self, spec: RaggedSpec, shard: int, row: int) -> Entry:
        """Return one entry of one of the `groups`, with plain reads and its checksum verified.

        Raises:
            CorruptError: if it does not match; the message names shard and entry.
        """
        reader = self.shards[shard]
        located = self.locate_entries(spec, np.array([shard]), np.array([row]))
        starts = np.frombuffer(reader.read(int(located.starts_offsets()[0]), 16), dtype="<i8").reshape(1, 2)
        self.check_starts(located, starts, int(located.tokens[0]))
        first, end = starts[0].tolist()
        at = int(located.row_in_block[0])
        places = {CHECKSUM: (8, at, 1), DIGEST: (DIGEST_BYTES, at, 1)}  # bytes of an item, its number, how many
        places |= {column.name: (column.row_bytes, first, end - first) for column in spec.tokens}
        places |= {column.name: (column.row_bytes, at, 1) for column in spec.fixed}
        offsets, found = [], {}
        for tensor in spec.tensors(int(located.entries[0]), int(located.tokens[0])):
            if tensor.name in places:
                item_bytes, index, count = places[tensor.name]
                offsets.append(int(located.data[0]) + tensor.begin + index * item_bytes)
                found[tensor.name] = bytearray(item_bytes * count)
        reader.read_into(offsets, [memoryview(own) for own in found.values()])
        entry = Entry(
            digest=bytes(found[DIGEST]),
            num_tokens=end - first,
            tokens={column.name: bytes(found[column.name]) for column in spec.tokens},
            fixed={column.name: bytes(found[column.name]) for column in spec.fixed},
        )
        if caption_checksum(spec, entry) != int.from_bytes(found[CHECKSUM], "little"):
            item = f"shard {reader.name}, {spec.label} {row}"
            raise CorruptError(f"{item}: its bytes do not match their checksum; run `store verify`")
        return entry


class Store(OpenShards):
    """An open store at one generation."""

    def __init__(
        self, path: Path, manifest: Manifest, *, plain_reads: bool = False, source: RemoteSource | None = None
    ) -> None:
        """`source`: of a store in object storage, whose files in the cache are at `path`."""
        self.dropped = dropped = DroppedRows(path, manifest, None if source is None else source.read)
        super().__init__(
            where=str(path) if source is None else source.url,
            generations=f"{manifest.store_id}:{manifest.generation}:{manifest.digest}",
            shards=[
                SealedShard(path, entry, plain_reads=plain_reads, source=source, dropped=dropped) for entry in manifest.shards
            ],
            buckets=manifest.buckets,
            specs=manifest.specs,
            text=manifest.text.spec(),
            encoders=manifest.encoders,
            ragged=manifest.ragged,
            added=manifest.added_specs,
            plain_reads=plain_reads,
        )
        self.path = path
        self.manifest = manifest
        self.source = source

    def __repr__(self) -> str:
        shards = counted(len(self.manifest.shards), "shard")
        about = f"Store {redacted(str(self.place))}, generation {self.manifest.generation}, {shards}"
        return shown_rows(about, [(bucket.name, bucket.num_rows) for bucket in self.buckets()])

    @classmethod
    def open(
        cls,
        path: Path | str,
        generation: int | None = None,
        *,
        plain_reads: bool = False,
        remote: RemoteOptions | None = None,
        reads_rows: bool = False,
    ) -> Store:
        """Open a store at its newest generation, or at `generation`. Reads only the manifest.

        `path` is a folder, or the URL of one in object storage (`s3://bucket/photos.store`), which `remote` tells how to reach
        and where to cache. Such a store's files are read through the cache, line by line. With `reads_rows` the lists of their
        blocks are requested at once.

        With `plain_reads` no file is mapped: a truncated file or a failing disk raises an error instead of SIGBUS.

        Raises:
            StoreError: if there is no store, the generation is gone, or its format is newer than this reader.
            CorruptError: if the manifest is damaged.
            UsageError: if a URL cannot be a store's.
        """
        expect("a store's place", path or None, str | Path, "a path or a URL, such as 'photos.store'")
        if generation is not None:
            expect_int("generation", generation, "the number of a generation, or None for the newest")
        if not is_url(path):
            refuse_misspelt(str(path))
            return cls(Path(path), read_manifest(Path(path), generation), plain_reads=plain_reads)
        from bucketline.store.remote.cache.remote_source import open_remote  # imports what a local store does without

        options = remote or RemoteOptions()
        cache = options.cache or default_cache()
        manifest, source = open_remote(str(path), options, cache, generation, reads_rows=reads_rows)
        return cls(source.path, manifest, plain_reads=plain_reads, source=source)

    @classmethod
    def at(cls, folder: Folder, manifest: Manifest, cache: Path | None = None) -> Store:
        """Return a generation of the store in a folder; in object storage by way of the cache, by default the usual one."""
        if isinstance(folder, LocalFolder):
            return cls(folder.path, manifest)
        from bucketline.store.remote.cache.remote_source import source_at

        source = source_at(cast("ObjectFolder", folder), cache or default_cache(), manifest)
        return cls(source.path, manifest, source=source)

    @cached_property
    def withdrawn_keys(self) -> NDArray[np.bytes_]:
        """Return the digests of the withdrawn ids, as `as_keys` does."""
        return as_keys([sample_digest(sample_id) for sample_id in self.manifest.withdrawn])

    @property
    def place(self) -> Path | str:
        """The store's folder, or its URL."""
        return self.path if self.source is None else self.source.url

    @property
    def folder(self) -> Folder:
        """The store's folder, on a disk or in object storage."""
        return LocalFolder(self.path) if self.source is None else self.source.objects

    @property
    def absolute(self) -> Path | str:
        """`place`, such that another process finds it from any folder."""
        return self.path.absolute() if self.source is None else self.source.url

    @property
    def is_local(self) -> bool:
        """True if looking for a newer generation is a look at a folder."""
        return self.source is None

    def reopened(self, generation: int | None = None) -> Store:
        """Return the store at another generation, by default at its newest, opened with the same options; see `open`."""
        options = None if self.source is None else self.source.options
        return Store.open(self.place, generation, plain_reads=self.plain_reads, remote=options)

    def fetch_indexes(self) -> None:
        """Get the sidecars of all shards and the list of dropped rows, if they are in object storage, many at a time."""
        if self.source is not None:
            sidecars = ((shard.paths.meta, shard.entry.meta) for shard in self.shards)
            self.source.fetch([*list_of(self.path, self.manifest), *sidecars])

    def with_plain_reads(self) -> Store:
        """Return the store, opened so that nothing is mapped."""
        return Store(self.path, self.manifest, plain_reads=True, source=self.source)

    def sample(self, sample_id: str) -> tuple[SealedShard, SampleRecord]:
        """Return a sample's record and its shard, by index lookup.

        Raises:
            StoreError: if the store has no such sample.
        """
        if (found := self.find_digest(sample_digest(sample_id))) is None:
            raise StoreError(
                f"{self.path} has no sample {sample_id!r:.200}; ids are paths in the source, with their "
                "extension; `store ls` lists them"
            )
        return found
