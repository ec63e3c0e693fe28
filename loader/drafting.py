"""All that comes before the copying, worked out for many micro-batches at once: draws, places of captions, small columns.

With a batch of a few MiB, copying takes half a millisecond; numpy's and torch's calls on arrays of a few rows would take as
long again. For the micro-batches of a window together they cost hardly more than for one of them.

Letters: M micro-batches, N rows of all of them, B rows of one, V captions a sample at most, L tokens (padded).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import CorruptError
from bucketline.loader.batch import FIXED_PREFIX
from bucketline.loader.captions import EMPTY, choose_captions
from bucketline.loader.conditioning import FLIPPED
from bucketline.loader.config import LATENT
from bucketline.loader.cover import mirrored_left
from bucketline.loader.layout import Layout, make_layout
from bucketline.store.block import CAPTIONS, CROP, ID, ORIGINAL_SIZE
from bucketline.store.reader import LocatedCaptions
from bucketline.store.text_block import EMPTY_CAPTION_ROW

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from bucketline.loader.conditioning import Conditioning
    from bucketline.loader.filler import Coming
    from bucketline.loader.gather import Aim, Gather
    from bucketline.store import Bucket
    from bucketline.store.reader import OpenShards

SMALL_COLUMNS = (ORIGINAL_SIZE, CROP, ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRead:
    """A large column that is read plainly: where each row's bytes lie in its shard's file."""

    shard: NDArray[np.int64]  # [B]
    offsets: NDArray[np.int64]  # [B]
    num_bytes: NDArray[np.int64] | int  # of each, [B], or of all


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A micro-batch that is ready to be copied."""

    layout: Layout
    large: dict[str, Aim | PlainRead]  # by field
    small: NDArray[np.uint8]  # [small_bytes], all small fields
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a draft was made of, for `verify`: of the whole window, in which the micro-batch's rows are `begin` to `end`."""

    begin: int
    end: int
    captions: LocatedCaptions  # [N]
    stored: Mapping[str, NDArray[np.uint8]]  # small columns as they were read, [N, row_bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The rows of some micro-batches, one after the other."""

    comings: Sequence[Coming]
    ends: list[int]  # [M + 1], of each micro-batch's rows
    sizes: NDArray[np.int64]  # [M]
    shard: NDArray[np.int64]  # [N]
    data: NDArray[np.int64]  # [N] byte at which the block's columns begin
    rows: NDArray[np.int64]  # [N] K of the block
    row_in_block: NDArray[np.int64]  # [N]
    keys: NDArray[np.int64]  # [N]

    def each(self, values: Sequence[int]) -> NDArray[np.int64]:
        """Give every row its micro-batch's value, `[N]`."""
        every: NDArray[np.int64] = np.repeat(np.array(values, dtype=np.int64), self.sizes)
        return every

    def offsets(self, column: str) -> NDArray[np.int64]:
        """Give the byte of the shard's file at which each row's value of a column begins, `[N]`."""
        known = {coming.bucket.name: coming.bucket.spec for coming in self.comings}
        places = {name: (spec.prefix_bytes[column], spec.column(column).row_bytes) for name, spec in known.items()}
        if len(known) == 1:
            ((prefix, row_bytes),) = places.values()
            return self.data + self.rows * prefix + self.row_in_block * row_bytes
        own = [places[coming.bucket.name] for coming in self.comings]
        prefixes, widths = (self.each(values) for values in zip(*own, strict=True))
        offsets: NDArray[np.int64] = self.data + self.rows * prefixes + self.row_in_block * widths
        return offsets


def _joined(parts: Sequence[LocatedCaptions]) -> LocatedCaptions:
    if len(parts) == 1:
        return parts[0]
    return LocatedCaptions(
        **{own.name: np.concatenate([getattr(part, own.name) for part in parts]) for own in fields(parts[0])}
    )


def _together(comings: Sequence[Coming]) -> _Rows:
    located = [coming.located for coming in comings]
    sizes = [len(coming.keys) for coming in comings]
    return _Rows(
        comings=comings,
        ends=[0, *np.cumsum(sizes).tolist()],
        sizes=np.array(sizes),
        shard=np.concatenate([own.shard for own in located]),
        data=np.concatenate([own.data for own in located]),
        rows=np.concatenate([own.rows for own in located]),
        row_in_block=np.concatenate([own.row_in_block for own in located]),
        keys=np.concatenate([coming.keys for coming in comings]),
    )


