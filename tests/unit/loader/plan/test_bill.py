"""The bill before a run, compared with machines that read every row and keep their caches line by line."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bucketline.bench.fixtures.synthetic_store import StoreShape
from bucketline.bench.fixtures.synthetic_store import make_store as make_long_store
from bucketline.errors import PlanError, UsageError
from bucketline.loader import LoaderConfig, Remainder, Shuffle, WeightedStore
from bucketline.loader.collate.columns import choose_captions
from bucketline.loader.mixture import join
from bucketline.loader.plan import lanes as lanes_module
from bucketline.loader.plan.bill import (
    MachineCache,
    Prices,
    Speed,
    make_bill,
    parse_bandwidth,
    read_prices,
)
from bucketline.loader.plan.cache_needs import cache_for, num_bytes_of, sidecar_bytes_of, why_not
from bucketline.loader.plan.line_uses import LineUses, groups_read
from bucketline.loader.plan.make_plan import make_plan
from bucketline.loader.plan.rng import keys_of_rows
from bucketline.store import Store, add_column
from bucketline.store.format.block import CAPTIONS
from bucketline.store.format.hashing import LINE_BYTES
from bucketline.store.remote.cache.folder import LEAST_BYTES, ring_share
from tests.added_columns import mask_of
from tests.building import make_store, samples_of
from tests.commands import call

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.loader.plan.plan import Plan
    from bucketline.store.read.store import OpenShards

LINE = 4096  # bytes: a line has 16 rows here, as many as 8 MiB have of large latents with text
SEED = 3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store of six shards of some 20 lines each, with a bucket that is rare, and one of the other split."""
    samples = samples_of({"train/64x64": 450, "train/96x64": 200, "train/64x128": 30, "val/64x64": 16}, "a/")
    samples = [samples[n] for n in np.random.default_rng(0).permutation(len(samples))]
    return make_store(tmp_path_factory.mktemp("bill") / "a.store", *[samples[n : n + 116] for n in range(0, len(samples), 116)])


