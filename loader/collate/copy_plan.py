"""Copy plans: everything before the copy, computed for many micro-batches at once (draws, caption offsets, small columns).

Copying a batch of a few MiB takes half a millisecond, and numpy and torch calls on arrays of a few rows would take as long
again. For all micro-batches of a window together, these calls cost hardly more than for one.

Letters: M micro-batches, N rows of all of them, B rows of one, V maximum captions per sample, L tokens (padded).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import CorruptError
from bucketline.loader.batch import FIXED_PREFIX
from bucketline.loader.collate.buffer_layout import BufferLayout, make_layout
from bucketline.loader.collate.columns import EMPTY, FLIPPED, choose_captions, mirrored_left
from bucketline.loader.collate.pending import CopyPlan, Evidence, PlainRead
from bucketline.loader.config import LATENT
from bucketline.store.format.block import CAPTIONS, CROP, ID, ORIGINAL_SIZE
from bucketline.store.format.text_block import EMPTY_CAPTION_ROW
from bucketline.store.read.located import LocatedCaptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from bucketline.loader.collate.columns import Conditioning
    from bucketline.loader.collate.gather import Gather, GatherIndex
    from bucketline.loader.collate.pending import PendingBatch
    from bucketline.store import Bucket
    from bucketline.store.read.store import OpenShards

SMALL_COLUMNS = (ORIGINAL_SIZE, CROP, ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The concatenated rows of some micro-batches."""

    pendings: Sequence[PendingBatch]
    ends: list[int]  # [M + 1], 0 and the end of each micro-batch's rows
    sizes: NDArray[np.int64]  # [M]
    shard: NDArray[np.int64]  # [N]
    data: NDArray[np.int64]  # [N] byte offset of the block's columns
    rows: NDArray[np.int64]  # [N] K of the block
    row_in_block: NDArray[np.int64]  # [N]
    keys: NDArray[np.int64]  # [N]

    def each(self, values: Sequence[int]) -> NDArray[np.int64]:
        """Return the value of each row's micro-batch, `[N]`."""
        every: NDArray[np.int64] = np.repeat(np.array(values, dtype=np.int64), self.sizes)
        return every

    def offsets(self, column: str) -> NDArray[np.int64]:
        """Return the byte offset in the shard's file of each row's value of a column, `[N]`."""
        known = {pending.bucket.name: pending.bucket.spec for pending in self.pendings}
        places = {name: (spec.prefix_bytes[column], spec.column(column).row_bytes) for name, spec in known.items()}
        if len(known) == 1:
            ((prefix, row_bytes),) = places.values()
            return self.data + self.rows * prefix + self.row_in_block * row_bytes
        own = [places[pending.bucket.name] for pending in self.pendings]
        prefixes, widths = (self.each(values) for values in zip(*own, strict=True))
        offsets: NDArray[np.int64] = self.data + self.rows * prefixes + self.row_in_block * widths
        return offsets


def _joined(parts: Sequence[LocatedCaptions]) -> LocatedCaptions:
    if len(parts) == 1:
        return parts[0]
    return LocatedCaptions(
        **{own.name: np.concatenate([getattr(part, own.name) for part in parts]) for own in fields(parts[0])}
    )


def _together(pendings: Sequence[PendingBatch]) -> _Rows:
    located = [pending.located for pending in pendings]
    sizes = [len(pending.keys) for pending in pendings]
    return _Rows(
        pendings=pendings,
        ends=[0, *np.cumsum(sizes).tolist()],
        sizes=np.array(sizes),
        shard=np.concatenate([own.shard for own in located]),
        data=np.concatenate([own.data for own in located]),
        rows=np.concatenate([own.rows for own in located]),
        row_in_block=np.concatenate([own.row_in_block for own in located]),
        keys=np.concatenate([pending.keys for pending in pendings]),
    )