class Drafter:
    """Works out micro-batches of one store."""

    def __init__(self, store: OpenShards, gather: Gather, conditioning: Conditioning) -> None:
        self._store, self._gather, self._conditioning = store, gather, conditioning
        self._token = store.text.tokens[0]
        self._layouts: dict[tuple[str, int, int], Layout] = {}

    def layout(self, bucket: Bucket, num_rows: int, length: int) -> Layout:
        """Give how a micro-batch of a bucket lies in its slab."""
        key = (bucket.name, num_rows, length)
        if key not in self._layouts:
            self._layouts[key] = make_layout(bucket.spec.column(LATENT), self._store.text, num_rows, length)
        return self._layouts[key]

    def latents(self, coming: Coming) -> PlainRead:
        """Say where a micro-batch's latents lie: each row's own, or its mirror image's."""
        rows = _together([coming])
        return PlainRead(
            shard=rows.shard,
            offsets=self._latent_offsets(rows, self._conditioning.flips(rows.keys)),
            num_bytes=coming.bucket.spec.column(LATENT).row_bytes,
        )

    def _latent_offsets(self, rows: _Rows, flipped: NDArray[np.bool_]) -> NDArray[np.int64]:
        own = rows.offsets(LATENT)
        return np.where(flipped, rows.offsets(FLIPPED), own) if flipped.any() else own

    def captions(self, comings: Sequence[Coming]) -> LocatedCaptions:
        """Draw one of each sample's captions, or the empty one, and locate them, `[N]`."""
        return self._captions(_together(comings))

    def _captions(self, rows: _Rows) -> LocatedCaptions:
        column = rows.comings[0].bucket.spec.column(CAPTIONS)  # V is the store's
        stored = self._gather.read(rows.shard, rows.offsets(CAPTIONS), column.row_bytes).view("<i4").astype(np.int64)
        chosen = choose_captions((stored >= 0).sum(axis=1), rows.keys, self._conditioning.caption_dropout)
        caption = np.where(chosen == EMPTY, EMPTY_CAPTION_ROW, stored[np.arange(len(stored)), chosen])
        return self._store.locate_captions(rows.shard, caption)

    def draft(self, comings: Sequence[Coming], *, plainly: bool) -> list[Draft]:
        """Work out micro-batches; `plainly`: their large columns are to be read plainly, not by the map.

        Raises:
            StoreError: where a shard's file is missing.
            CorruptError: where captions cannot be found, or a crop does not fit its picture.
        """
        rows = _together(comings)
        plainly = not self._gather.map(rows.shard) or plainly
        known = [coming.captions for coming in comings if coming.captions is not None]
        captions = _joined(known) if len(known) == len(comings) else self._captions(rows)
        starts = self._gather.read(captions.shard, captions.starts_offsets(), 16).view("<i8")
        self._store.check_starts(captions, starts, self._conditioning.max_tokens)
        count = starts[:, 1] - starts[:, 0]
        lengths = [self._conditioning.padded(longest) for longest in np.maximum.reduceat(count, rows.ends[:-1]).tolist()]
        layouts = [self.layout(c.bucket, len(c.keys), length) for c, length in zip(comings, lengths, strict=True)]
        flipped = self._conditioning.flips(rows.keys)
        stored = {
            name: self._gather.read(rows.shard, rows.offsets(name), comings[0].bucket.spec.column(name).row_bytes)
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
            Draft(
                layout=layouts[m],
                large=large[m],
                small=small[m],
                evidence=Evidence(begin=begin, end=end, captions=captions, stored=stored),
            )
            for m, (begin, end) in enumerate(pairwise(rows.ends))
        ]

    def _latents(self, rows: _Rows, flipped: NDArray[np.bool_], *, plainly: bool) -> list[Aim | PlainRead]:
        offsets = self._latent_offsets(rows, flipped)
        found: list[Aim | PlainRead] = []
        for first, last in _runs([coming.bucket.name for coming in rows.comings]):
            row_bytes = rows.comings[first].bucket.spec.column(LATENT).row_bytes
            found += self._each(rows.shard, offsets, row_bytes, rows.ends[first : last + 1], plainly=plainly)
        return found

    def _fixed(self, rows: _Rows, captions: LocatedCaptions, *, plainly: bool) -> list[dict[str, Aim | PlainRead]]:
        found: list[dict[str, Aim | PlainRead]] = [{} for _ in rows.comings]
        for column in self._store.text.fixed:
            offsets = captions.fixed_offsets(self._store.text, column.name)
            each = self._each(captions.shard, offsets, column.row_bytes, rows.ends, plainly=plainly)
            for own, what in zip(found, each, strict=True):
                own[FIXED_PREFIX + column.name] = what
        return found

    def _each(
        self, shard: NDArray[np.int64], offsets: NDArray[np.int64], row_bytes: int, ends: list[int], *, plainly: bool
    ) -> list[Aim | PlainRead]:
        """Work out what copying some rows takes, those of each micro-batch, which end at `ends`."""
        if row_bytes == 0:
            plainly = True
        if plainly:
            return [PlainRead(shard=shard[a:b], offsets=offsets[a:b], num_bytes=row_bytes) for a, b in pairwise(ends)]
        aim = self._gather.aim_at(shard[ends[0] : ends[-1]], offsets[ends[0] : ends[-1]], row_bytes)
        return [aim.part(a - ends[0], b - ends[0]) for a, b in pairwise(ends)]

    def _tokens(
        self,
        rows: _Rows,
        captions: LocatedCaptions,
        own: tuple[NDArray[np.int64], NDArray[np.int64]],
        lengths: list[int],
        *,
        plainly: bool,
    ) -> list[Aim | PlainRead]:
        """Work out what copying captions' own tokens takes: `own` is the first of each in its block, and how many."""
        first, count = own
        offsets, row_bytes = self._store.token_offsets(captions, self._token.name, first), self._token.row_bytes
        if plainly:
            reads = pairwise(rows.ends)
            return [
                PlainRead(shard=captions.shard[a:b], offsets=offsets[a:b], num_bytes=count[a:b] * row_bytes) for a, b in reads
            ]
        found: list[Aim | PlainRead] = []
        for m, last in _runs(lengths):
            begin, end, length = rows.ends[m], rows.ends[last], lengths[m]
            if bool((count[begin:end] == length).all()):  # nothing is padding: a caption is one piece
                found += self._each(captions.shard, offsets, length * row_bytes, rows.ends[m : last + 1], plainly=False)
                continue
            aim = self._gather.aim_padded(captions.shard[begin:end], offsets[begin:end], row_bytes, count[begin:end], length)
            found += [aim.part((a - begin) * length, (b - begin) * length) for a, b in pairwise(rows.ends[m : last + 1])]
        return found

    def _small_values(
        self, rows: _Rows, stored: Mapping[str, NDArray[np.uint8]], flipped: NDArray[np.bool_]
    ) -> dict[str, NDArray[Any]]:
        """Give the small fields that every row has alike, `[N, …]` each, but for the mask."""
        buckets = [coming.bucket for coming in rows.comings]
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
                    f"shard {name}: a crop at {crop[at].tolist()} of {target[at].tolist()} px lies outside the picture of "
                    f"{source[at].tolist()} px, resized to cover that; run `store verify`"
                )
            crop[flipped, 1] = left
        return {
            "original_size": source,
            "crop": crop,
            "target_size": target.astype("<i4"),
            "weight": np.concatenate([coming.weight for coming in rows.comings]),
            "keys": rows.keys,
            "ids": stored[ID],
            "flipped": flipped,
        }

    def _small(
        self, rows: _Rows, layouts: list[Layout], values: Mapping[str, NDArray[Any]], count: NDArray[np.int64]
    ) -> list[NDArray[np.uint8]]:
        """Put the small fields of each micro-batch together as they lie in its slab."""
        found: list[NDArray[np.uint8]] = []
        forms = [
            (len(coming.keys), layout.by_name["token_mask"].shape[1])
            for coming, layout in zip(rows.comings, layouts, strict=True)
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
    """Give where equal neighbours begin and end.

    >>> list(_runs("aab"))
    [(0, 2), (2, 3)]
    """
    begin = 0
    for n in range(1, len(values) + 1):
        if n == len(values) or values[n] != values[begin]:
            yield begin, n
            begin = n
