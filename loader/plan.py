"""The plan: a pure function from (seed, step) to (bucket, rows). Nothing in it grows with the number of rows.

A bucket's rows are read in passes; each pass is a keyed bijection of its own. With `carry`, the passes run on as one
endless stream and the bucket's global batch j takes the positions [jG, (j + 1)G): what a pass leaves over begins the next
batch. Epoch e has the batches floor(e n / G) to floor((e + 1) n / G) of that bucket.

Letters: n rows of a bucket, G its global batch (ranks x batch size x accumulation), e epoch, j number of a bucket's batch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import PlanError
from bucketline.loader.permutation import key_of, permute

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bucketline.loader.config import LoaderConfig
    from bucketline.store import Store

PLAN_VERSION = 1
_PASS, _STEPS = 1, 2  # what a key is for


class Remainder(StrEnum):
    """What becomes of a pass's rows that do not fill a global batch."""

    CARRY = "carry"  # they begin the next batch
    DROP = "drop"  # they are left out of that pass
    PARTIAL = "partial"  # a batch of their own, filled to full shape by repetition with weight 0


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
    """What one optimizer step reads, over all ranks."""

    step: int
    epoch: int
    bucket: str
    rows: NDArray[np.int64]  # [G] row numbers of the bucket, by position in the global batch
    weight: NDArray[np.float32]  # [G] 1, or 0 where a position only fills the shape


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketCount:
    """What E epochs read of one bucket."""

    bucket: PlanBucket
    batches: int
    carried: int  # E n - batches G
    repeats: int  # batches that hold a sample twice


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The order of everything, for any number of steps."""

    seed: int
    remainder: Remainder
    buckets: tuple[PlanBucket, ...]
    source: str  # what the rows belong to: the store's id and its generation's digest

    def __post_init__(self) -> None:
        if not self.buckets:
            raise PlanError("the plan has no rows; the store has none in this split")

    @cached_property
    def digest(self) -> str:
        """Stands for all that decides the order, and for the store's generation. 32 hexadecimal digits."""
        buckets = [[bucket.name, bucket.num_rows, bucket.global_batch] for bucket in self.buckets]
        text = json.dumps([PLAN_VERSION, self.seed, self.remainder, self.source, buckets])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def batches_before(self, bucket: PlanBucket, epoch: int) -> int:
        """Give how many batches of a bucket the epochs before `epoch` have."""
        n, size = bucket.num_rows, bucket.global_batch
        if self.remainder is Remainder.CARRY:
            return epoch * n // size
        return epoch * (n // size if self.remainder is Remainder.DROP else -(-n // size))

    def steps_before(self, epoch: int) -> int:
        """Give how many steps the epochs before `epoch` have."""
        return sum(self.batches_before(bucket, epoch) for bucket in self.buckets)

    def epoch_of(self, step: int) -> int:
        """Give the epoch that a step belongs to.

        Raises:
            PlanError: where no epoch has a step (with `drop`, and every bucket smaller than its global batch).
        """
        past = 1
        while self.steps_before(past) <= step:
            past *= 2
            if past > 1 << 80:
                raise PlanError(self.without_step())
        first = past // 2  # steps_before(first) <= step < steps_before(past)
        while past - first > 1:
            middle = (first + past) // 2
            first, past = (middle, past) if self.steps_before(middle) <= step else (first, middle)
        return first

    def at(self, step: int) -> PlannedStep:
        """Give what a step reads."""
        epoch = self.epoch_of(step)
        first = self.steps_before(epoch)
        num_steps = self.steps_before(epoch + 1) - first
        place = int(permute(np.array([step - first]), num_steps, key_of(self.seed, _STEPS, epoch))[0])
        for bucket in self.buckets:
            before, after = self.batches_before(bucket, epoch), self.batches_before(bucket, epoch + 1)
            if place < after - before:
                rows, weight = self.batch(bucket, before + place)
                return PlannedStep(step=step, epoch=epoch, bucket=bucket.name, rows=rows, weight=weight)
            place -= after - before
        raise AssertionError(f"step {step} is beyond the buckets of epoch {epoch}")

    def batch(self, bucket: PlanBucket, number: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Give the rows and weights of a bucket's global batch `number`."""
        n, size = bucket.num_rows, bucket.global_batch
        weight = np.ones(size, dtype=np.float32)
        positions = np.arange(size, dtype=np.int64)
        if self.remainder is Remainder.CARRY:
            # n and number can be large; Python's integers keep the product exact
            first_pass, first = divmod(number * size, n)
            passes, index = np.divmod(positions + first, n)
        else:
            per_pass = n // size if self.remainder is Remainder.DROP else -(-n // size)
            first_pass, within = divmod(number, per_pass)
            index = positions + within * size
            weight[index >= n] = 0.0
            passes, index = np.zeros_like(index), index % n
        rows = np.empty_like(index)
        name_key = int.from_bytes(hashlib.blake2b(bucket.name.encode(), digest_size=8).digest(), "little")
        for number_of_pass in np.unique(passes):
            here = passes == number_of_pass
            key = key_of(self.seed, _PASS, name_key, first_pass + int(number_of_pass))
            rows[here] = permute(index[here], n, key)
        return rows, weight

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
        sizes = ", ".join(f"{bucket.name} has {bucket.num_rows} rows" for bucket in self.buckets)
        size = self.buckets[0].global_batch
        return (
            f"the plan has no step: {sizes}, and a global batch takes {size}; take a smaller batch, fewer ranks or more epochs"
        )


def make_plan(store: Store, *, split: str, seed: int, global_batch: int, remainder: Remainder) -> Plan:
    """Make the plan over one split of a store's generation.

    Raises:
        PlanError: where the split has no rows, or the global batch is less than 1.
    """
    buckets = tuple(
        PlanBucket(name=bucket.name, num_rows=bucket.num_rows, global_batch=global_batch) for bucket in store.buckets(split)
    )
    if not buckets:
        held = ", ".join(sorted({bucket.split for bucket in store.buckets()})) or "none"
        raise PlanError(f"the plan has no step: {store.path} has no rows in the split {split!r} (splits with rows: {held})")
    source = f"{store.manifest.store_id}:{store.manifest.generation}:{store.manifest.digest}"
    return Plan(seed=seed, remainder=remainder, buckets=buckets, source=source)


def plan_of(store: Store, config: LoaderConfig, world_size: int) -> Plan:
    """Make the plan that a loader with this configuration follows, on any of so many ranks; a service makes the same.

    Raises:
        PlanError: where there is not a single step to make.
    """
    plan = make_plan(
        store,
        split=config.split,
        seed=config.seed,
        global_batch=config.batch_size * config.accumulation * world_size,
        remainder=config.remainder,
    )
    if plan.steps_before(config.epochs or 1 << 62) == 0:
        raise PlanError(plan.without_step())
    return plan


def slice_of_rank(rank: int, world_size: int, global_batch: int) -> slice:
    """Give the positions of the global batch that a rank reads: equal, adjoining shares."""
    share = global_batch // world_size
    return slice(rank * share, (rank + 1) * share)