class CopyPlanner:
    """Makes copy plans for micro-batches of one store."""

    def __init__(self, store: OpenShards, gather: Gather, conditioning: Conditioning) -> None:
        self._store, self._gather, self._conditioning = store, gather, conditioning
        self._token = store.text.tokens[0]
        self._layouts: dict[tuple[str, int, int], BufferLayout] = {}

    def layout(self, bucket: Bucket, num_rows: int, length: int) -> BufferLayout:
        """Return the buffer layout of a bucket's micro-batch."""
        key = (bucket.name, num_rows, length)
        if key not in self._layouts:
            self._layouts[key] = make_layout(bucket.spec.column(LATENT), self._store.text, num_rows, length)
        return self._layouts[key]

    def latents(self, pending: PendingBatch) -> PlainRead:
        """Return the location of a micro-batch's latents: each row's own, or its mirror image's."""
        rows = _together([pending])
        return PlainRead(
            shard=rows.shard,
            offsets=self._latent_offsets(rows, self._conditioning.flips(rows.keys)),
            num_bytes=pending.bucket.spec.column(LATENT).row_bytes,
        )

    def _latent_offsets(self, rows: _Rows, flipped: NDArray[np.bool_]) -> NDArray[np.int64]:
        own = rows.offsets(LATENT)
        return np.where(flipped, rows.offsets(FLIPPED), own) if flipped.any() else own

    def captions(self, pendings: Sequence[PendingBatch]) -> LocatedCaptions:
        """Draw one of each sample's captions, or the empty one, and locate them, `[N]`."""
        return self._captions(_together(pendings))

    def _captions(self, rows: _Rows) -> LocatedCaptions:
        column = rows.pendings[0].bucket.spec.column(CAPTIONS)  # V is the store's
        stored = self._gather.read(rows.shard, rows.offsets(CAPTIONS), column.row_bytes).view("<i4").astype(np.int64)
        chosen = choose_captions((stored >= 0).sum(axis=1), rows.keys, self._conditioning.caption_dropout)
        caption = np.where(chosen == EMPTY, EMPTY_CAPTION_ROW, stored[np.arange(len(stored)), chosen])
        return self._store.locate_captions(rows.shard, caption)

    def copy_plan(self, pendings: Sequence[PendingBatch], *, plainly: bool) -> list[CopyPlan]:
        """Return the copy plans of micro-batches. `plainly`: read their large columns with plain reads, not from the map.

        Raises:
            StoreError: if a shard's file is missing.
            CorruptError: if captions cannot be found, or a crop does not fit its image.
        """
        rows = _together(pendings)
        plainly = not self._gather.map(rows.shard) or plainly
        known = [pending.captions for pending in pendings if pending.captions is not None]
        captions = _joined(known) if len(known) == len(pendings) else self._captions(rows)
        starts = self._gather.read(captions.shard, captions.starts_offsets(), 16).view("<i8")
        self._store.check_starts(captions, starts, self._conditioning.max_tokens)
        count = starts[:, 1] - starts[:, 0]
        lengths = [self._conditioning.padded(longest) for longest in np.maximum.reduceat(count, rows.ends[:-1]).tolist()]
        layouts = [self.layout(c.bucket, len(c.keys), length) for c, length in zip(pendings, lengths, strict=True)]
        flipped = self._conditioning.flips(rows.keys)
        stored = {
            name: self._gather.read(rows.shard, rows.offsets(name), pendings[0].bucket.spec.column(name).row_bytes)
            for name in SMALL_COLUMNS
        }
        small = self._small(rows, layouts, self._small_values(rows, stored, flipped), count)
        large = [
            {"latents": latents, "tokens": tokens, **fixed}
            for latents, tokens, fixed in zip(
                self._latents(rows, flipped, plainly=plainly),
                self._tokens(rows, captions, (starts[:, 0], count), lengths, plainly=plainly),
                self._fixed(rows, captions, plainly=plainly),
                strict=True,
            )
        ]
        return [
            CopyPlan(
                layout=layouts[m],
                large=large[m],
                small=small[m],
                evidence=Evidence(begin=begin, end=end, captions=captions, stored=stored),
            )
            for m, (begin, end) in enumerate(pairwise(rows.ends))
        ]

    def _latents(self, rows: _Rows, flipped: NDArray[np.bool_], *, plainly: bool) -> list[GatherIndex | PlainRead]:
        offsets = self._latent_offsets(rows, flipped)
        found: list[GatherIndex | PlainRead] = []
        for first, last in _runs([pending.bucket.name for pending in rows.pendings]):
            row_bytes = rows.pendings[first].bucket.spec.column(LATENT).row_bytes
            found += self._each(rows.shard, offsets, row_bytes, rows.ends[first : last + 1], plainly=plainly)
        return found

    def _fixed(self, rows: _Rows, captions: LocatedCaptions, *, plainly: bool) -> list[dict[str, GatherIndex | PlainRead]]:
        found: list[dict[str, GatherIndex | PlainRead]] = [{} for _ in rows.pendings]
        for column in self._store.text.fixed:
            offsets = captions.fixed_offsets(self._store.text, column.name)
            each = self._each(captions.shard, offsets, column.row_bytes, rows.ends, plainly=plainly)
            for own, what in zip(found, each, strict=True):
                own[FIXED_PREFIX + column.name] = what
        return found

    def _each(
        self, shard: NDArray[np.int64], offsets: NDArray[np.int64], row_bytes: int, ends: list[int], *, plainly: bool
    ) -> list[GatherIndex | PlainRead]:
        """Return what to copy for each micro-batch; `ends` are the boundaries of their rows."""
        if row_bytes == 0:
            plainly = True
        if plainly:
            return [PlainRead(shard=shard[a:b], offsets=offsets[a:b], num_bytes=row_bytes) for a, b in pairwise(ends)]
        gather_index = self._gather.aim_at(shard[ends[0] : ends[-1]], offsets[ends[0] : ends[-1]], row_bytes)
        return [gather_index.part(a - ends[0], b - ends[0]) for a, b in pairwise(ends)]

    def _tokens(
        self,
        rows: _Rows,
        captions: LocatedCaptions,
        own: tuple[NDArray[np.int64], NDArray[np.int64]],
        lengths: list[int],
        *,
        plainly: bool,
    ) -> list[GatherIndex | PlainRead]:
        """Return what to copy for captions' own tokens. `own`: the first token of each in its block, and the token count."""
        first, count = own
        offsets, row_bytes = self._store.token_offsets(captions, self._token.name, first), self._token.row_bytes
        if plainly:
            reads = pairwise(rows.ends)
            return [
                PlainRead(shard=captions.shard[a:b], offsets=offsets[a:b], num_bytes=count[a:b] * row_bytes) for a, b in reads
            ]
        found: list[GatherIndex | PlainRead] = []
        for m, last in _runs(lengths):
            begin, end, length = rows.ends[m], rows.ends[last], lengths[m]
            if bool((count[begin:end] == length).all()):  # no padding: a caption is one piece
                found += self._each(captions.shard, offsets, length * row_bytes, rows.ends[m : last + 1], plainly=False)
                continue
            gather_index = self._gather.aim_padded(
                captions.shard[begin:end], offsets[begin:end], row_bytes, count[begin:end], length
            )
            found += [
                gather_index.part((a - begin) * length, (b - begin) * length) for a, b in pairwise(rows.ends[m : last + 1])
            ]
        return found

    def _small_values(
        self, rows: _Rows, stored: Mapping[str, NDArray[np.uint8]], flipped: NDArray[np.bool_]
    ) -> dict[str, NDArray[Any]]:
        """Return the small fields, `[N, …]` each, except the mask."""
        buckets = [pending.bucket for pending in rows.pendings]
        target = np.stack([rows.each([b.height_px for b in buckets]), rows.each([b.width_px for b in buckets])], axis=1)
        source = stored[ORIGINAL_SIZE].view("<i4")
        crop = stored[CROP].view("<i4")
        if flipped.any():
            crop = crop.copy()
            left = mirrored_left(crop[flipped, 1].astype(np.int64), source[flipped].astype(np.int64), target[flipped])
            if bool((left < 0).any()):
                at = int(np.flatnonzero(flipped)[np.argmax(left < 0)])
                name = self._store.shards[int(rows.shard[at])].name
                raise CorruptError(
                    f"shard {name}: a crop at {crop[at].tolist()} of {target[at].tolist()} px is outside the image of "
                    f"{source[at].tolist()} px, resized to cover it; run `store verify`"
                )
            crop[flipped, 1] = left
        return {
            "original_size": source,
            "crop": crop,
            "target_size": target.astype("<i4"),
            "weight": np.concatenate([pending.weight for pending in rows.pendings]),
            "keys": rows.keys,
            "ids": stored[ID],
            "flipped": flipped,
        }

    def _small(
        self, rows: _Rows, layouts: list[BufferLayout], values: Mapping[str, NDArray[Any]], count: NDArray[np.int64]
    ) -> list[NDArray[np.uint8]]:
        """Return each micro-batch's small fields in the layout of its buffer, `[small_bytes]` each."""
        found: list[NDArray[np.uint8]] = []
        forms = [
            (len(pending.keys), layout.by_name["token_mask"].shape[1])
            for pending, layout in zip(rows.pendings, layouts, strict=True)
        ]
        for m, last in _runs(forms):
            begin, end, layout = rows.ends[m], rows.ends[last], layouts[m]
            whole = np.zeros((last - m, layout.small_bytes), dtype=np.uint8)
            mask = np.arange(forms[m][1]) < count[begin:end, None]
            for name, own in [*((name, value[begin:end]) for name, value in values.items()), ("token_mask", mask)]:
                field = layout.by_name[name]
                at = field.begin - layout.small_begin
                whole[:, at : at + field.num_bytes] = np.ascontiguousarray(own).reshape(last - m, -1).view(np.uint8)
            found.extend(whole)
        return found


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
