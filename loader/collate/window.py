"""Windows: micro-batches whose copies are planned together (draws, caption offsets, small columns).

Copying a batch of a few MiB takes half a millisecond, and numpy and torch calls on arrays of a few rows would take as long
again. For all micro-batches of a window together, these calls cost hardly more than for one.

Letters: M micro-batches, N rows of all of them, B rows of one, V maximum captions per sample, L tokens (padded).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import CorruptError
from bucketline.loader.batch import BATCH_PRESENT_PREFIX
from bucketline.loader.collate.buffers import EMPTY, BufferLayout, RequestedGroup, choose_captions, make_layout, mirrored_left
from bucketline.loader.collate.gather import PlainRead
from bucketline.store.format.block import CAPTIONS, CROP, ID, ORIGINAL_SIZE
from bucketline.store.format.text import EMPTY_CAPTION_ROW
from bucketline.store.shard.mapped import ZERO_BYTES
from bucketline.store.shard.row_locator import LocatedEntries, joined

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from bucketline.loader.collate.buffers import Conditioning, RequestedColumn
    from bucketline.loader.collate.gather import Gather, GatherIndex
    from bucketline.loader.mixture import Mixture
    from bucketline.store import Bucket, Store
    from bucketline.store.remote.cache.batch_lines import HeldLines
    from bucketline.store.shard.row_locator import Located

SMALL_COLUMNS = (ORIGINAL_SIZE, CROP, ID)


@dataclass(slots=True, kw_only=True, eq=False)
class PendingBatch:
    """A micro-batch that will be filled: its planned rows and their locations."""

    step: int
    micro_step: int
    epoch: int
    bucket: Bucket
    rows: NDArray[np.int64]  # [B] of the bucket
    weight: NDArray[np.float32]  # [B]
    keys: NDArray[np.int64]  # [B]
    located: Located  # [B]
    entries: list[RaggedRows] | None = None  # by group, [B] each, once readahead has drawn captions and located them
    lines: list[HeldLines] = field(default_factory=list)  # of a store in object storage, held until it is copied
    window: Window | None = None  # of this micro-batch only, until it is released

    def release(self) -> None:
        lines, self.lines, self.window = self.lines, [], None
        for requested in lines:
            requested.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """A micro-batch that is ready to be copied. For `verify`, also the values that the window was planned from."""

    batch: PendingBatch
    layout: BufferLayout
    large: dict[str, GatherIndex | PlainRead]  # by field
    small: NDArray[np.uint8]  # [small_bytes], all small fields
    begin: int  # of its rows in the window
    end: int
    entries: Sequence[RaggedRows]  # of the window, by group: those of the captions first
    stored: Mapping[str, NDArray[np.uint8]]  # small columns as read, [N, row_bytes] of the window
    columns: tuple[RequestedColumn, ...]


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """The entries of a window's rows in a group: their captions' embeddings, or those of a ragged group."""

    group: RequestedGroup
    located: LocatedEntries  # of the rows that have one
    has: NDArray[np.bool_] | None = None  # [N] which these are; None if all have one

    def each_row(self, values: NDArray[np.int64], absent: int = 0) -> NDArray[np.int64]:
        """Return values of the entries for all rows, `[N]`."""
        if self.has is None:
            return values
        each = np.full(len(self.has), absent, dtype=np.int64)
        each[self.has] = values
        return each


def _joined_rows(parts: Sequence[RaggedRows]) -> RaggedRows:
    has = [part.has for part in parts if part.has is not None]
    return RaggedRows(parts[0].group, joined([part.located for part in parts]), np.concatenate(has) if has else None)


class CopyPlanner:
    """Shared by all windows of a loader: the store, its gather, the settings and the buffer layouts."""

    def __init__(self, store: Store | Mixture, gather: Gather, conditioning: Conditioning) -> None:
        self.store, self.gather, self.conditioning = store, gather, conditioning
        self._layouts: dict[tuple[str, int, tuple[int, ...]], BufferLayout] = {}
        self._column_sizes: dict[tuple[str, str], tuple[int, int]] = {}

    def sizes(self, column: str, bucket: str) -> tuple[int, int]:
        """Return the bytes before a column in each of a block's rows, and its own; 0 if the bucket's rows lack it."""
        if (sizes := self._column_sizes.get((column, bucket))) is None:
            spec = self.store.spec_with(column, bucket)
            is_there = column in spec.prefix_bytes  # of those that lack it, it is not copied
            sizes = (spec.prefix_bytes[column], spec.column(column).row_bytes) if is_there else (0, 0)
            self._column_sizes[column, bucket] = sizes
        return sizes

    def layout(self, bucket: Bucket, num_rows: int, lengths: tuple[int, ...]) -> BufferLayout:
        """Return the buffer layout of a bucket's micro-batch of `num_rows` rows, and `lengths`: L of each group."""
        key = (bucket.name, num_rows, lengths)
        if key not in self._layouts:
            requested = self.conditioning.columns_of(bucket)
            columns = {column.field: bucket.column(column.name) for column in requested}
            optional = [column.role for column in requested if column.present is not None]
            groups = list(zip(self.conditioning.groups, lengths, strict=True))
            self._layouts[key] = make_layout(columns, optional, groups, num_rows)
        return self._layouts[key]


