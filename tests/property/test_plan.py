"""The plan's promises, for drawn buckets, batches, ranks, policies, windows and seeds, against plain enumeration."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bucketline.errors import PlanError
from bucketline.loader.config import Remainder
from bucketline.loader.plan import plan as plan_module
from bucketline.loader.plan.epoch_steps import ShardRuns
from bucketline.loader.plan.order import permute_all
from bucketline.loader.plan.plan import PLAN_VERSION, Plan, PlanBucket

SIZES = st.lists(st.one_of(st.integers(1, 5), st.integers(1, 70), st.sampled_from([255, 256, 257])), min_size=1, max_size=5)


def in_shards(size: int, num_shards: int, seed: int) -> ShardRuns:
    """Spread a bucket's rows at random over as many shards, of which some stay empty."""
    held = np.bincount(np.random.default_rng(seed).integers(0, num_shards, size), minlength=num_shards)
    shard = np.flatnonzero(held)
    return ShardRuns(shard=shard, repeat=np.zeros_like(shard), num_rows=held[shard])


def make(sizes: Sequence[int], batches: int | Sequence[int], seed: int, remainder: Remainder, **order: Any) -> Plan:
    """Make a plan of buckets of these sizes; `batches` is the global batch of all, or of each."""
    if max(sizes) < 1 << 20:
        order.setdefault("runs", tuple(in_shards(n, 7, seed + k) for k, n in enumerate(sizes)))
    names = [f"train/{64 * (n + 1)}x64" for n in range(len(sizes))]
    each = [batches] * len(sizes) if isinstance(batches, int) else batches
    buckets = tuple(PlanBucket(name=name, num_rows=n, global_batch=g) for name, n, g in zip(names, sizes, each, strict=True))
    return Plan(seed=seed, remainder=remainder, buckets=buckets, source="s:1:d", **order)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A drawn plan, and who reads it."""

    plan: Plan
    world: int
    accumulation: int
    epochs: int

    @property
    def num_parts(self) -> int:
        return self.world * self.accumulation


@st.composite
def plans(draw: st.DrawFn, remainder: Remainder | None = None) -> Drawn:
    world, accumulation, sizes = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(SIZES)
    rows = [draw(st.integers(1, 6))] * len(sizes) if draw(st.booleans()) else [draw(st.integers(1, 6)) for _ in sizes]
    batches = [world * accumulation * own for own in rows]
    common, seed, num_shards = math.gcd(*batches), draw(st.integers(0, 1 << 40)), draw(st.sampled_from([1, 3, 30]))
    plan = make(
        sizes,
        batches,
        seed,
        remainder or draw(st.sampled_from(Remainder)),
        window=draw(st.sampled_from([None, 16, 32, 100, 4096, 0])),
        lanes=draw(st.sampled_from([lanes for lanes in range(1, common + 1) if common % lanes == 0])),
        runs=tuple(in_shards(n, num_shards, seed + k) for k, n in enumerate(sizes)),
    )
    return Drawn(plan=plan, world=world, accumulation=accumulation, epochs=draw(st.integers(1, 4)))


@given(drawn=plans(), at=st.integers(0, 1 << 40))
@settings(max_examples=200)
def test_ranks_read_disjoint_and_equal_shares_that_make_up_the_global_batch(drawn: Drawn, at: int) -> None:
    plan = drawn.plan
    assume(plan.has_steps)
    for step in (0, 1, at):
        whole = plan.at(step)
        size = next(bucket.global_batch for bucket in plan.buckets if bucket.name == whole.bucket)
        ranks = [
            plan.draw([(step, rank * drawn.accumulation + micro) for micro in range(drawn.accumulation)], drawn.num_parts)
            for rank in range(drawn.world)
        ]
        parts = [part for rank in ranks for part in rank]
        assert {(part.step, part.epoch, part.bucket) for part in parts} == {(step, whole.epoch, whole.bucket)}
        assert {len(part.rows) for part in parts} == {len(part.weight) for part in parts} == {size // drawn.num_parts}
        positions = [part.first_position + n for part in parts for n in range(len(part.rows))]
        assert positions == list(range(size))
        assert np.array_equal(np.concatenate([part.rows for part in parts]), whole.rows)
        assert np.array_equal(np.concatenate([part.weight for part in parts]), whole.weight)


@given(drawn=plans(), data=st.data())
@settings(max_examples=150)
def test_a_window_of_steps_is_what_its_steps_are_one_by_one_wherever_it_begins(drawn: Drawn, data: st.DataObject) -> None:
    assume(drawn.plan.has_steps)
    first, count = data.draw(st.one_of(st.integers(0, 60), st.integers(0, 1 << 40))), data.draw(st.integers(1, 40))
    pairs = [divmod(first * drawn.num_parts + n, drawn.num_parts) for n in range(count)]
    together = drawn.plan.draw(pairs, drawn.num_parts)
    fresh = replace(drawn.plan)  # which has cached nothing
    for pair, part in zip(pairs, together, strict=True):
        (alone,) = fresh.draw([pair], drawn.num_parts)
        assert (alone.step, alone.epoch, alone.bucket, alone.first_position) == (
            part.step,
            part.epoch,
            part.bucket,
            part.first_position,
        )
        assert alone.rows.tolist() == part.rows.tolist()
        assert alone.weight.tolist() == part.weight.tolist()


@given(drawn=plans(Remainder.CARRY))
@settings(max_examples=200)
def test_carry_delivers_every_row_once_a_pass_and_short_by_less_than_a_batch(drawn: Drawn) -> None:
    plan, epochs = drawn.plan, drawn.epochs
    for bucket in plan.buckets:
        stream: list[int] = []
        for number in range(plan.batches_before(bucket, epochs)):
            rows, weight = plan.batch(bucket, number)
            assert weight.min() == 1
            stream += rows.tolist()
        n = bucket.num_rows
        assert 0 <= epochs * n - len(stream) < bucket.global_batch
        for at in range(0, len(stream), n):
            part = stream[at : at + n]
            assert len(set(part)) == len(part)
            assert set(part) <= set(range(n))
        delivered = Counter(stream)
        assert max(delivered.values(), default=0) <= epochs
        assert sum(epochs - delivered[row] for row in range(n)) < bucket.global_batch


@given(drawn=plans())
@settings(max_examples=150)
def test_the_steps_of_the_epochs_are_the_buckets_batches_each_exactly_once(drawn: Drawn) -> None:
    plan, epochs = drawn.plan, drawn.epochs
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
def test_drop_leaves_a_pass_less_than_a_batch_short_and_repeats_nothing(drawn: Drawn) -> None:
    plan, epochs = drawn.plan, drawn.epochs
    for bucket in plan.buckets:
        per_pass = bucket.num_rows // bucket.global_batch
        assert plan.batches_before(bucket, epochs) == epochs * per_pass
        for epoch in range(epochs):
            rows = [r for j in range(per_pass) for r in plan.batch(bucket, epoch * per_pass + j)[0].tolist()]
            assert len(set(rows)) == len(rows) == per_pass * bucket.global_batch


@given(drawn=plans(Remainder.PARTIAL))
@settings(max_examples=200)
def test_partial_delivers_every_row_with_weight_one_exactly_once_a_pass(drawn: Drawn) -> None:
    plan, epochs = drawn.plan, drawn.epochs
    for bucket in plan.buckets:
        per_pass = -(-bucket.num_rows // bucket.global_batch)
        assert plan.batches_before(bucket, epochs) == epochs * per_pass
        for epoch in range(epochs):
            batches = [plan.batch(bucket, epoch * per_pass + j) for j in range(per_pass)]
            counted = [int(row) for rows, weight in batches for row, w in zip(rows, weight, strict=True) if w == 1]
            assert sorted(counted) == list(range(bucket.num_rows))
            assert all(weight[0] == 1 for _, weight in batches)
            together = np.concatenate([rows for rows, _ in batches])
            filled = np.resize(together[: bucket.num_rows], per_pass * bucket.global_batch)
            if plan.window and per_pass > 1:  # with those at the same places of the first batch
                filled[bucket.num_rows :] = together[bucket.num_rows % bucket.global_batch : bucket.global_batch][
                    : len(filled) - bucket.num_rows
                ]
            assert np.array_equal(together, filled)  # by the rows that the pass began with


@given(drawn=plans(), step=st.integers(0, 1 << 50))
@settings(max_examples=200)
def test_any_step_of_an_endless_run_can_be_asked_for(drawn: Drawn, step: int) -> None:
    plan = drawn.plan
    assume(plan.has_steps)
    planned = plan.at(step)
    assert plan.steps_before(planned.epoch) <= step < plan.steps_before(planned.epoch + 1)
    bucket = next(bucket for bucket in plan.buckets if bucket.name == planned.bucket)
    assert len(planned.rows) == len(planned.weight) == bucket.global_batch
    assert 0 <= planned.rows.min() <= planned.rows.max() < bucket.num_rows


@given(drawn=plans(), other=st.integers(1, 1 << 30))
@settings(max_examples=100)
def test_the_digest_stands_for_everything_that_decides_the_order(drawn: Drawn, other: int) -> None:
    plan = drawn.plan
    assert replace(plan).digest == plan.digest
    first = plan.buckets[0]
    more = replace(first, num_rows=first.num_rows + other)
    runs = (replace(plan.runs[0], num_rows=plan.runs[0].num_rows + (np.arange(len(plan.runs[0].shard)) == 0) * other),)
    changed = [
        replace(plan, seed=plan.seed + other),
        replace(plan, source=f"s:{other}"),
        replace(plan, remainder=next(policy for policy in Remainder if policy is not plan.remainder)),
        replace(plan, buckets=(more, *plan.buckets[1:]), runs=(*runs, *plan.runs[1:])),
        replace(plan, buckets=(replace(first, global_batch=first.global_batch + other * plan.lanes), *plan.buckets[1:])),
        replace(plan, buckets=(replace(first, name="val/8x8"), *plan.buckets[1:])),
        *(replace(plan, window=window) for window in (None, 0, 5000 + other) if window != plan.window),
    ]
    assert len({plan.digest, *(one.digest for one in changed)}) == len(changed) + 1
    fewer = replace(plan, lanes=1)
    assert (fewer.digest == plan.digest) == (plan.lanes == 1 or not plan.window)


@pytest.mark.parametrize(("window", "asked"), [(None, 64), (0, 0)])
def test_a_step_costs_the_same_for_a_million_rows_and_for_ten_to_the_fifteen(window: int | None, asked: int) -> None:
    """Counted in indices permuted, not in seconds: only the rows of the batch."""
    found: list[int] = []

    def counted(parts: Sequence[tuple[NDArray[np.int64], int, int]]) -> NDArray[np.int64]:
        found.extend(len(index) for index, _, _ in parts)
        return permute_all(parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "permute_all", counted)
        for rows in (10**6, 10**10, 10**15):
            found.clear()
            planned = make([rows, rows // 3], 64, 0, Remainder.CARRY, window=window).at(rows // 7)
            assert len(planned.rows) == 64
            assert sum(found) == asked


@pytest.mark.parametrize("remainder", Remainder)
def test_with_a_window_each_bucket_comes_in_proportion_and_its_batches_in_order(remainder: Remainder) -> None:
    plan = make([4000, 1000, 250, 3], 4, 11, remainder, window=4096, lanes=2)
    for epoch in range(3):
        steps = range(plan.steps_before(epoch), plan.steps_before(epoch + 1))
        placed = plan._place(steps)
        order = [placed[step][1:] for step in steps]
        for number, bucket in enumerate(plan.buckets):
            own = [batch for at, batch in order if at == number]
            assert own == list(range(plan.batches_before(bucket, epoch), plan.batches_before(bucket, epoch + 1)))
        share = [sum(at == 0 for at, _ in order[begin : begin + 100]) for begin in range(0, 1300, 100)]
        assert max(share) - min(share) <= 4


def test_a_window_of_nothing_reads_as_stored_bucket_after_bucket() -> None:
    plan = make([7, 5], 3, 9, Remainder.CARRY, window=0)
    read = [(s.bucket, s.rows.tolist()) for s in (plan.at(step) for step in range(plan.steps_before(2)))]
    one, two = "train/64x64", "train/128x64"
    assert read == [
        *[(one, [0, 1, 2]), (one, [3, 4, 5]), (two, [0, 1, 2])],
        *[(one, [6, 0, 1]), (one, [2, 3, 4]), (two, [3, 4, 0]), (two, [1, 2, 3])],
    ]


def test_a_plan_without_a_step_is_refused_with_the_numbers() -> None:
    plan = make([3, 2], 4, 0, Remainder.DROP)
    assert plan.steps_before(1000) == 0
    with pytest.raises(PlanError, match=r"train/64x64 has 3 rows, train/128x64 has 2 rows, and a global batch takes 4"):
        plan.at(0)


@pytest.mark.parametrize(("rows", "size"), [(0, 1), (1, 0)])
def test_a_bucket_without_rows_or_batches_without_size_are_refused(rows: int, size: int) -> None:
    with pytest.raises(PlanError, match="both must be 1 or more"):
        make([rows], size, 0, Remainder.CARRY)


def test_a_plan_of_thousands_of_buckets_names_a_few_when_it_is_refused() -> None:
    plan = make([1] * 3000, [2] * 2999 + [4], 0, Remainder.DROP)
    with pytest.raises(PlanError, match=r"and 2992 more buckets, and a global batch takes 2 to 4, by bucket") as refused:
        plan.at(0)
    assert len(str(refused.value)) < 1000


# The order of a seed, as literal values: a run of last year continues in the same order today, on any machine.
#
# A change that makes one of these fail changes every order: it needs another PLAN_VERSION, and breaks each saved state.


ROWS = {
    1: ("95307960fa7319a9", "95307960fa7319a9"),
    2: ("585038a50477ae49", "e609796e0258a0aa"),
    7: ("7fe9f2e75018f20f", "ecbdc7c6533b6ac6"),
    255: ("77b7a3e88bbe1510", "1486be26c7ac67a5"),
    256: ("0b6ec9846c9cce97", "01ea7d44991a4007"),
    257: ("f78c42413e8d4632", "9644c0712bb0de56"),
    65535: ("00bc9d8f6831d7d5", "1d5a23e74ddca720"),
    65536: ("e9abf1de5a09d330", "f8602ee6b6397b6f"),
    65537: ("11fdbc0ff03d088d", "438c5b972a35b97b"),
    131071: ("be02d51d848c3970", "c29873a8df3d201f"),
    131072: ("28f8848549f4a7ce", "e1fa9bc68da36e46"),
    131073: ("5d4bf98e78147890", "853d8b1d0691c09e"),
    1000000: ("b4430efc4de1f603", "888029500cbee69b"),
    1000000000000: ("92b751baff01c0bc", "9f80ffeb050d416f"),
    1099511627777: ("b5b9ac6d976d3fb6", "f9fd700e908f6577"),
}
DIGESTS = {
    (None, Remainder.CARRY): "fa75f8e9550db1e9949f54de832fdc3b",
    (4096, Remainder.CARRY): "5ab0efae38352f532066d67a0192687d",
    (0, Remainder.CARRY): "c1c846af7aa415c38af425ac4472f528",
    (None, Remainder.DROP): "fa75f8e9550db1e9949f54de832fdc3b",
    (4096, Remainder.DROP): "5ab0efae38352f532066d67a0192687d",
    (0, Remainder.DROP): "c1c846af7aa415c38af425ac4472f528",
    (None, Remainder.PARTIAL): "9d9186ae5dc54c502826517c2c287ba4",
    (4096, Remainder.PARTIAL): "d028c19dd8745ac9a99e3ba241bc8d1e",
    (0, Remainder.PARTIAL): "a21ee446b9a142f5bee79e1db977beba",
}
PLAN_DIGESTS = [
    "304f2ccb626d582a525515d34bf653e0",
    "322f9a4d8eb6ffbfa00e66b398b2eb03",
    "501c7f1ed1a27354ef5a9f33dd3aaf1e",
]
GOLDEN_SIZES = [*ROWS]
STEPS = [0, 1, 1_000_003, 10**11]


def plan_of(window: int | None, remainder: Remainder, *sizes: int, seed: int = 2026) -> Plan:
    buckets = tuple(PlanBucket(name=f"train/{64 * (k + 1)}x64", num_rows=n, global_batch=4) for k, n in enumerate(sizes))
    runs = tuple(map(golden_shards, sizes))
    return Plan(seed=seed, remainder=remainder, buckets=buckets, source="s:1:d", window=window, lanes=2, runs=runs)


def golden_shards(n: int) -> ShardRuns:
    """Return 40 shards, each some rows longer than the one before it, as far as the rows suffice."""
    ends = np.unique(np.arange(1, 41) ** 2 * n // 1600)
    held = np.diff(ends, prepend=0)
    shard = np.flatnonzero(held)
    return ShardRuns(shard=shard, repeat=np.zeros_like(shard), num_rows=held[shard])


def rows_at(window: int | None, n: int) -> str:
    plan = plan_of(window, Remainder.CARRY, n)
    return hashlib.blake2b(repr([plan.at(step).rows.tolist() for step in STEPS]).encode(), digest_size=8).hexdigest()


def digest_of(window: int | None, remainder: Remainder) -> str:
    """Return a digest of thousands of rows: 600 steps from several places on, over buckets of all kinds of sizes."""
    plan = plan_of(window, remainder, *GOLDEN_SIZES[2:])
    found = hashlib.blake2b(digest_size=16)
    for first in (0, 10**6, 10**10, 3 * 10**11):
        for planned in plan.draw([(first + k, 0) for k in range(150)]):
            found.update(f"{planned.epoch} {planned.bucket} {planned.rows.tolist()} {planned.weight.tolist()};".encode())
    return found.hexdigest()


@pytest.mark.parametrize("n", GOLDEN_SIZES)
def test_the_rows_of_a_seed_never_change(n: int) -> None:
    assert (rows_at(None, n), rows_at(4096, n)) == ROWS[n]


@pytest.mark.parametrize("window", [None, 4096, 0])
@pytest.mark.parametrize("remainder", Remainder)
def test_steps_buckets_rows_and_weights_of_a_seed_never_change(window: int | None, remainder: Remainder) -> None:
    assert digest_of(window, remainder) == DIGESTS[window, remainder]


def test_the_digest_of_a_plan_never_changes() -> None:
    assert PLAN_VERSION == 1
    plans = [plan_of(window, Remainder.CARRY, 7, 3) for window in (None, 4096, 0)]
    assert [plan.digest for plan in plans] == PLAN_DIGESTS
