"""Windows: lanes keep whole shards, machines take whole lanes, and few shards are open at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bucketline.command_line import machines_of
from bucketline.errors import PlanError, StateError
from bucketline.loader import Loader, LoaderConfig, WeightedStore
from bucketline.loader.config import SHARDS_AT_ONCE, Remainder
from bucketline.loader.mixture import join
from bucketline.loader.plan import epoch_steps as lanes_module
from bucketline.loader.plan.epoch_steps import ShardRuns
from bucketline.loader.plan.order import permute_all
from bucketline.loader.plan.plan import Plan, PlanBucket, make_plan
from bucketline.store import Store
from tests.kit import make_store, samples_of


@dataclass(frozen=True)
class Made:
    """A plan over made-up shards, and the shard of each row."""

    plan: Plan
    shard_of: dict[str, NDArray[np.int64]]

    def shards(self, step: int, part: int, parts: int) -> tuple[int, str, NDArray[np.int64], NDArray[np.int64]]:
        (planned,) = self.plan.draw([(step, part)], parts)
        real = planned.weight > 0
        rows = planned.rows[real]
        return planned.epoch, planned.bucket, rows, self.shard_of[planned.bucket][rows]


def make(held: NDArray[np.int64], batches: Sequence[int], lanes: int, window: int, **more: object) -> Made:
    """Make a plan; `held`: `[buckets, shards]` rows."""
    buckets, runs, shard_of = [], [], {}
    for number, (row, batch) in enumerate(zip(held, batches, strict=True), 1):
        shard = np.flatnonzero(row)
        name = f"train/{64 * number}x64"
        buckets.append(PlanBucket(name=name, num_rows=int(row.sum()), global_batch=batch))
        runs.append(ShardRuns(shard=shard, repeat=np.zeros_like(shard), num_rows=row[shard]))
        shard_of[name] = np.repeat(shard, row[shard])
    options: dict[str, Any] = {"seed": 5, "remainder": Remainder.CARRY, **more}
    plan = Plan(
        buckets=tuple(buckets),
        source="s",
        window=window,
        lanes=lanes,
        runs=tuple(runs),
        **options,
    )
    return Made(plan, shard_of)


def interleaved(num_shards: int, rows: int, shares: Sequence[float], seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).multinomial(rows, shares, size=num_shards).T.astype(np.int64)


@given(
    lanes=st.sampled_from([1, 2, 4, 6]),
    per_lane=st.integers(1, 5),
    shards=st.integers(1, 40),
    remainder=st.sampled_from(Remainder),
    seed=st.integers(0, 1 << 40),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_any_machines_that_divide_the_lanes_read_the_same_steps_and_only_their_lanes(
    lanes: int, per_lane: int, shards: int, remainder: Remainder, seed: int, data: st.DataObject
) -> None:
    held = np.random.default_rng(seed).integers(1, 30, (2, shards))
    window = data.draw(st.sampled_from([3, 16]))  # a cache may allow fewer rows than an option does
    made = make(held, [lanes * per_lane, lanes * 2 * per_lane], lanes, window, remainder=remainder, seed=seed)
    plan, machines = made.plan, data.draw(st.sampled_from([m for m in range(1, lanes + 1) if lanes % m == 0]))
    first = data.draw(st.sampled_from([0, 10**6]))
    owners: dict[tuple[int, str, int], int] = {}  # machine by (pass, bucket, row)
    for step in range(first, first + 30) if plan.has_steps else ():
        whole = plan.at(step)
        parts = [plan.draw([(step, machine)], machines)[0] for machine in range(machines)]
        assert np.concatenate([part.rows for part in parts]).tolist() == whole.rows.tolist()
        by_lane = [plan.draw([(step, lane)], lanes)[0].rows for lane in range(lanes)]
        each = lanes // machines
        for machine, part in enumerate(parts):
            assert part.rows.tolist() == np.concatenate(by_lane[machine * each : (machine + 1) * each]).tolist()
        bucket = next(at for at, one in enumerate(plan.buckets) if one.name == whole.bucket)
        n, size = plan.buckets[bucket].num_rows, plan.buckets[bucket].global_batch
        if remainder is Remainder.CARRY or n < size:
            continue
        for lane, rows in enumerate(by_lane):  # padding too is of the lane's own rows
            number = plan._place([step])[step][2] // plan.epoch_steps.per_pass[bucket]
            _, firsts, counts = plan.lane_order.owned(bucket, number, lane)
            own = {row for at, count in zip(firsts.tolist(), counts.tolist(), strict=True) for row in range(at, at + count)}
            assert set(rows.tolist()) <= own
            for row in rows.tolist():
                assert owners.setdefault((number, whole.bucket, row), lane) == lane


@given(
    lanes=st.integers(1, 7),
    shards=st.integers(1, 60),
    number=st.one_of(st.integers(0, 5), st.integers(0, 1 << 40)),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=100, deadline=None)
def test_the_lanes_of_a_pass_share_out_every_row_and_only_shards_at_cuts_twice(
    lanes: int, shards: int, number: int, seed: int
) -> None:
    held = np.random.default_rng(seed).integers(1, 50, (1, shards))
    order = make(held, [3 * lanes], lanes, 16).plan.lane_order
    owned = [order.owned(0, number, lane) for lane in range(lanes)]
    rows = [row for _, firsts, counts in owned for a, c in zip(firsts, counts, strict=True) for row in range(a, a + c)]
    assert sorted(rows) == list(range(held.sum()))
    units = np.concatenate([unit for unit, _, _ in owned])
    assert len(units) - len(np.unique(units)) <= lanes - 1
    for lane, (_, _, counts) in enumerate(owned):
        assert abs(int(counts.sum()) - held.sum() / lanes) < 3 * lanes, lane


def test_a_lane_keeps_its_shards_from_pass_to_pass_and_visits_them_in_a_new_order() -> None:
    made = make(interleaved(64, 500, [0.7, 0.2, 0.1]), [64, 32, 16], 8, 256)
    order = made.plan.lane_order
    for lane in range(8):
        passes = []
        for number in range(4):
            visited = order.lane_pass(number, lane).runs(0)
            passes.append([int(made.shard_of["train/64x64"][row]) for row in visited.first_row])
        kept = [len(set(one) & set(other)) / len(set(other)) for one, other in itertools.pairwise(passes)]
        assert min(kept) >= 0.88  # one of nine at most comes new, at a cut
        assert len({tuple(one) for one in passes}) == 4
        for bucket in range(1, 3):  # every bucket is cut at about the same shards
            units, own = order.owned(bucket, 0, lane)[0], order.owned(0, 0, lane)[0]
            assert len(set(units.tolist()) ^ set(own.tolist())) <= 2


def test_few_shards_are_open_at_a_time_and_each_is_read_from_some_place_on_and_around() -> None:
    lanes, window = 4, 256
    made = make(interleaved(128, 400, [0.6, 0.3, 0.1]), [32, 32, 32], lanes, window)
    plan = made.plan
    end = plan.steps_before(1)
    for lane in range(lanes):
        seen: dict[int, list[int]] = {}  # steps at which a shard is read
        places: dict[tuple[str, int], list[int]] = {}
        for step in range(end):
            _, bucket, rows, shards = made.shards(step, lane, lanes)
            for row, shard in zip(rows.tolist(), shards.tolist(), strict=True):
                seen.setdefault(shard, []).append(step)
                places.setdefault((bucket, shard), []).append(row)
        counts = np.zeros(end, dtype=int)
        for steps in seen.values():
            counts[min(steps) : max(steps) + 1] += 1
        assert counts.max() <= 2 * SHARDS_AT_ONCE + 2  # two groups where one ends and the next begins
        assert counts.mean() < 1.5 * SHARDS_AT_ONCE
        part = window / SHARDS_AT_ONCE
        for (bucket, _), read in places.items():
            order = np.argsort(np.argsort(read))
            begins = np.arange(len(read))[:, None]  # the place is not known: it is the one by which rows are least apart
            apart = (order - np.arange(len(read)) - begins) % len(read)
            drift = np.minimum(apart, len(read) - apart).max(axis=1).min()
            assert drift <= 2 * part * (0.6 if bucket == "train/64x64" else 0.3) + 2


def test_a_window_has_about_the_rows_asked_for_over_all_buckets() -> None:
    made = make(interleaved(64, 1000, [0.5, 0.4, 0.1]), [16, 16, 16], 2, 512)
    order = made.plan.lane_order
    one = order.lane_pass(0, 1)
    assert one.num_groups == 32 // SHARDS_AT_ONCE
    for group, windows in enumerate(one.num_windows.tolist()):
        rows = sum(int(np.diff(one.runs(bucket).row_ends, prepend=0)[group]) for bucket in range(3) if group < one.num_groups)
        assert 0.9 * 512 <= rows / windows <= 512


@pytest.mark.parametrize("shards", [1, 3, 8])
def test_few_or_tiny_shards_are_mixed_as_far_as_they_can_be(shards: int) -> None:
    made = make(interleaved(shards, 4096 // shards, [1.0]), [8], 4, 64)
    rows = np.concatenate([made.plan.at(step).rows for step in range(made.plan.steps_before(1))])
    assert len(set(rows.tolist())) == len(rows) == 4096 // shards * shards // 8 * 8
    assert (np.abs(np.diff(rows)) == 1).mean() < 0.05
    tiny = make(interleaved(600, 2, [1.0]), [8], 2, 128).plan.lane_order.lane_pass(0, 0)
    assert tiny.num_groups <= 600 // 128  # so many shards at once that a window is full


def test_passes_seeds_and_buckets_have_orders_of_their_own_and_a_fresh_plan_agrees() -> None:
    made = make(interleaved(20, 40, [0.5, 0.5]), [4, 4], 2, 64)
    passes = {made.plan.batch(bucket, number)[0].tobytes() for bucket in made.plan.buckets for number in (0, 50, 100, 10**9)}
    assert len(passes) == 8
    other = replace(made.plan, seed=6)
    assert other.at(0).rows.tolist() != made.plan.at(0).rows.tolist()
    for step in (10**9, 3, 0):
        assert replace(made.plan).at(step).rows.tolist() == made.plan.at(step).rows.tolist()


def test_planning_is_counted_in_shards_of_the_lane_and_not_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(parts: Sequence[tuple[NDArray[np.int64], int, int]]) -> NDArray[np.int64]:
        asked.extend(len(index) for index, _, _ in parts)
        return permute_all(parts)

    monkeypatch.setattr(lanes_module, "permute_all", counted)
    made = ShardRuns(shard=np.arange(10**4), repeat=np.zeros(10**4, dtype=np.int64), num_rows=np.full(10**4, 10**5))
    buckets = (PlanBucket(name="train/64x64", num_rows=10**9, global_batch=256),)
    options: dict[str, Any] = {"seed": 0, "remainder": Remainder.CARRY, "source": "s", "window": 4096}
    plan = Plan(buckets=buckets, lanes=8, runs=(made,), **options)
    plan.draw([(1234, 3)], 8)
    assert sum(asked) == 32
    assert len(plan.lane_order.lane_pass(0, 3).runs(0).num_rows) <= 1251


def test_lanes_that_do_not_divide_a_batch_are_refused_with_what_fits() -> None:
    with pytest.raises(PlanError, match=r"train/128x64 has a global batch of 6, which 4 lanes .* or use 2 lanes"):
        make(interleaved(3, 9, [0.5, 0.5]), [8, 6], 4, 64)
    with pytest.raises(PlanError, match="not those of the buckets"):
        Plan(
            seed=0,
            remainder=Remainder.CARRY,
            buckets=(PlanBucket(name="train/64x64", num_rows=3, global_batch=1),),
            source="s",
            window=4096,
        )


@pytest.mark.parametrize(
    ("world", "local", "lanes"),
    [(1, None, 1), (16, "8", 2), (16, None, 16), (6, "4", 6), (8, "8", 1), (4, "0", 4)],
)
def test_lanes_are_the_machines_unless_they_are_given(
    world: int, local: str | None, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert machines_of(world) == lanes


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Store]:
    """Two stores, of three shards and one."""
    folder = tmp_path_factory.mktemp("lanes")
    one = samples_of({"train/64x64": 40, "train/96x64": 20}, "a/")
    two = samples_of({"train/64x64": 9}, "b/")
    return [make_store(folder / "a.store", one[:20], one[20:45], one[45:]), make_store(folder / "b.store", two)]


def test_a_repeated_store_comes_as_repeated_shards_that_stay_in_a_lane(stores: list[Store]) -> None:
    joined = join([WeightedStore(store=stores[0], repeats=2), WeightedStore(store=stores[1], repeats=3)])
    shard, repeat, num_rows = joined.bucket("train/64x64").runs()
    located = joined.bucket("train/64x64").locate(np.arange(joined.bucket("train/64x64").num_rows))
    assert np.repeat(shard, num_rows).tolist() == located.shard.tolist()
    held = {number for number in shard.tolist() if number < 3}
    expected = [(number, times) for number in held for times in range(2)] + [(3, times) for times in range(3)]
    assert sorted(zip(shard.tolist(), repeat.tolist(), strict=True)) == sorted(expected)
    plan = make_plan(joined, LoaderConfig(batch_size=4, window=4096, lanes=2))
    units = [plan.lane_order.owned(0, 0, lane)[0].tolist() for lane in range(2)]
    assert len(units[0]) + len(units[1]) <= len(shard) + 1


def test_a_run_resumes_on_other_machines_with_the_lanes_of_its_state(stores: list[Store]) -> None:
    def delivered(
        world: int, state: dict[str, object] | None, steps: int, **lanes: Any
    ) -> tuple[list[bytes], dict[str, object]]:
        rows: list[list[bytes]] = [[] for _ in range(steps)]
        after: dict[str, object] = {}
        for rank in range(world):
            config = LoaderConfig(batch_size=8 // world, window=4096, seed=3, **lanes)
            with Loader(stores[0], config, rank=rank, world_size=world) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                for step, batch in zip(range(steps), loader, strict=False):
                    rows[step] += [bytes(row.tolist()) for row in batch.ids]
                after = loader.state_dict()
        return [b"".join(step) for step in rows], after

    through, _ = delivered(4, None, 12)
    first, state = delivered(4, None, 5)
    assert state["settings"]["lanes"] == 4  # type: ignore[index]
    for world in (1, 2, 4, 8):
        assert first + delivered(world, state, 7)[0] == through
    assert first + delivered(2, state, 7, lanes=4)[0] == through
    with pytest.raises(
        StateError, match="the loader's lanes was 4 when its state was saved and is 2 now; give the saved number"
    ):
        delivered(2, state, 1, lanes=2)


def test_a_state_of_another_order_has_no_lanes(stores: list[Store], tmp_path: Path) -> None:
    for window in (None, 0):
        with Loader(stores[0], LoaderConfig(batch_size=2, window=window)) as loader:
            assert "lanes" not in loader.state_dict()["settings"]  # type: ignore[operator]
            assert loader.config.lanes is None
