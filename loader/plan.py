"""The plan: a pure function from (seed, step) to (bucket, rows). Nothing in it grows with the number of rows.

A bucket's rows are read in passes; each pass is a keyed bijection of its own. With `carry`, the passes run on as one
endless stream and the bucket's global batch j takes the positions [jG, (j + 1)G): what a pass leaves over begins the next
batch. Epoch e has the batches floor(e n / G) to floor((e + 1) n / G) of that bucket.

What a pass's positions are (`row_order`) and which bucket a step is of (`step_order`) depends on `shuffle`.

Letters: n rows of a bucket, G its global batch (ranks x batch size x accumulation), e epoch, j number of a bucket's batch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from operator import sub
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import PlanError
from bucketline.loader.permutation import extend_key, key_of
from bucketline.loader.row_order import Shuffle, Span, rows_of
from bucketline.loader.step_order import Epoch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bucketline.loader.config import LoaderConfig
    from bucketline.store.reader import OpenShards

PLAN_VERSION = 2
SHUFFLE_WINDOW = 4096  # rows
MAX_NAMED = 8  # buckets in a message
_PASS, _STEPS = 1, 2  # what a key is for
_KEPT_EPOCHS = 8  # a window of steps touches two; more where an epoch has hardly a step


class Remainder(StrEnum):
    """What becomes of a pass's rows that do not fill a global batch.

    `carry`: they begin the next batch, which the next pass fills up. No row is dropped, none comes twice within a pass, and
    after E epochs every row has been delivered E times, short by fewer than G deliveries in the bucket. A bucket smaller than
    a batch has one in some epochs and none in others; a batch that spans two passes may hold a row twice.

    `drop`: a pass has floor(n / G) batches of rows that are all different, and leaves n mod G rows out: others in each pass,
    unless the order is `none`. A bucket smaller than a batch is never read.

    `partial`: a pass has ceil(n / G) batches, and each row once with weight 1. The last batch is filled to full shape by the
    rows that the pass began with, over again where that is not enough, with weight 0; so that a rank may get a micro-batch
    of weight 0 alone, and never one of another shape.
    """

    CARRY = "carry"
    DROP = "drop"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBucket:
    """A bucket as the plan sees it."""

    name: str
    num_rows: int
    global_batch: int

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.global_batch < 1:
            raise PlanError(
                f"{self.name} has {self.num_rows} rows and a global batch of {self.global_batch}; both must be 1 or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """What one optimizer step reads: over all ranks and micro-batches, or one equal part of that."""

    step: int
    epoch: int
    bucket: str
    first_position: int  # in the global batch, of the first row
    rows: NDArray[np.int64]  # [B] row numbers of the bucket, by position
    weight: NDArray[np.float32]  # [B] 1, or 0 where a position only fills the shape; steps share it: not to be written to


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketCount:
    """What E epochs read of one bucket."""

    bucket: PlanBucket
    batches: int
    carried: int  # E n - batches G
    repeats: int  # batches that hold a row twice


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The order of everything, for any number of steps."""

    seed: int
    remainder: Remainder
    buckets: tuple[PlanBucket, ...]
    source: str  # what the rows belong to: each store's id, its generation's digest, and how often its rows come in a pass
    shuffle: Shuffle = Shuffle.FULL
    shuffle_window: int = SHUFFLE_WINDOW  # rows; see `row_order.rows_of`; only `blocks` looks at it

    def __post_init__(self) -> None:
        if not self.buckets:
            raise PlanError("the plan has no rows; the store has none in this split")

    @cached_property
    def digest(self) -> str:
        """Stands for all that decides the order, and for the stores' generations. 32 hexadecimal digits."""
        buckets = [[bucket.name, bucket.num_rows, bucket.global_batch] for bucket in self.buckets]
        window = self.shuffle_window if self.shuffle is Shuffle.BLOCKS else None
        text = json.dumps([PLAN_VERSION, self.seed, self.remainder, self.shuffle, window, self.source, buckets])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def batches_before(self, bucket: PlanBucket, epoch: int) -> int:
        """Give how many batches of a bucket the epochs before `epoch` have."""
        n, size = bucket.num_rows, bucket.global_batch
        if self.remainder is Remainder.CARRY:
            return epoch * n // size
        return epoch * self._per_pass(bucket)

    def _per_pass(self, bucket: PlanBucket) -> int:
        n, size = bucket.num_rows, bucket.global_batch
        return n // size if self.remainder is Remainder.DROP else -(-n // size)

    def steps_before(self, epoch: int) -> int:
        """Give how many steps the epochs before `epoch` have."""
        return sum(self._all_before(epoch))

    def _all_before(self, epoch: int) -> list[int]:
        """Do `batches_before` for every bucket: thousands of them, and asked for at every epoch."""
        if self.remainder is Remainder.CARRY:
            return [epoch * bucket.num_rows // bucket.global_batch for bucket in self.buckets]
        return [epoch * per_pass for per_pass in self._all_per_pass]

    @cached_property
    def _all_per_pass(self) -> list[int]:
        return [self._per_pass(bucket) for bucket in self.buckets]

    @cached_property
    def has_steps(self) -> bool:
        """Say whether any epoch has a step: not with `drop`, where every bucket is smaller than its global batch."""
        return self.remainder is not Remainder.DROP or any(self._all_per_pass)

    def epoch_of(self, step: int) -> int:
        """Give the epoch that a step belongs to.

        Raises:
            PlanError: where no epoch has a step.
        """
        return self._epoch(step).number

    def _epoch(self, step: int) -> Epoch:
        """Give a step's epoch: one of the last ones asked for, the one after them, or by a binary search."""
        known = list(self._known.values())
        for epoch in known:
            if epoch.first <= step < epoch.end:
                return epoch
        for epoch in known:
            if epoch.end == step and step < (following := self._make_epoch(epoch.number + 1)).end:
                return following
        return self._make_epoch(self._search_epoch(step))

    def _search_epoch(self, step: int) -> int:
        if not self.has_steps:
            raise PlanError(self.without_step())
        past = 1
        while self.steps_before(past) <= step:
            past *= 2
        first = past // 2  # steps_before(first) <= step < steps_before(past)
        while past - first > 1:
            middle = (first + past) // 2
            first, past = (middle, past) if self.steps_before(middle) <= step else (first, middle)
        return first

    @cached_property
    def _known(self) -> dict[int, Epoch]:
        return {}

    def _make_epoch(self, number: int) -> Epoch:
        before, after = self._all_before(number), self._all_before(number + 1)
        epoch = Epoch(
            number=number,
            first=sum(before),
            end=sum(after),
            before=tuple(before),
            ends=tuple(accumulate(map(sub, after, before))),
            key=key_of(self.seed, _STEPS, number),
        )
        if len(self._known) >= _KEPT_EPOCHS:
            self._known.clear()
        self._known[number] = epoch
        return epoch

    def at(self, step: int) -> PlannedStep:
        """Give what a step reads, over all ranks."""
        return self.draw([(step, 0)])[0]

    def draw(self, parts: Sequence[tuple[int, int]], num_parts: int = 1) -> list[PlannedStep]:
        """Give what some micro-batches read: each is (step, part), the global batch being divided into `num_parts` equal ones.

        With R ranks and A micro-batches a step, rank r's micro-batch a is the part r A + a of R A. Many at once, of steps that
        follow one another, cost hardly more than one. Each bucket's global batch must divide by `num_parts`.
        """
        placed = self._place([step for step, _ in parts])
        spans: list[Span] = []
        shapes = []
        for step, part in parts:
            _, bucket, number = placed[step]
            count = self.buckets[bucket].global_batch // num_parts
            shapes.append((part * count, count, self._add_spans(spans, bucket, number, part * count, count)))
        rows, at, drawn = rows_of(spans, self.shuffle, self.shuffle_window), 0, []
        for (step, _), (first, count, real) in zip(parts, shapes, strict=True):
            epoch, bucket, _ = placed[step]
            weight = self._ones(count) if real >= count else (np.arange(count) < real).astype(np.float32)
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
        """Give for each step its epoch, its bucket (by number), and the number of the bucket's batch."""
        by_epoch: dict[int, tuple[Epoch, list[int]]] = {}
        for step in dict.fromkeys(steps):
            epoch = self._epoch(step)
            by_epoch.setdefault(epoch.number, (epoch, []))[1].append(step)
        return {
            step: (epoch.number, bucket, number)
            for epoch, own in by_epoch.values()
            for step, (bucket, number) in zip(own, epoch.batches_at(own, self.shuffle), strict=True)
        }

    def _add_spans(self, spans: list[Span], bucket: int, number: int, begin: int, count: int) -> int:
        """Add the spans of `count` positions of a bucket's batch `number` from `begin` on; give how many of them count."""
        n, size = self.buckets[bucket].num_rows, self.buckets[bucket].global_batch
        carries = self.remainder is Remainder.CARRY
        if carries:  # n and number can be large; Python's integers keep the product exact
            number_of_pass, at = divmod(number * size + begin, n)
            real = count
        else:
            number_of_pass, within = divmod(number, self._all_per_pass[bucket])
            at = within * size + begin
            real = max(0, n - at)
            at %= n
        while count > 0:
            taken = min(count, n - at)
            spans.append(Span(n, extend_key(self._pass_keys[bucket], number_of_pass), at, taken))
            count, at = count - taken, 0
            number_of_pass += carries  # a partial batch is filled with rows of its own pass
        return real

    @cached_property
    def _pass_keys(self) -> list[int]:
        """Give the keys that the keys of a bucket's passes begin with."""
        names = (hashlib.blake2b(bucket.name.encode(), digest_size=8).digest() for bucket in self.buckets)
        return [key_of(self.seed, _PASS, int.from_bytes(name, "little")) for name in names]

    def _ones(self, count: int) -> NDArray[np.float32]:
        if count not in self._all_ones:
            self._all_ones[count] = np.ones(count, dtype=np.float32)
        return self._all_ones[count]

    @cached_property
    def _all_ones(self) -> dict[int, NDArray[np.float32]]:
        return {}

    def batch(self, bucket: PlanBucket, number: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Give the rows and weights of a bucket's global batch `number`."""
        spans: list[Span] = []
        real = self._add_spans(spans, self.buckets.index(bucket), number, 0, bucket.global_batch)
        weight = (np.arange(bucket.global_batch) < real).astype(np.float32)
        return rows_of(spans, self.shuffle, self.shuffle_window), weight

    def count(self, bucket: PlanBucket, epochs: int) -> BucketCount:
        """Count what `epochs` epochs read of a bucket; enumerates only the batches that span two passes."""
        n, size = bucket.num_rows, bucket.global_batch
        batches = self.batches_before(bucket, epochs)
        if size > n and self.remainder is not Remainder.DROP:
            repeats = batches
        elif self.remainder is Remainder.CARRY:
            spanning = {boundary * n // size for boundary in range(1, epochs) if boundary * n % size}
            repeats = sum(len(np.unique(self.batch(bucket, j)[0])) < size for j in spanning if j < batches)
        else:
            repeats = 0  # a partial batch is filled with rows of its own pass that it does not hold yet
        return BucketCount(bucket=bucket, batches=batches, carried=epochs * n - batches * size, repeats=repeats)

    def without_step(self) -> str:
        """Say why there is no step, with the numbers."""
        named = [f"{bucket.name} has {bucket.num_rows} rows" for bucket in self.buckets[:MAX_NAMED]]
        if len(self.buckets) > MAX_NAMED:
            named.append(f"and {len(self.buckets) - MAX_NAMED} buckets more")
        sizes = sorted({bucket.global_batch for bucket in self.buckets})
        size = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}, by bucket"
        return (
            f"the plan has no step: {', '.join(named)}, and a global batch takes {size}; take a smaller batch, fewer ranks or "
            "more epochs"
        )


def make_plan(store: OpenShards, config: LoaderConfig, *, world_size: int = 1) -> Plan:
    """Make the plan over one split of a store's generation, or of several stores joined.

    Raises:
        PlanError: where the split has no rows.
    """
    buckets = tuple(
        PlanBucket(
            name=bucket.name,
            num_rows=bucket.num_rows,
            global_batch=config.rows_of(bucket) * config.accumulation * world_size,
        )
        for bucket in store.buckets(config.split)
    )
    if not buckets:
        held = ", ".join(sorted({bucket.split for bucket in store.buckets()})) or "none"
        raise PlanError(
            f"the plan has no step: {store.where} has no rows in the split {config.split!r} (splits with rows: {held})"
        )
    return Plan(
        seed=config.seed,
        remainder=config.remainder,
        buckets=buckets,
        source=store.generations,
        shuffle=config.shuffle,
        shuffle_window=config.shuffle_window,
    )


def plan_of(store: OpenShards, config: LoaderConfig, world_size: int) -> Plan:
    """Make the plan that a loader with this configuration follows, on any of so many ranks; a service makes the same.

    Raises:
        PlanError: where there is not a single step to make.
    """
    plan = make_plan(store, config, world_size=world_size)
    if (config.epochs is not None and plan.steps_before(config.epochs) == 0) or not plan.has_steps:
        raise PlanError(plan.without_step())
    return plan