def plan_of(store: OpenShards, lanes: int, window: int = 64, **more: Any) -> Plan:
    config = LoaderConfig(batch_size=16 // lanes, shuffle=Shuffle.LINES, lanes=lanes, shuffle_window=window, seed=SEED, **more)
    return make_plan(store, config, world_size=lanes)


def lines_by_step(
    store: OpenShards, plan: Plan, first_line: NDArray[np.int64], machine: int, machines: int, epoch: int, line: int = LINE
) -> list[set[int]]:
    """Return the lines that a machine's rows and their captions need, step by step, from the stored bytes."""
    found = []
    for step in range(plan.steps_before(epoch), plan.steps_before(epoch + 1)):
        (part,) = plan.draw([(step, machine)], machines)
        bucket, lines = store.bucket(part.bucket), set[int]()
        located = bucket.locate(part.rows)

        def add(shards: NDArray[np.int64], offsets: NDArray[np.int64], num_bytes: Any, lines: set[int] = lines) -> None:
            for shard, offset, length in zip(shards.tolist(), offsets, np.broadcast_to(num_bytes, offsets.shape), strict=True):
                if length:
                    lines.update(
                        range(first_line[shard] + offset // line, first_line[shard] + (offset + length - 1) // line + 1)
                    )

        for column in bucket.columns:
            add(located.shard, located.offsets(bucket.spec, column.name), column.row_bytes)
        captions = bucket.read(part.rows, CAPTIONS)
        keys = keys_of_rows(SEED, np.full(len(part.rows), step), np.arange(len(part.rows)) + part.first_position)
        chosen = choose_captions((captions >= 0).sum(axis=1), keys)
        row = np.where(chosen >= 0, captions[np.arange(len(chosen)), np.maximum(chosen, 0)], 0).astype(np.int64)
        text = store.locate_captions(located.shard, row)
        add(text.shard, text.starts_offsets(), 16)
        places = zip(text.shard.tolist(), text.starts_offsets().tolist(), strict=True)
        starts = np.array([np.frombuffer(store.shards[shard].read(offset, 16), dtype="<i8") for shard, offset in places])
        for column in store.text.tokens:
            add(text.shard, store.token_offsets(text, column.name, starts[:, 0]), np.diff(starts)[:, 0] * column.row_bytes)
        found.append(lines)
    return found


class SimulatedCache:
    """A cache that pins lines in the order of reading while there is room, and keeps the rest in a ring."""

    def __init__(self, num_bytes: NDArray[np.int64], cache: int, ring: int) -> None:
        self.num_bytes, self.room, self.ring = num_bytes.tolist(), cache - ring, ring
        self.pinned, self.passing = set[int](), OrderedDict[int, None]()
        self.in_ring = 0

    def run(self, steps: list[set[int]]) -> tuple[int, int, int]:
        """Return requests, bytes fetched, and bytes of lines that were there when they were first needed."""
        used, fetched, found = set[int](), list[int](), 0
        for line in (line for lines in steps for line in sorted(lines)):
            if line not in used and (line in self.pinned or line in self.passing):
                found += self.num_bytes[line]
            used.add(line)
            if line in self.pinned:
                continue
            if line in self.passing:
                self.passing.move_to_end(line)
                continue
            fetched.append(self.num_bytes[line])
            if fetched[-1] <= self.room:
                self.pinned.add(line)
                self.room -= fetched[-1]
                continue
            self.passing[line] = None
            self.in_ring += fetched[-1]
            while self.in_ring > self.ring:
                self.in_ring -= self.num_bytes[self.passing.popitem(last=False)[0]]
        return len(fetched), sum(fetched), found


@pytest.mark.parametrize(
    ("lanes", "machines", "remainder"), [(2, 2, "carry"), (4, 2, "drop"), (4, 4, "partial"), (1, 1, "carry")]
)
def test_the_lines_of_each_machine_are_those_that_its_rows_and_captions_need(
    store: Store, lanes: int, machines: int, remainder: str
) -> None:
    plan = plan_of(store, lanes, remainder=Remainder(remainder))
    lines = LineUses(store, plan, "train", machines, line_bytes=LINE)
    for machine in range(machines):
        for epoch in range(2):
            exact = set().union(*lines_by_step(store, plan, lines.first_line, machine, machines, epoch, LINE))
            found = set(lines.of(machine, epoch).line.tolist())
            assert len(exact ^ found) <= 2 + 0.02 * len(exact)  # at a cut, and where captions begin


def test_the_lines_of_an_added_column_are_among_them_if_it_is_read(tmp_path: Path) -> None:
    shards = [samples_of({"train/64x64": 60, "train/64x96": 31}, f"{n}/") for n in range(3)]
    place = make_store(tmp_path / "s", *shards).path
    add_column(place, "mask", mask_of)
    store, line = Store.open(place), 1 << 11
    plan = plan_of(store, 1)
    uses = [
        LineUses(store, plan, "train", 1, groups=groups_read(store, (), roles), line_bytes=line) for roles in ((), ("mask",))
    ]
    first, exact = uses[0].first_line, set[int]()
    for step in range(plan.steps_before(1)):
        (part,) = plan.draw([(step, 0)], 1)
        own = store.bucket(part.bucket).locate(part.rows, ["mask"]).added["mask"]
        assert own.spec is not None
        exact |= set((first[own.shard] + own.offsets(own.spec, "mask") // line).tolist())
    without, found = (set(one.of(0, 0).line.tolist()) for one in uses)
    assert max(without) < first[len(store.shards)] <= min(exact)
    assert exact <= found - without
    assert len(found - without - exact) <= 2 * len(store.shards) * 2  # the ends of blocks, which are read whole


@pytest.fixture(scope="module")
def long_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store of 20 shards of 12 lines, which a lane visits in several groups, so that few of its lines are open at a time."""
    path = tmp_path_factory.mktemp("bill") / "long.store"
    shape = StoreShape(num_shards=20, rows_per_shard=60, latent_shape=(4, 32, 32), tokens=(20, 40), token_width=32)
    with pytest.MonkeyPatch.context() as patch:  # blocks of two rows, as short for their lines as usual ones
        patch.setattr("bucketline.store.format.block.TARGET_BLOCK_BYTES", 1 << 14)
        patch.setattr("bucketline.store.write.shard_writer.TARGET_BLOCK_BYTES", 1 << 14)
        make_long_store(path, shape)
    return Store.open(path)


@pytest.mark.parametrize("machines", [1, 2])
def test_what_machines_fetch_and_keep_is_what_a_run_of_them_does(
    long_store: Store, machines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes_module, "SHARDS_AT_ONCE", 3)
    line_bytes = 1 << 16
    plan = plan_of(long_store, machines, window=32)
    lines = LineUses(long_store, plan, "train", machines, line_bytes=line_bytes)
    total = int(lines.num_bytes.sum()) // machines
    steps = {
        (machine, epoch): lines_by_step(long_store, plan, lines.first_line, machine, machines, epoch, line_bytes)
        for machine in range(machines)
        for epoch in range(3)
    }
    for share in (0.1, 0.2, 0.3, 0.9, 1.1):
        ring = int(0.25 * total)
        sums = np.zeros((2, 3))
        for machine in range(machines):
            reckoned = MachineCache(lines.num_bytes, lines.shard, int(share * total) + ring, ring)
            simulated = SimulatedCache(lines.num_bytes, int(share * total) + ring, ring)
            for epoch in range(3):
                one = reckoned.run(lines.of(machine, epoch), None)
                assert one.ring_bytes <= ring
                sums[0] += one.gets, one.store_bytes, one.cache_bytes
                sums[1] += simulated.run(steps[machine, epoch])
        assert sums[0, :2] == pytest.approx(sums[1, :2], rel=0.03)  # requests, bytes fetched
        assert sums[0, 2] == pytest.approx(sums[1, 2], rel=0.06)  # bytes that were there


def test_every_line_is_fetched_once_an_epoch_and_once_for_all_where_the_caches_hold_the_store(store: Store) -> None:
    plan = plan_of(store, 4)
    lines = LineUses(store, plan, "train", 4, line_bytes=LINE)
    total = int(lines.num_bytes.sum())
    bill = make_bill(lines, plan, machines=4, epochs=3, cache_bytes=2 * total, ring_of=lambda size: size // 2)
    first, second, third = bill.epochs
    assert 1.0 <= first.times_store < 1.25  # lines at the cuts are fetched by two machines, of a few dozen here
    assert second.times_store < 0.1
    assert third.times_store < 0.05
    assert second.cache_bytes > 0.9 * first.store_bytes
    assert not any(epoch.is_least for epoch in bill.epochs)


def test_a_ring_that_is_too_small_is_said_and_the_smallest_cache_is_not(store: Store) -> None:
    plan = plan_of(store, 2)
    lines = LineUses(store, plan, "train", 2, line_bytes=LINE)
    given: dict[str, Any] = {"machines": 2, "epochs": 2, "ring_of": lambda size: size // 8}
    small = make_bill(lines, plan, cache_bytes=10 * LINE, **given)
    assert all(epoch.is_least and epoch.ring_bytes > small.ring_bytes for epoch in small.epochs)
    assert small.smallest_cache_bytes >= LEAST_BYTES


def test_costs_are_those_of_the_prices_and_requests_join_neighbours(store: Store) -> None:
    plan = plan_of(store, 2)
    lines = LineUses(store, plan, "train", 2, line_bytes=LINE)
    prices = Prices(per_1000_gets=0.4, per_gb_out=90.0, currency="EUR")
    given: dict[str, Any] = {"machines": 2, "epochs": 2, "cache_bytes": 1 << 30, "prices": prices}
    bill, joined = make_bill(lines, plan, **given), make_bill(lines, plan, lines_per_get=4, **given)
    first = bill.epochs[0]
    assert first.cost == pytest.approx(first.gets * 0.0004 + first.store_bytes * 90e-9)
    assert first.gets / 4 <= joined.epochs[0].gets < first.gets / 2
    assert joined.epochs[0].store_bytes == first.store_bytes
    assert bill.currency == "EUR"
    assert any("up to 4 neighbouring lines" in line for line in joined.assumed)


def test_a_slow_link_waits_a_fast_one_does_not_and_a_larger_cache_helps(store: Store) -> None:
    plan = plan_of(store, 2)
    lines = LineUses(store, plan, "train", 2, line_bytes=LINE)
    total, steps = int(lines.num_bytes.sum()), plan.steps_before(1)
    needed = total / 2 / (steps * 0.1)  # bytes/s of a machine that fetches its half in an epoch of 0.1 s a step

    def waits(rate: float, cache: int) -> list[int | None]:
        speed = Speed(bytes_per_s=rate * needed, step_s=0.1)
        bill = make_bill(lines, plan, machines=2, epochs=3, cache_bytes=cache, speed=speed, ring_of=lambda size: size // 2)
        return [epoch.waits_at for epoch in bill.epochs]

    assert waits(100.0, 2 * total) == [None, None, None]
    slow = waits(0.1, total // 3)
    assert slow[0] is not None
    assert 1 <= slow[0] < steps
    assert slow[1] is not None
    assert steps <= slow[1] < 2 * steps
    assert waits(0.1, 2 * total)[1:] == [None, None]  # the caches hold all lines by then


def test_a_repeated_store_and_dropped_rows_are_counted_by_what_is_read(store: Store) -> None:
    twice = join([WeightedStore(store=store, repeats=2)])
    plan = plan_of(twice, 2)
    lines = LineUses(twice, plan, "train", 2, line_bytes=LINE)
    exact = set().union(*lines_by_step(twice, plan, lines.first_line, 1, 2, 0))
    found = set(lines.of(1, 0).line.tolist())
    assert len(exact ^ found) <= 0.02 * len(exact)
    assert len(lines.of(1, 0).line) > len(found)  # some lines come again, at a time apart


def test_another_shuffle_or_number_of_machines_has_no_bill(store: Store) -> None:
    with pytest.raises(PlanError, match="the plan's shuffle is full"):
        LineUses(store, make_plan(store, LoaderConfig(batch_size=4)), "train", 1)
    with pytest.raises(PlanError, match="3 machines do not divide 4 lanes"):
        LineUses(store, plan_of(store, 4), "train", 3)


def test_full_is_refused_with_its_factor_unless_the_cache_holds_the_store(store: Store) -> None:
    num_bytes = num_bytes_of(store)
    assert why_not(Shuffle.FULL, store, cache_for(num_bytes + sidecar_bytes_of(store))) is None
    assert why_not(Shuffle.LINES, store, 1) is None
    words = why_not(Shuffle.FULL, store, num_bytes // 2)
    rows = sum(bucket.num_rows for bucket in store.buckets("train"))
    assert words is not None
    assert f"its {rows} rows" in words
    factor = float(words.split(" times the store")[0].rpartition(" ")[2])
    assert factor == pytest.approx(rows * 2 * LINE_BYTES * 0.5 / num_bytes, rel=0.01)
    assert "use shuffle lines (--shuffle lines)" in words
    for size in (1 << 20, 5 << 30, 700 << 30):
        assert cache_for(size) - ring_share(cache_for(size)) >= size
        assert cache_for(size) <= size + 96 * LINE_BYTES


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("10Gbit", 1.25e9), ("100 Mbit/s", 1.25e7), ("1.5GB", 1.5e9), ("2GiB/s", 2.0 * (1 << 30)), ("8bit", 1.0)],
)
def test_bandwidths_are_read(text: str, bytes_per_s: float) -> None:
    assert parse_bandwidth(text, "--bandwidth") == bytes_per_s


@pytest.mark.parametrize("text", ["", "10", "0Gbit", "fast", "10gbit", "-1GB"])
def test_other_bandwidths_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--bandwidth is .*, expected a bandwidth above 0, such as 10Gbit"):
        parse_bandwidth(text, "--bandwidth")


def test_files_of_prices_are_read_and_others_refused(tmp_path: Path) -> None:
    toml, other = tmp_path / "prices.toml", tmp_path / "prices.json"
    toml.write_text('per_1000_gets = 0.0004\nper_gb_out = 0.09\ncurrency = "USD"\n', encoding="utf-8")
    other.write_text(json.dumps({"per_1000_gets": 1.0, "per_gb_out": 0.0, "currency": "EUR"}), encoding="utf-8")
    assert read_prices(toml) == Prices(per_1000_gets=0.0004, per_gb_out=0.09, currency="USD")
    assert read_prices(other).currency == "EUR"
    toml.write_text('per_1000_gets = -1.0\nper_gb_out = 0.09\ncurrency = "USD"\n', encoding="utf-8")
    with pytest.raises(UsageError, match="not a number of 0 or more"):
        read_prices(toml)
    toml.write_text("price = 3", encoding="utf-8")
    with pytest.raises(UsageError, match="expected per_1000_gets, per_gb_out and currency"):
        read_prices(toml)
    with pytest.raises(UsageError, match="cannot read"):
        read_prices(tmp_path / "gone.toml")


def test_the_command_prints_the_bill(store: Store, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text('per_1000_gets = 0.0004\nper_gb_out = 0.09\ncurrency = "USD"\n', encoding="utf-8")
    asked = (
        "plan",
        store.path,
        "--batch-size",
        8,
        "--shuffle",
        "lines",
        "--machines",
        2,
        "--cache-bytes",
        "1G",
        "--prices",
        prices,
    )
    timed = ("--bandwidth", "10Gbit", "--step-seconds", 0.2)
    bill = call("loader", *asked, *timed, "--json").json["bill"]
    assert (bill["machines"], bill["lanes"], bill["cache_bytes"], len(bill["epochs"])) == (2, 2, 1 << 30, 2)
    assert bill["epochs"][0]["waits_at"] is None
    shown = call("loader", *asked, "--epochs", 3).out
    assert "2 machines with 2 lanes together, caches of 1.0 GiB each" in shown
    assert "assumed: requests are for one line of 8 MiB" in shown
    full = call("loader", "plan", store.path, "--batch-size", 8, "--machines", 1, "--cache-bytes", "200KiB")
    assert full.code == 2
    assert "times the store; use shuffle lines" in full.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--machines", 2), "--machines is set without --cache-bytes"),
        (("--machines", 2, "--cache-bytes", "1G", "--bandwidth", "1Gbit"), "set both of --bandwidth and --step-seconds"),
        (("--machines", 2, "--cache-bytes", "1G", "--world-size", 3), "--world-size is 3, expected a multiple of --machines 2"),
        (("--machines", 0, "--cache-bytes", "1G"), "--machines is 0, expected 1 or more"),
        (
            ("--machines", 1, "--cache-bytes", "1G", "--bandwidth", "1Gbit", "--step-seconds", 0),
            "--step-seconds is 0.0, expected a number",
        ),
        (("--machines", 1, "--cache-bytes", "some"), "--cache-bytes is 'some'"),
    ],
)
def test_what_does_not_make_a_bill_is_refused(store: Store, options: tuple[Any, ...], words: str) -> None:
    ran = call("loader", "plan", store.path, "--batch-size", 8, "--shuffle", "lines", *options)
    assert ran.code != 0
    assert words in ran.err
