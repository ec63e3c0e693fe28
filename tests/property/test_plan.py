"""The plan's promises, for drawn buckets, batches, ranks, policies and seeds, against plain enumeration."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bucketline.errors import PlanError
from bucketline.loader import plan as plan_module
from bucketline.loader.permutation import permute
from bucketline.loader.plan import Plan, PlanBucket, Remainder, slice_of_rank

if TYPE_CHECKING:
    from numpy.typing import NDArray

SIZES = st.lists(st.one_of(st.integers(1, 5), st.integers(1, 70)), min_size=1, max_size=5)


def make(sizes: list[int], size: int, seed: int, remainder: Remainder) -> Plan:
    names = [f"train/{64 * (n + 1)}x64" for n in range(len(sizes))]
    buckets = tuple(PlanBucket(name=name, num_rows=n, global_batch=size) for name, n in zip(names, sizes, strict=True))
    return Plan(seed=seed, remainder=remainder, buckets=buckets, source="s:1:d")


@st.composite
def plans(draw: st.DrawFn, remainder: Remainder | None = None) -> tuple[Plan, int, int]:
    """Draw a plan, its ranks and its epochs."""
    world = draw(st.integers(1, 4))
    size = world * draw(st.integers(1, 6)) * draw(st.integers(1, 3))
    policy = remainder or draw(st.sampled_from(Remainder))
    plan = make(draw(SIZES), size, draw(st.integers(0, 1 << 40)), policy)
    return plan, world, draw(st.integers(1, 4))


@given(drawn=plans())
@settings(max_examples=200)
def test_ranks_read_disjoint_and_equal_shares_that_make_up_the_global_batch(drawn: tuple[Plan, int, int]) -> None:
    plan, world, _ = drawn
    size = plan.buckets[0].global_batch
    positions = np.concatenate([np.arange(size)[slice_of_rank(rank, world, size)] for rank in range(world)])
    assert positions.tolist() == list(range(size))
    assert len({len(range(size)[slice_of_rank(rank, world, size)]) for rank in range(world)}) == 1


@given(drawn=plans(Remainder.CARRY))
@settings(max_examples=200)
def test_carry_delivers_every_row_once_a_pass_and_short_by_less_than_a_batch(drawn: tuple[Plan, int, int]) -> None:
    plan, _, epochs = drawn
    size = plan.buckets[0].global_batch
    streams: dict[str, list[int]] = {bucket.name: [] for bucket in plan.buckets}
    for bucket in plan.buckets:
        for number in range(plan.batches_before(bucket, epochs)):
            rows, weight = plan.batch(bucket, number)
            assert weight.min() == 1
            streams[bucket.name] += rows.tolist()
    for bucket in plan.buckets:
        stream, n = streams[bucket.name], bucket.num_rows
        assert 0 <= epochs * n - len(stream) < size
        for at in range(0, len(stream), n):
            part = stream[at : at + n]
            assert len(set(part)) == len(part)
            assert set(part) <= set(range(n))
        delivered = Counter(stream)
        assert max(delivered.values(), default=0) <= epochs


@given(drawn=plans())
@settings(max_examples=300)
def test_the_steps_of_the_epochs_are_the_buckets_batches_each_exactly_once(drawn: tuple[Plan, int, int]) -> None:
    plan, _, epochs = drawn
    steps = plan.steps_before(epochs)
    assume(steps < 300)
    found: Counter[tuple[str, bytes]] = Counter()
    epochs_seen = []
    for step in range(steps):
        planned = plan.at(step)
        assert planned.step == step
        assert plan.steps_before(planned.epoch) <= step < plan.steps_before(planned.epoch + 1)
        epochs_seen.append(planned.epoch)
        found[planned.bucket, planned.rows.tobytes() + planned.weight.tobytes()] += 1
    assert epochs_seen == sorted(epochs_seen)
    expected: Counter[tuple[str, bytes]] = Counter()
    for bucket in plan.buckets:
        for number in range(plan.batches_before(bucket, epochs)):
            rows, weight = plan.batch(bucket, number)
            expected[bucket.name, rows.tobytes() + weight.tobytes()] += 1
    assert found == expected


@given(drawn=plans(Remainder.DROP))
@settings(max_examples=200)
def test_drop_leaves_a_pass_less_than_a_batch_short_and_repeats_nothing(drawn: tuple[Plan, int, int]) -> None:
    plan, _, epochs = drawn
    for bucket in plan.buckets:
        per_pass = bucket.num_rows // bucket.global_batch
        assert plan.batches_before(bucket, epochs) == epochs * per_pass
        for epoch in range(epochs):
            rows = [r for j in range(per_pass) for r in plan.batch(bucket, epoch * per_pass + j)[0].tolist()]
            assert len(set(rows)) == len(rows) == per_pass * bucket.global_batch


@given(drawn=plans(Remainder.PARTIAL))
@settings(max_examples=200)
def test_partial_delivers_every_row_with_weight_one_exactly_once_a_pass(drawn: tuple[Plan, int, int]) -> None:
    plan, _, epochs = drawn
    for bucket in plan.buckets:
        per_pass = -(-bucket.num_rows // bucket.global_batch)
        assert plan.batches_before(bucket, epochs) == epochs * per_pass
        for epoch in range(epochs):
            batches = [plan.batch(bucket, epoch * per_pass + j) for j in range(per_pass)]
            counted = [int(row) for rows, weight in batches for row, w in zip(rows, weight, strict=True) if w == 1]
            assert sorted(counted) == list(range(bucket.num_rows))
            assert all(set(rows.tolist()) <= set(range(bucket.num_rows)) for rows, _ in batches)
            assert all(weight[0] == 1 for _, weight in batches)


@given(drawn=plans())
@settings(max_examples=250)
def test_counts_equal_what_is_found_by_looking_at_every_batch(drawn: tuple[Plan, int, int]) -> None:
    plan, _, epochs = drawn
    for bucket in plan.buckets:
        count = plan.count(bucket, epochs)
        batches = [plan.batch(bucket, number)[0] for number in range(plan.batches_before(bucket, epochs))]
        assert count.batches == len(batches)
        assert count.carried == epochs * bucket.num_rows - len(batches) * bucket.global_batch
        assert count.repeats == sum(len(np.unique(rows)) < len(rows) for rows in batches)


@given(drawn=plans(), step=st.integers(0, 1 << 50))
@settings(max_examples=200)
def test_any_step_of_an_endless_run_can_be_asked_for(drawn: tuple[Plan, int, int], step: int) -> None:
    plan, _, _ = drawn
    assume(plan.steps_before(1 << 62) > 0)
    epoch = plan.epoch_of(step)
    assert plan.steps_before(epoch) <= step < plan.steps_before(epoch + 1)
    planned = plan.at(step)
    bucket = next(bucket for bucket in plan.buckets if bucket.name == planned.bucket)
    assert len(planned.rows) == len(planned.weight) == bucket.global_batch
    assert 0 <= planned.rows.min() <= planned.rows.max() < bucket.num_rows


@given(drawn=plans(), other=st.integers(1, 1 << 30))
@settings(max_examples=100)
def test_the_digest_stands_for_everything_that_decides_the_order(drawn: tuple[Plan, int, int], other: int) -> None:
    plan, _, _ = drawn
    assert replace(plan).digest == plan.digest
    first = plan.buckets[0]
    changed = [
        replace(plan, seed=plan.seed + other),
        replace(plan, source=f"s:{other}"),
        replace(plan, remainder=next(policy for policy in Remainder if policy is not plan.remainder)),
        replace(plan, buckets=(replace(first, num_rows=first.num_rows + other), *plan.buckets[1:])),
        replace(plan, buckets=(replace(first, global_batch=first.global_batch + other), *plan.buckets[1:])),
        replace(plan, buckets=(replace(first, name="val/8x8"), *plan.buckets[1:])),
    ]
    assert len({plan.digest, *(one.digest for one in changed)}) == 7


def test_passes_buckets_and_seeds_have_orders_of_their_own() -> None:
    plan = make([60, 60], 60, 0, Remainder.CARRY)
    orders = [tuple(plan.batch(bucket, number)[0].tolist()) for bucket in plan.buckets for number in range(3)]
    orders += [tuple(make([60, 60], 60, 1, Remainder.CARRY).batch(plan.buckets[0], 0)[0].tolist())]
    assert len(set(orders)) == 7


def test_buckets_are_mixed_within_an_epoch() -> None:
    plan = make([400, 400], 4, 3, Remainder.CARRY)
    names = [plan.at(step).bucket for step in range(200)]
    changes = sum(a != b for a, b in itertools.pairwise(names))
    assert 70 < changes < 130


def test_a_step_costs_the_same_for_a_thousand_rows_and_for_ten_billion() -> None:
    """Counted in indices permuted, not in seconds: only the rows of the batch and the step's own place."""
    asked: list[int] = []

    def counted(index: NDArray[np.int64], n: int, key: int) -> NDArray[np.int64]:
        asked.append(len(index))
        return permute(index, n, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "permute", counted)
        for rows in (10**6, 10**10, 10**15):
            asked.clear()
            planned = make([rows, rows // 3], 64, 0, Remainder.CARRY).at(rows // 7)
            assert len(planned.rows) == 64
            assert sum(asked) == 65


def test_a_plan_without_a_step_is_refused_with_the_numbers() -> None:
    plan = make([3, 2], 4, 0, Remainder.DROP)
    assert plan.steps_before(1000) == 0
    with pytest.raises(PlanError, match=r"train/64x64 has 3 rows, train/128x64 has 2 rows, and a global batch takes 4"):
        plan.at(0)


@pytest.mark.parametrize(("rows", "size"), [(0, 1), (1, 0)])
def test_a_bucket_without_rows_or_batches_without_size_are_refused(rows: int, size: int) -> None:
    with pytest.raises(PlanError, match="both must be 1 or more"):
        make([rows], size, 0, Remainder.CARRY)


def test_the_order_of_a_given_seed_never_changes() -> None:
    """A literal: a run of last year goes on in the same order today."""
    plan = make([7, 3], 4, 2026, Remainder.CARRY)
    order = [(s.epoch, s.bucket, s.rows.tolist()) for s in (plan.at(step) for step in range(plan.steps_before(3)))]
    assert order == GOLDEN
    assert plan.digest == GOLDEN_DIGEST


GOLDEN = [
    (0, "train/64x64", [0, 6, 5, 4]),
    (1, "train/64x64", [2, 1, 3, 0]),
    (1, "train/128x64", [1, 0, 2, 1]),
    (1, "train/64x64", [3, 6, 2, 5]),
    (2, "train/64x64", [1, 4, 2, 1]),
    (2, "train/128x64", [2, 0, 2, 0]),
    (2, "train/64x64", [0, 4, 6, 3]),
]
GOLDEN_DIGEST = "78dfdc608d68428064dad612ea34d086"
