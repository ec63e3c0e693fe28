"""Windows: lanes keep whole shards, machines take whole lanes, and few shards are open at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bucketline.command_line import machines_of
from bucketline.errors import PlanError, StateError, UsageError
from bucketline.loader import Loader, LoaderConfig, Remainder, WeightedStore
from bucketline.loader.config import SHARDS_AT_ONCE
from bucketline.loader.mixture import join, rows_per_pass
from bucketline.loader.plan import epoch_steps as lanes_module
from bucketline.loader.plan.epoch_steps import ShardRuns
from bucketline.loader.plan.order import Purpose, keys_of_rows, mix, normal, permute_all, uniform, uniform_on_host
from bucketline.loader.plan.plan import PassRows, Plan, PlanBucket, make_plan
from bucketline.store import Store
from bucketline.store.format.block import sample_digest
from bucketline.store.read.store import StoreRows
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


# A share of a store's rows in every pass: others each time until all have come, as a function that has an inverse.


FIRST, SECOND = {"train/64x64": 11, "train/96x64": 4}, {"train/64x64": 6}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("shares")
    make_store(folder / "a.store", samples_of(FIRST, "a/"))
    make_store(folder / "b.store", samples_of(SECOND, "b/"))
    return folder / "a.store", folder / "b.store"


@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 3)), min_size=1, max_size=3),
    is_mixed=st.booleans(),
    key=st.integers(0, 1 << 63),
)
def test_every_row_comes_once_before_any_comes_twice(*, sizes: list[tuple[int, float]], is_mixed: bool, key: int) -> None:
    starts = np.cumsum([0, *(n for n, _ in sizes)]).tolist()
    parts = [
        StoreRows(first=first, num_rows=n, per_pass=rows_per_pass(n, share))
        for first, (n, share) in zip(starts, sizes, strict=False)
    ]
    shares, total = PassRows(parts, key, is_mixed=is_mixed), sum(part.per_pass for part in parts)
    passes = [shares.rows(np.arange(total), number) for number in range(8)]
    for part in parts:
        own = np.concatenate([rows[(rows >= part.first) & (rows < part.first + part.num_rows)] for rows in passes])
        assert len(own) == 8 * part.per_pass
        for begin in range(0, len(own) - part.num_rows + 1, part.num_rows):
            assert sorted(own[begin : begin + part.num_rows] - part.first) == list(range(part.num_rows))


def ids_by_epoch(loader: Loader, num_batches: int) -> list[tuple[int, bytes]]:
    found = []
    for _, batch in zip(range(num_batches), loader, strict=False):
        found += [(batch.epoch, bytes(digest)) for digest in batch.ids.tolist()]
    return found


def test_two_epochs_of_a_half_read_every_sample_once_and_a_state_resumes(paths: tuple[Path, Path]) -> None:
    config = LoaderConfig(batch_size=2, epochs=2, remainder=Remainder.PARTIAL)
    digests = {sample_digest(sample.id) for sample in samples_of(SECOND, "b/")}
    with Loader(WeightedStore(paths[1], 0.5), config) as loader:
        plan = loader.plan
        steps = [plan.at(step) for step in range(plan.steps_before(2))]
        rows = [int(row) for step in steps for row, weight in zip(step.rows, step.weight, strict=True) if weight]
        assert sorted(rows) == list(range(len(digests)))
    config = LoaderConfig(batch_size=3, seed=2)
    shares: Any = [WeightedStore(paths[0], 0.5), paths[1]]
    with Loader(shares, config) as loader:
        all_of_it = ids_by_epoch(loader, 9)
    with Loader(shares, config) as first:
        begun = ids_by_epoch(first, 4)
        state = first.state_dict()
    with Loader(shares, config) as second:
        second.load_state_dict(state)
        rest = ids_by_epoch(second, len(all_of_it) // 3 - len(begun) // 3)
    assert begun + rest == all_of_it


@pytest.mark.parametrize("window", [None, 16, 0])
@pytest.mark.parametrize("times", [0.3, 0.5, 1.7, 2.5])
def test_shares_are_read_in_any_order_on_any_number_of_machines(
    paths: tuple[Path, Path], window: int | None, times: float
) -> None:
    shares: Any = [WeightedStore(paths[0], times), WeightedStore(paths[1], 2)]
    config = LoaderConfig(batch_size=1, seed=4, window=window, lanes=2 if window else None)
    with Loader(shares, config, world_size=2) as loader:
        plan = loader.plan
        assert [sum(own.num_rows) for own in plan.runs] == ([own.num_rows for own in plan.buckets] if window else [])
        drawn = plan.draw([(step, 0) for step in range(plan.steps_before(10))])
        for bucket, n in (("train/64x64", 11), ("train/96x64", 4)):
            rows = np.concatenate([one.rows for one in drawn if one.bucket == bucket])
            counts = np.bincount(rows[rows < n * (1 if times < 1 or times % 1 else times)], minlength=n)
            assert counts.max() - counts.min() <= 1 + 1, "all come before any comes again, up to a pass that is cut"
            assert counts.sum() == pytest.approx(10 * rows_per_pass(n, times), abs=4)


@pytest.mark.parametrize("repeats", [0, -0.5, float("nan"), float("inf"), "2", True, None])
def test_what_is_not_a_number_above_0_is_refused(paths: tuple[Path, Path], repeats: Any) -> None:
    for store in (paths[0], Store.open(paths[0])):
        with pytest.raises(UsageError, match=r"a\.store has .* repeats, expected a number above 0: 3 to read .* 0\.5 to read"):
            WeightedStore(store, repeats)


# Draws depend only on their key, are the same on host and device, and have the distribution that they say.


def keys_of_step(seed: int, step: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return keys_of_rows(seed, np.full(len(positions), step), positions)


KEYS = torch.from_numpy(keys_of_step(7, 11, np.arange(20_000)))


@given(words=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=50), purpose=st.sampled_from(Purpose))
def test_host_and_device_draw_the_same_number(words: list[int], purpose: Purpose) -> None:
    keys = np.array(words, dtype=np.int64)
    assert np.array_equal(uniform_on_host(keys, purpose), uniform(torch.from_numpy(keys), purpose).numpy())


@pytest.mark.parametrize("purpose", Purpose)
def test_uniform_numbers_are_even_over_their_range(purpose: Purpose) -> None:
    values = uniform(KEYS, purpose).numpy()
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, 50, (0, 1))[0]
    assert abs(((counts - 400) ** 2 / 400).sum() - 49) < 5 * np.sqrt(98)
    pairs = np.histogram2d(values[:-1], values[1:], 10, [[0, 1], [0, 1]])[0]
    assert abs(((pairs - pairs.sum() / 100) ** 2 / (pairs.sum() / 100)).sum() - 99) < 5 * np.sqrt(198)


def test_normal_numbers_have_a_normals_moments_and_tails() -> None:
    values = normal(KEYS[:500], Purpose.NOISE, (4, 32, 32)).double().flatten()
    num = len(values)
    assert num == 500 * 4096
    assert abs(values.mean()) < 5 / num**0.5
    assert abs(values.var() - 1) < 5 * (2 / num) ** 0.5
    assert abs((values**3).mean()) < 5 * (15 / num) ** 0.5
    assert abs((values**4).mean() - 3) < 5 * (96 / num) ** 0.5
    assert 4.5 < values.abs().max() < 7
    assert abs((values > 1.959964).double().mean() - 0.025) < 0.0006
    assert abs((values < -1.959964).double().mean() - 0.025) < 0.0006


def test_the_two_numbers_of_a_pair_and_of_neighbouring_rows_are_independent() -> None:
    values = normal(KEYS[:4000], Purpose.NOISE, (64,)).double()
    for one, other in ((values[:, 0::2], values[:, 1::2]), (values[:-1], values[1:]), (values[:, :-1], values[:, 1:])):
        assert abs((one * other).mean()) < 5 / one.numel() ** 0.5
        assert abs((one**2 * other**2).mean() - 1) < 5 * (8 / one.numel()) ** 0.5


@pytest.mark.parametrize("shape", [(), (1,), (3,), (4, 5, 7), (2, 8, 8)])
def test_a_row_is_the_same_whatever_batch_it_stands_in(shape: tuple[int, ...]) -> None:
    whole = normal(KEYS[:16], Purpose.NOISE, shape)
    assert whole.shape == (16, *shape)
    assert whole.dtype is torch.float32
    assert bool(torch.isfinite(whole).all())
    for rows in ([3], [5, 3], list(range(15, -1, -1)), [7] * 4):
        assert torch.equal(normal(KEYS[rows], Purpose.NOISE, shape), whole[rows])
        assert torch.equal(uniform(KEYS[rows], Purpose.FLIP), uniform(KEYS[:16], Purpose.FLIP)[rows])


def test_a_longer_row_begins_as_a_shorter_one_does() -> None:
    assert torch.equal(normal(KEYS[:3], Purpose.NOISE, (10,))[:, :7], normal(KEYS[:3], Purpose.NOISE, (7,)))


def test_purposes_draw_independently() -> None:
    drawn = torch.stack([uniform(KEYS, purpose) for purpose in Purpose])
    assert float((torch.corrcoef(drawn) - torch.eye(len(Purpose))).abs().max()) < 5 / len(KEYS) ** 0.5


@given(seed=st.integers(0, (1 << 63) - 1), step=st.integers(0, 1 << 50))
def test_keys_of_a_step_are_apart_and_follow_from_seed_step_and_position(seed: int, step: int) -> None:
    keys = keys_of_step(seed, step, np.arange(64))
    assert len(np.unique(keys)) == 64
    assert np.array_equal(keys_of_step(seed, step, np.array([5, 63])), keys[[5, 63]])
    assert not np.isin(keys_of_step(seed, step + 1, np.arange(64)), keys).any()
    assert not np.isin(keys_of_step(seed ^ 1, step, np.arange(64)), keys).any()


@given(
    seed=st.integers(0, (1 << 63) - 1),
    steps=st.lists(st.tuples(st.integers(0, 1 << 50), st.integers(1, 5)), min_size=1, max_size=6, unique_by=lambda s: s[0]),
    first=st.integers(0, 1 << 30),
)
def test_keys_of_rows_of_many_steps_are_those_of_each_step_alone(seed: int, steps: list[tuple[int, int]], first: int) -> None:
    of_step = np.repeat([step for step, _ in steps], [count for _, count in steps]).astype(np.int64)
    positions = np.concatenate([np.arange(first, first + count) for _, count in steps])
    alone = [key for step, count in steps for key in keys_of_step(seed, step, np.arange(first, first + count)).tolist()]
    assert keys_of_rows(seed, of_step, positions).tolist() == alone


def test_extreme_words_give_finite_normals() -> None:
    """A word of all ones or of none is where a logarithm or a rounded half could go wrong."""
    words = np.array([0, (1 << 64) - 1, 0xFFFFFFFF, 0xFFFFFFFF00000000, 1 << 63], dtype=np.uint64)
    assert len(np.unique(mix(words))) == 5
    values = normal(torch.from_numpy(words.view(np.int64)), Purpose.NOISE, (4096,))
    assert bool(torch.isfinite(values).all())


def test_the_draws_of_a_given_key_never_change() -> None:
    """Literals: a run of last year continues with the same noise today."""
    keys = torch.from_numpy(keys_of_step(1, 2, np.arange(3)))
    assert keys.tolist() == KEYS_LITERAL
    assert uniform(keys, Purpose.TIMESTEP).tolist() == UNIFORM_LITERAL
    torch.testing.assert_close(normal(keys, Purpose.NOISE, (2,)), torch.tensor(NORMAL_LITERAL), rtol=1e-6, atol=1e-7)


KEYS_LITERAL = [4223570037136168277, -2595853454741170741, -3904406321379266172]
UNIFORM_LITERAL = [0.8293100920204539, 0.2260693725794768, 0.39639393782708576]
NORMAL_LITERAL = [
    [-1.5272324085235596, -1.1741681098937988],
    [-0.5565486550331116, 0.37026628851890564],
    [0.5010904669761658, -0.097856305539608],
]
