"""The plan: a pure function from (seed, step) to (bucket, rows). No part of it grows with the number of rows.

A bucket's rows are read in passes, each with its own keyed bijection. With `carry`, the passes form one endless stream, and
the bucket's global batch j takes the positions [jG, (j + 1)G): the rest of a pass starts the next batch. Epoch e has the
batches floor(e n / G) to floor((e + 1) n / G) of that bucket. If there is a last epoch, it ends with the bucket's next batch,
in which the positions of later epochs are padding: they have weight 0, and rows of the batch before.

`window` decides the rows at a pass's positions (`lanes` has those of a window of some rows) and the bucket of a step
(`epoch_steps`).

Letters: n rows of a bucket, G its global batch (ranks x batch size x accumulation), e epoch, j index of a bucket's batch.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bucketline.command_line import counted
from bucketline.errors import PlanError
from bucketline.forks import cached_property
from bucketline.loader.config import SHARDS_AT_ONCE, Remainder
from bucketline.loader.plan.epoch_steps import EpochSteps
from bucketline.loader.plan.lanes import Lanes, ShardRuns, Span
from bucketline.loader.plan.permutation import extend_key, key_of, permute, permute_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bucketline.loader.plan.epoch_steps import Epoch
    from bucketline.store.read.store import StoreRows

PLAN_VERSION = 1
MAX_NAMED = 8  # buckets listed in a message
_NAMED_SMALL = 3  # buckets listed in a warning
_PASS, _STEPS = 1, 2  # purposes of keys
_ROUND = 3  # of those derived from a bucket's key


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBucket:
    """A bucket as the plan sees it."""

    name: str
    num_rows: int  # that a pass reads
    global_batch: int
    parts: tuple[StoreRows, ...] = ()  # if a pass reads a share of some store's rows: the stores' own, in order

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.global_batch < 1:
            raise PlanError(
                f"{self.name} has {self.num_rows} rows and a global batch of {self.global_batch}; both must be 1 or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """The rows that one optimizer step reads: over all ranks and micro-batches, or one equal part of them."""

    step: int
    epoch: int
    bucket: str
    first_position: int  # in the global batch, of the first row
    rows: NDArray[np.int64]  # [B] row numbers of the bucket, by position
    weight: NDArray[np.float32]  # [B] 1, or 0 for padding


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The order of buckets and rows, for any number of steps."""

    seed: int
    remainder: Remainder
    buckets: tuple[PlanBucket, ...]
    source: str  # each store's id, the digest of its generation, and its repeats
    window: int | None = None  # rows that each lane mixes at a time; None: all are shuffled; 0: the stored order
    lanes: int = 1  # used only by a window, as `runs`
    epochs: int | None = None  # the last one completes its batches with weight 0; None: endless. Decides no other step
    runs: tuple[ShardRuns, ...] = field(default=(), repr=False, compare=False)  # of each bucket

    def __post_init__(self) -> None:
        if not self.buckets:
            raise PlanError("the plan has no rows; the store has none in this split")
        if self.window:
            self._check_lanes()

    def _check_lanes(self) -> None:
        if [int(one.num_rows.sum()) for one in self.runs] != [bucket.num_rows for bucket in self.buckets]:
            raise PlanError("the rows of the shards are not those of the buckets")
        for bucket in self.buckets:
            if bucket.global_batch % self.lanes:
                fits = math.gcd(self.lanes, *(bucket.global_batch for bucket in self.buckets))
                raise PlanError(
                    f"{bucket.name} has a global batch of {bucket.global_batch}, which {self.lanes} lanes do not "
                    f"divide; make batch size x accumulation x ranks a multiple of {self.lanes} for every bucket (for a "
                    f"batch by pixels or tokens, by its batch multiple), or use {counted(fits, 'lane')}"
                )

    @cached_property
    def lane_order(self) -> Lanes:
        """Return the order of a window: which lane reads which rows, and when."""
        return Lanes(
            seed=self.seed,
            lanes=self.lanes,
            window_rows=self.window or 0,
            carries=self.remainder is Remainder.CARRY,
            sizes=[(bucket.num_rows, bucket.global_batch) for bucket in self.buckets],
            runs=self.runs,
        )

    def _rows_of(self, spans: Sequence[Span]) -> NDArray[np.int64]:
        """Return the rows at the spans' positions, one span after the other. Each position of a pass has a different row.

        If all are shuffled, by a keyed bijection on all of the bucket's rows; in stored order, position p has row p.
        """
        if self.window:
            numbers = self.lane_order.rows_of(spans)
        else:
            every = [(np.arange(span.first, span.first + span.count, dtype=np.int64), span.n, span.key) for span in spans]
            numbers = permute_all(every) if self.window is None else np.concatenate([index for index, _, _ in every])
        if any(self._pass_rows):
            at = 0
            for span in spans:
                if (own := self._pass_rows[span.bucket]) is not None:
                    numbers[at : at + span.count] = own.rows(numbers[at : at + span.count], span.number)
                at += span.count
        return numbers

    @cached_property
    def _pass_rows(self) -> list[PassRows | None]:
        """Return the rows of each bucket's passes; None if a pass reads all of them."""
        return [
            PassRows(bucket.parts, key, is_mixed=self.window is None) if bucket.parts else None
            for bucket, key in zip(self.buckets, self._pass_keys, strict=True)
        ]

    @cached_property
    def digest(self) -> str:
        """Digest of everything that decides the order, and of the stores' generations. 32 hexadecimal digits."""
        buckets = [[bucket.name, bucket.num_rows, bucket.global_batch] for bucket in self.buckets]
        lanes = [self.lanes, SHARDS_AT_ONCE] if self.window else []
        text = json.dumps([PLAN_VERSION, self.seed, self.remainder, self.window, self.source, buckets, *lanes])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @cached_property
    def epoch_steps(self) -> EpochSteps:
        """Return the number of steps in each epoch."""
        sizes = tuple((bucket.num_rows, bucket.global_batch) for bucket in self.buckets)
        return EpochSteps(sizes=sizes, remainder=self.remainder, epochs=self.epochs)

    @property
    def num_steps(self) -> int | None:
        """Return the number of steps in all epochs; None if they are endless."""
        return self.epoch_steps.num_steps

    def batches_before(self, bucket: PlanBucket, epoch: int) -> int:
        """Return the number of a bucket's batches in the epochs before `epoch`, without the padded one of the last."""
        return self.epoch_steps.batches_before(epoch)[self.buckets.index(bucket)]

    def steps_before(self, epoch: int) -> int:
        """Return the number of steps in the epochs before `epoch`, without the padded ones of the last."""
        return self.epoch_steps.steps_before(epoch)

    @property
    def has_steps(self) -> bool:
        """Return True if epochs have steps. With `drop`, they have none if every bucket is smaller than its global batch."""
        return self.epoch_steps.has_steps

    def at(self, step: int) -> PlannedStep:
        """Return the rows that a step reads, over all ranks."""
        return self.draw([(step, 0)])[0]

    def draw(self, parts: Sequence[tuple[int, int]], num_parts: int = 1) -> list[PlannedStep]:
        """Return the rows of micro-batches, each given as (step, part) of a global batch divided into `num_parts`.

        With R ranks and A micro-batches per step, rank r's micro-batch a is part r A + a of R A. Many micro-batches of
        consecutive steps cost hardly more than one. Each bucket's global batch must be divisible by `num_parts`.
        """
        placed = self._place([step for step, _ in parts])
        spans: list[Span] = []
        shapes = []
        for step, part in parts:
            _, bucket, number = placed[step]
            count = self.buckets[bucket].global_batch // num_parts
            shapes.append((part * count, count, self._add_spans(spans, bucket, number, part * count, count)))
        rows, at, drawn = self._rows_of(spans), 0, []
        for (step, _), (first, count, real) in zip(parts, shapes, strict=True):
            epoch, bucket, _ = placed[step]
            weight = np.ones(count, dtype=np.float32)
            weight[max(real, 0) :] = 0.0
            drawn.append(
                PlannedStep(
                    step=step,
                    epoch=epoch,
                    bucket=self.buckets[bucket].name,
                    first_position=first,
                    rows=rows[at : at + count],
                    weight=weight,
                )
            )
            at += count
        return drawn

    def _place(self, steps: Sequence[int]) -> dict[int, tuple[int, int, int]]:
        """Return for each step its epoch, the index of its bucket, and the index of the bucket's batch."""
        if not self.has_steps:
            raise PlanError(self.without_step())
        by_epoch: dict[int, tuple[Epoch, list[int]]] = {}
        epoch, own = None, list[int]()
        for step in dict.fromkeys(steps):
            if epoch is None or not epoch.first <= step < epoch.end:
                epoch = self.epoch_steps.at(step)
                own = by_epoch.setdefault(epoch.number, (epoch, []))[1]
            own.append(step)
        return {
            step: (epoch.number, bucket, number)
            for epoch, own in by_epoch.values()
            for step, (bucket, number) in zip(
                own, epoch.batches_at(own, self.window, key_of(self.seed, _STEPS, epoch.number)), strict=True
            )
        }

    def _add_spans(self, spans: list[Span], bucket: int, number: int, begin: int, count: int) -> int:
        """Append the spans of `count` positions, from `begin`, of a bucket's batch `number`; return how many have weight 1."""
        n, size = self.buckets[bucket].num_rows, self.buckets[bucket].global_batch
        carries, padding = self.remainder is Remainder.CARRY, 0
        if carries:  # n and number can be large; Python's integers keep the product exact
            number_of_pass, at = divmod(number * size + begin, n)
            real = count if self.epochs is None else min(count, self.epochs * n - number * size - begin)
            if real < count and n >= size and self.epochs is not None:
                # padded with rows of the batch before, which has been read, and on the same lanes
                read = max(real, 0)
                before = number * size + begin + read - size - (self.epochs - 1) * n
                if read:
                    self._add_spans(spans, bucket, number, begin, read)
                spans.append(self.span(bucket, self.epochs - 1, before, count - read))
                return real
        else:
            number_of_pass, within = divmod(number, self.epoch_steps.per_pass[bucket])
            at = within * size + begin
            real = max(0, n - at)
            # a partial batch is padded with rows of its own pass; of windows, with those that the same lanes began with
            if self.window and n >= size:
                padding = n % size
            at = padding + (at - n) % n if at >= n else at
        while count > 0:
            taken = min(count, n - at)
            spans.append(self.span(bucket, number_of_pass, at, taken))
            count, at = count - taken, padding
            number_of_pass += carries
        return real

    def span(self, bucket: int, number: int, first: int, count: int) -> Span:
        """Return consecutive positions in a pass of a bucket, which is given by its index."""
        key = extend_key(self._pass_keys[bucket], number)
        return Span(self.buckets[bucket].num_rows, key, first, count, bucket, number)

    @cached_property
    def _pass_keys(self) -> list[int]:
        """Return the key of each bucket, from which the keys of its passes are derived."""
        names = (hashlib.blake2b(bucket.name.encode(), digest_size=8).digest() for bucket in self.buckets)
        return [key_of(self.seed, _PASS, int.from_bytes(name, "little")) for name in names]

    def batch(self, bucket: PlanBucket, number: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the rows and weights of a bucket's global batch `number`."""
        spans: list[Span] = []
        real = self._add_spans(spans, self.buckets.index(bucket), number, 0, bucket.global_batch)
        weight = (np.arange(bucket.global_batch) < real).astype(np.float32)
        return self._rows_of(spans), weight

    def small_buckets(self, *, can_drop: bool = True) -> str | None:
        """Return one line that names the buckets too small for their global batch, and the remedy; None if there is none.

        With `drop`, a bucket is too small if it has fewer rows than a batch: it is never read. Otherwise, if it has at most
        half as many: each row comes at least twice in a batch (`carry`), or at least half of the batch is padding (`partial`).
        `can_drop`: the caller has an option --split.
        """
        drops = self.remainder is Remainder.DROP
        small = [b for b in self.buckets if (b.num_rows < b.global_batch if drops else 2 * b.num_rows <= b.global_batch)]
        if not small:
            return None
        small.sort(key=lambda bucket: bucket.num_rows / bucket.global_batch)
        named = [self._say_small(bucket) for bucket in small[:_NAMED_SMALL]]
        if len(small) > _NAMED_SMALL:
            named.append(f"and {len(small) - _NAMED_SMALL} more such buckets")
        other = ", or leave such buckets out with --split train:drop" if can_drop and not drops else ""
        return f"{', '.join(named)}; use a smaller batch or fewer ranks, or pack with a coarser --grid{other}"

    def _say_small(self, bucket: PlanBucket) -> str:
        n, size = bucket.num_rows, bucket.global_batch
        what = f"{bucket.name} ({counted(n, 'image')})"
        if self.remainder is Remainder.DROP:
            return f"{what} never fills a batch of {size} and is not read"
        if self.remainder is Remainder.PARTIAL:
            return f"{what} leaves {size - n} of a batch's {size} rows at weight 0"
        return f"{what} fills a batch of {size} once in {size / n:.0f} passes (with copies)"

    def without_step(self) -> str:
        """Return a message that says why there is no step, with the numbers."""
        named = [f"{bucket.name} has {bucket.num_rows} rows" for bucket in self.buckets[:MAX_NAMED]]
        if len(self.buckets) > MAX_NAMED:
            named.append(f"and {len(self.buckets) - MAX_NAMED} more buckets")
        sizes = sorted({bucket.global_batch for bucket in self.buckets})
        size = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}, by bucket"
        is_carried = self.remainder is Remainder.CARRY  # to later epochs
        others = "more epochs" if is_carried else "a remainder of carry or partial"
        return (
            f"the plan has no step: {', '.join(named)}, and a global batch takes {size}; use a smaller batch, fewer ranks, or "
            f"{others}"
        )