class Window:
    """Micro-batches and their concatenated rows, sorted by bucket."""

    def __init__(self, planner: CopyPlanner, batches: Sequence[PendingBatch]) -> None:
        self.batches = sorted(batches, key=attrgetter("bucket.name"))
        self._planner, self._store, self._gather = planner, planner.store, planner.gather
        sizes = [len(batch.keys) for batch in self.batches]
        self._ends: list[int] = [0, *np.cumsum(sizes).tolist()]  # [M + 1], 0 and the end of each micro-batch's rows
        self._sizes = np.array(sizes)  # [M]
        self._own = _Places([batch.located for batch in self.batches])
        self._shard = self._own.shard
        self._added: dict[str, _Places] = {}  # the values of added columns, once they are needed
        self._keys: NDArray[np.int64] = np.concatenate([batch.keys for batch in self.batches])  # [N]

    def _offsets(self, column: str) -> NDArray[np.int64]:
        """Return the byte offset in its file of each row's value of a column, `[N]`."""
        places = self._places_of(column)
        sizes = [self._planner.sizes(column, batch.bucket.name) for batch in self.batches]
        prefixes, widths = np.repeat(np.array(sizes, dtype=np.int64), self._sizes, axis=0).T
        offsets: NDArray[np.int64] = places.data + places.rows * prefixes + places.row_in_block * widths
        return offsets

    def _places_of(self, column: str) -> _Places:
        """Return the files and blocks of the rows' values of a column."""
        if column not in self._store.added:
            return self._own
        if column not in self._added:
            self._added[column] = _Places([batch.located.added[column] for batch in self.batches])
        return self._added[column]

    def _stored(self, column: str) -> NDArray[np.uint8]:
        """Read a small column of all rows, `[N, row_bytes]`. It is the same in every bucket."""
        row_bytes = self.batches[0].bucket.spec.column(column).row_bytes
        return self._gather.read(self._shard, self._offsets(column), row_bytes)

    def columns(self) -> list[PlainRead]:
        """Return the locations of the columns requested, each row's own or its mirror image's, of a window of one bucket."""
        conditioning, bucket = self._planner.conditioning, self.batches[0].bucket
        flipped = conditioning.flips(self._keys)
        reads = []
        for column in conditioning.columns_of(bucket):
            shard, offsets = self._values(column, flipped)
            reads.append(PlainRead(shard=shard, offsets=offsets, num_bytes=bucket.column(column.name).row_bytes))
        return reads

    def _values(self, column: RequestedColumn, flipped: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the file of each row's value of a column that is requested, and its byte offset there, `[N]` each."""
        shard, offsets = self._places_of(column.name).shard, self._offsets(column.name)
        if column.mirrored == column.name or not flipped.any():
            return shard, offsets
        mirrored = self._places_of(column.mirrored).shard
        shard = shard if mirrored is shard else np.where(flipped, mirrored, shard)
        return shard, np.where(flipped, self._offsets(column.mirrored), offsets)

    def entries(self, stored: Mapping[str, NDArray[np.uint8]] = {}) -> list[RaggedRows]:
        """Return the rows' entries in each group, of captions those that are drawn; what readahead has found, if it has.

        `stored`: small columns of the rows that were read, `[N, row_bytes]`, those with the numbers of entries among them.
        """
        drawn = [batch.entries for batch in self.batches if batch.entries is not None]
        if len(drawn) == len(self.batches):
            return [_joined_rows(of_group) for of_group in zip(*drawn, strict=True)]
        captions = self._captions()
        return [self._entries(group, captions, stored) for group in self._planner.conditioning.groups]

    def _entries(self, group: RequestedGroup, captions: LocatedEntries, stored: Mapping[str, NDArray[np.uint8]]) -> RaggedRows:
        if group.is_text:
            return RaggedRows(group, captions)
        if group.number is None:
            return RaggedRows(group, self._store.locate_entries(group.spec, captions.shard, captions.row))
        number = stored[group.number] if group.number in stored else self._stored(group.number)
        rows = number.view("<i4").astype(np.int64).reshape(-1)
        if not (group.optional or group.is_of_empty):
            return RaggedRows(group, self._store.locate_entries(group.spec, self._shard, rows))
        has = captions.row == EMPTY_CAPTION_ROW if group.is_of_empty else rows != -1
        return RaggedRows(group, self._store.locate_entries(group.spec, self._shard[has], rows[has]), has)

    def _captions(self) -> LocatedEntries:
        """Draw one of each sample's captions, or the empty one, and locate them, `[N]`."""
        stored = self._stored(CAPTIONS).view("<i4").astype(np.int64)  # [N, V]
        chosen = choose_captions((stored >= 0).sum(axis=1), self._keys, self._planner.conditioning.caption_dropout)
        caption = np.where(chosen == EMPTY, EMPTY_CAPTION_ROW, stored[np.arange(len(stored)), chosen])
        return self._store.locate_entries(self._store.text, self._shard, caption)

    def copy_plans(self, *, plainly: bool) -> list[CopyPlan]:
        """Return the micro-batches' copy plans, in the order of steps. `plainly`: read large columns with plain reads."""
        conditioning = self._planner.conditioning
        for places in (self._own, *(self._places_of(name) for name in self.batches[0].located.added)):
            plainly = not self._gather.map(places.shard) or plainly
        flipped = conditioning.flips(self._keys)
        optional = {column.present: column.role for column in conditioning.columns if column.present is not None}
        numbers = [group.number for group in conditioning.groups if group.number is not None]
        stored = {name: self._stored(name) for name in (*SMALL_COLUMNS, *optional, *numbers)}
        values = self._small_values(stored, flipped)
        values |= {BATCH_PRESENT_PREFIX + role: stored[name] != 0 for name, role in optional.items()}
        entries = self.entries(stored)
        counts: dict[str, NDArray[np.int64]] = {}
        copies = [self._copies(rows, values, counts, plainly=plainly) for rows in entries]
        layouts = [
            self._planner.layout(batch.bucket, len(batch.keys), lengths)
            for batch, lengths in zip(self.batches, zip(*(lengths for lengths, _ in copies), strict=True), strict=True)
        ]
        small = self._small(layouts, values, counts)
        columns = self._columns(flipped, plainly=plainly)
        fields = {name: each for _, rows in copies for name, each in rows.items()}
        copy_plans = [
            CopyPlan(
                batch=batch,
                layout=layouts[m],
                large={**columns[m], **{name: each[m] for name, each in fields.items()}},
                small=small[m],
                begin=self._ends[m],
                end=self._ends[m + 1],
                entries=entries,
                stored=stored,
                columns=conditioning.columns_of(batch.bucket),
            )
            for m, batch in enumerate(self.batches)
        ]
        return sorted(copy_plans, key=attrgetter("batch.step", "batch.micro_step"))

    def _columns(self, flipped: NDArray[np.bool_], *, plainly: bool) -> list[dict[str, GatherIndex | PlainRead]]:
        copies: list[dict[str, GatherIndex | PlainRead]] = [{} for _ in self.batches]
        buckets = list(_runs([batch.bucket.name for batch in self.batches]))
        for column in self._planner.conditioning.columns:
            shard, offsets = self._values(column, flipped)
            for first, last in buckets:
                if column not in self._planner.conditioning.columns_of(self.batches[first].bucket):
                    continue
                row_bytes = self.batches[first].bucket.column(column.name).row_bytes
                each = self._each(shard, offsets, row_bytes, self._ends[first : last + 1], plainly=plainly)
                for of_batch, source in zip(copies[first:last], each, strict=True):
                    of_batch[column.field] = source
        return copies

    def _each(
        self, shard: NDArray[np.int64], offsets: NDArray[np.int64], row_bytes: int, ends: list[int], *, plainly: bool
    ) -> list[GatherIndex | PlainRead]:
        """Return what to copy for each micro-batch; `ends` are the boundaries of their rows."""
        if row_bytes == 0:
            plainly = True
        if plainly:
            return [PlainRead(shard=shard[a:b], offsets=offsets[a:b], num_bytes=row_bytes) for a, b in pairwise(ends)]
        gather_index = self._gather.index_of(shard[ends[0] : ends[-1]], offsets[ends[0] : ends[-1]], row_bytes)
        return [gather_index.part(a - ends[0], b - ends[0]) for a, b in pairwise(ends)]

    def _copies(
        self, rows: RaggedRows, values: dict[str, NDArray[Any]], counts: dict[str, NDArray[np.int64]], *, plainly: bool
    ) -> tuple[list[int], dict[str, list[GatherIndex | PlainRead]]]:
        """Return each micro-batch's L, and what to copy of a group by field; add its small fields, and its mask's token counts.

        A row without an entry has 0 tokens of it, and 0 of 1 of a fixed column: what is copied are zeros.
        """
        group, located, conditioning = rows.group, rows.located, self._planner.conditioning
        starts = self._gather.read(located.shard, located.starts_offsets(), 16).view("<i8")
        self._store.check_starts(located, starts, group.longest)
        count = rows.each_row(starts[:, 1] - starts[:, 0])
        longest = np.maximum.reduceat(count, self._ends[:-1]).tolist()
        lengths = [conditioning.padded(group, length) for length in longest]
        fields: dict[str, list[GatherIndex | PlainRead]] = {}
        for column in group.spec.tokens:
            offsets = rows.each_row(located.token_offsets(column.name, starts[:, 0]))
            fields[group.token_field(column.name)] = self._padded(
                self._shard, offsets, column.row_bytes, count, lengths, plainly=plainly
            )
        has = rows.each_row(np.ones(len(located.row), dtype=np.int64))
        for column in group.shown.fixed:
            offsets = rows.each_row(located.fixed_offsets(column.name))
            fields[group.fixed_field(column.name)] = self._padded(
                self._shard, offsets, column.row_bytes, has, [1] * len(self.batches), plainly=plainly
            )
        if not group.is_text:
            values[group.prefix + "lengths"] = count.astype("<i4")
        if group.optional:
            values[group.prefix + "present"] = has != 0
        counts[group.mask] = count
        return lengths, fields

    def _padded(
        self,
        shard: NDArray[np.int64],
        offsets: NDArray[np.int64],
        row_bytes: int,
        count: NDArray[np.int64],
        lengths: list[int],
        *,
        plainly: bool,
    ) -> list[GatherIndex | PlainRead]:
        """Return what to copy of each row's tokens at byte offsets, `count` of `row_bytes` bytes each, padded to `lengths`."""
        if plainly or row_bytes > ZERO_BYTES:
            return [
                PlainRead(shard=shard[a:b], offsets=offsets[a:b], num_bytes=count[a:b] * row_bytes)
                for a, b in pairwise(self._ends)
            ]
        sources: list[GatherIndex | PlainRead] = []
        for m, last in _runs(lengths):
            begin, end, length = self._ends[m], self._ends[last], lengths[m]
            if bool((count[begin:end] == length).all()):  # no padding: a caption is one piece
                sources += self._each(shard, offsets, length * row_bytes, self._ends[m : last + 1], plainly=False)
                continue
            gather_index = self._gather.padded_index(shard[begin:end], offsets[begin:end], row_bytes, count[begin:end], length)
            sources += [
                gather_index.part((a - begin) * length, (b - begin) * length) for a, b in pairwise(self._ends[m : last + 1])
            ]
        return sources

    def _small_values(self, stored: Mapping[str, NDArray[np.uint8]], flipped: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
        sizes = [(batch.bucket.height_px, batch.bucket.width_px) for batch in self.batches]
        target = np.repeat(np.array(sizes, dtype=np.int64), self._sizes, axis=0)
        source = stored[ORIGINAL_SIZE].view("<i4")
        crop = stored[CROP].view("<i4")
        # rows without a size have no crop, and an unknown crop is at -1, -1, mirrored or not
        flipped_images = flipped & (source[:, 0] > 0) & (crop[:, 0] >= 0) if flipped.any() else flipped
        if flipped_images.any():
            crop = crop.copy()
            flip = flipped_images
            left = mirrored_left(crop[flip, 1].astype(np.int64), source[flip].astype(np.int64), target[flip])
            if bool((left < 0).any()):
                at = int(np.flatnonzero(flip)[np.argmax(left < 0)])
                name = self._store.shards[int(self._shard[at])].name
                raise CorruptError(
                    f"shard {name}: a crop at {crop[at].tolist()} of {target[at].tolist()} px is outside the image of "
                    f"{source[at].tolist()} px, resized to cover that; run `store verify`"
                )
            crop[flip, 1] = left
        return {
            "original_size": source,
            "crop": crop,
            "target_size": target.astype("<i4"),
            "weight": np.concatenate([batch.weight for batch in self.batches]),
            "keys": self._keys,
            "ids": stored[ID],
            "flipped": flipped,
        }

    def _small(
        self, layouts: list[BufferLayout], values: Mapping[str, NDArray[Any]], counts: Mapping[str, NDArray[np.int64]]
    ) -> list[NDArray[np.uint8]]:
        """Return each micro-batch's small fields in the layout of its buffer, `[small_bytes]` each.

        `counts`: the token counts of all rows, `[N]`, by the mask that they are delivered as.
        """
        filled: list[NDArray[np.uint8]] = []
        forms = [
            (len(batch.keys), *(layout.by_name[name].shape[1] for name in counts))
            for batch, layout in zip(self.batches, layouts, strict=True)
        ]
        for m, last in _runs(forms):
            begin, end, layout = self._ends[m], self._ends[last], layouts[m]
            whole = np.zeros((last - m, layout.small_bytes), dtype=np.uint8)
            masks = [
                (name, np.arange(length) < count[begin:end, None])
                for (name, count), length in zip(counts.items(), forms[m][1:], strict=True)
            ]
            for name, each in [*((name, value[begin:end]) for name, value in values.items()), *masks]:
                field = layout.by_name[name]
                at = field.begin - layout.small_begin
                whole[:, at : at + field.num_bytes] = np.ascontiguousarray(each).reshape(last - m, -1).view(np.uint8)
            filled.extend(whole)
        return filled


class _Places:
    """The files and blocks of located rows, one after another, `[N]` each."""

    def __init__(self, located: Sequence[Located]) -> None:
        names = ("shard", "data", "rows", "row_in_block")
        self.shard, self.data, self.rows, self.row_in_block = (
            np.concatenate([getattr(of_batch, name) for of_batch in located]) for name in names
        )


def _runs(values: Sequence[object]) -> Iterator[tuple[int, int]]:
    """Yield the (begin, end) of each run of equal neighbours.

    >>> list(_runs("aab"))
    [(0, 2), (2, 3)]
    """
    begin = 0
    for n in range(1, len(values) + 1):
        if n == len(values) or values[n] != values[begin]:
            yield begin, n
            begin = n