def rows_per_pass(num_rows: int, share: float) -> int:
    """Return how many of a store's rows in a bucket a pass reads; at least one, if it has any.

    >>> rows_per_pass(10, 0.25), rows_per_pass(3, 0.1), rows_per_pass(10, 2.5)
    (3, 1, 25)
    """
    return max(int(num_rows * share + 0.5), min(num_rows, 1))


class PassRows:
    """The rows of a bucket's passes, if a pass reads a share of a store's that is not a whole number of times all of them.

    A pass of a bucket has `per_pass` places for such a store. The places of all passes, one after the other, go through all of
    the store's rows again and again, each time in another order: so every row comes once before any comes twice. A row's place
    is a pure function of the seed and the number of the round.
    """

    def __init__(self, parts: Sequence[StoreRows], key: int, *, is_mixed: bool) -> None:
        """`key` is the bucket's. `is_mixed`: rounds are; otherwise neighbouring rows stay together."""
        self._parts, self._key, self._is_mixed = tuple(parts), key, is_mixed
        self._ends = np.cumsum([part.per_pass for part in parts])

    def rows(self, numbers: NDArray[np.int64], pass_number: int) -> NDArray[np.int64]:
        """Return the bucket's row for each of the numbers 0 to N - 1 that the order deals with; N rows come in a pass."""
        part_of = np.searchsorted(self._ends, numbers, side="right")
        rows = np.empty_like(numbers)
        for at, part in enumerate(self._parts):
            own = np.flatnonzero(part_of == at)
            if not len(own):
                continue
            within = numbers[own] - (int(self._ends[at]) - part.per_pass)
            before, begin = divmod(pass_number * part.per_pass, part.num_rows)  # Python's integers: passes may be many
            rounds, places = np.divmod(within + begin, part.num_rows)
            for number in np.unique(rounds).tolist() if self._is_mixed else ():
                of_round, key = rounds == number, extend_key(extend_key(extend_key(self._key, _ROUND), at), before + number)
                places[of_round] = permute(places[of_round], part.num_rows, key)
            rows[own] = part.first + places
        return rows
