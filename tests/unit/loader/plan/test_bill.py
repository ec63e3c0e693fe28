"""The bill before a run: the lines that rows are in, and what caches of a size fetch of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bucketline.errors import PlanError, UsageError
from bucketline.loader import LoaderConfig, WeightedStore
from bucketline.loader.mixture import join
from bucketline.loader.plan import bill as bill_module
from bucketline.loader.plan import cache_needs
from bucketline.loader.plan.bill import Bill, make_bill, store_lines
from bucketline.loader.plan.make_plan import make_plan
from bucketline.loader.plan.plan import Plan
from bucketline.loader.plan.rates import Prices, Rates, parse_rates
from bucketline.store import Store, add_column
from bucketline.store.format.block import CAPTIONS
from bucketline.store.read.store import OpenShards
from tests.added_columns import mask_of
from tests.commands import call
from tests.kit import make_store, samples_of

LINE = 4096  # bytes: a line has 16 rows here, as many as 8 MiB have of large latents with text
SEED = 3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store of six shards of some 20 lines each, with a bucket that is rare, and one of the other split."""
    samples = samples_of({"train/64x64": 450, "train/96x64": 200, "train/64x128": 30, "val/64x64": 16}, "a/")
    samples = [samples[n] for n in np.random.default_rng(0).permutation(len(samples))]
    return make_store(tmp_path_factory.mktemp("bill") / "a.store", *[samples[n : n + 116] for n in range(0, len(samples), 116)])


def plan_of(store: OpenShards, lanes: int, window: int = 64, **more: Any) -> Plan:
    config = LoaderConfig(batch_size=16 // lanes, window=window, lanes=lanes, seed=SEED, **more)
    return make_plan(store, config, world_size=lanes)


def lines_of_rows(store: OpenShards, plan: Plan, roles: tuple[str, ...] = ()) -> set[tuple[int, int]]:
    """Return the lines, as (file, number), that the rows of an epoch and their captions need, from the stored bytes."""
    lines = set[tuple[int, int]]()

    def add(files: NDArray[np.int64], offsets: NDArray[np.int64], num_bytes: Any) -> None:
        for file, offset, length in zip(files.tolist(), offsets, np.broadcast_to(num_bytes, offsets.shape), strict=True):
            lines.update((file, line) for line in range(offset // LINE, -(-(offset + length) // LINE)))

    for step in range(plan.steps_before(1)):
        part = plan.at(step)
        bucket = store.bucket(part.bucket)
        located = bucket.locate(part.rows, roles)
        for column in bucket.spec.columns:
            add(located.shard, located.offsets(bucket.spec, column.name), column.row_bytes)
        for name, own in located.added.items():
            assert own.spec is not None
            add(own.shard, own.offsets(own.spec, name), own.spec.column(name).row_bytes)
        captions = bucket.read(part.rows, CAPTIONS)
        text = store.locate_captions(located.shard, np.maximum(captions[:, 0], 0).astype(np.int64))
        add(text.shard, text.starts_offsets(), 16)
    return lines


@pytest.fixture(autouse=True)
def small_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bill_module, "LINE_BYTES", LINE)


@pytest.mark.parametrize("lanes", [1, 4])
def test_the_lines_of_a_store_are_those_that_its_rows_and_captions_need(store: Store, lanes: int) -> None:
    plan = plan_of(store, lanes)
    exact, found = lines_of_rows(store, plan), store_lines(store, plan, "train")
    assert found.num_lines == pytest.approx(len(exact), rel=0.02)
    assert found.num_bytes == pytest.approx(len(exact) * LINE, rel=0.02)
    assert found.bytes_at_cut == 4 * LINE  # three buckets and their captions
    assert found.bytes_again == len(store.shards) * 4 * LINE


def test_the_lines_of_an_added_column_are_among_them_if_it_is_read(tmp_path: Path) -> None:
    shards = [samples_of({"train/64x64": 60, "train/64x96": 31}, f"{n}/") for n in range(3)]
    place = make_store(tmp_path / "s", *shards).path
    add_column(place, "mask", mask_of)
    store = Store.open(place)
    plan = plan_of(store, 1)
    without, found = (store_lines(store, plan, "train", roles=roles) for roles in ((), ("mask",)))
    exact = [len(lines_of_rows(store, plan, roles)) for roles in ((), ("mask",))]
    more = found.num_lines - without.num_lines  # of whole files, which have 28 KiB of other pages
    assert exact[1] - exact[0] <= more <= exact[1] - exact[0] + 8 * len(store.shards)
    with pytest.raises(UsageError, match="has no ragged group 'second'"):
        store_lines(store, plan, "train", ragged=("second",))


def bill_of(store: OpenShards, plan: Plan, cache: float, ring: float = 0.1, **more: Any) -> Bill:
    """Return a bill; `cache` and `ring`: of each machine, in shares of what the store's rows are in."""
    lines = store_lines(store, plan, "train")
    given: dict[str, Any] = {"machines": plan.lanes, "epochs": 3, "cache_bytes": int(cache * lines.num_bytes), **more}
    return make_bill(lines, plan, ring_bytes=int(ring * lines.num_bytes), **given)


def test_every_line_is_fetched_once_an_epoch_and_once_for_all_where_the_caches_hold_the_store(store: Store) -> None:
    first, second, third = bill_of(store, plan_of(store, 4), 0.5).epochs
    assert 1.0 <= first.times_store < 1.25  # lines at the cuts are fetched by two machines, of a few dozen here
    assert second.times_store == third.times_store == 0.0
    assert second.cache_bytes == first.store_bytes
    assert first.gets == pytest.approx(first.store_bytes / LINE, rel=0.02)


def test_a_part_of_the_lines_is_fetched_again_by_what_the_cache_keeps(store: Store) -> None:
    first, second, third = bill_of(store, plan_of(store, 1), 0.5, ring=0.1).epochs
    again = store_lines(store, plan_of(store, 1), "train").bytes_again * 0.6
    assert second.cache_bytes / (first.store_bytes - again) == pytest.approx(0.4, rel=1e-4)
    assert first.store_bytes - second.store_bytes == pytest.approx(second.cache_bytes, abs=1)
    assert third.store_bytes == second.store_bytes
    assert bill_of(store, plan_of(store, 1), 0.05).epochs[1].cache_bytes == 0  # less than its ring


def test_machines_do_not_read_more_than_all_lines_of_a_store_of_a_few(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bill_module, "LINE_BYTES", 1 << 23)  # a line of each shard
    plan = plan_of(store, 4)
    lines = store_lines(store, plan, "train")
    assert lines.num_lines == len(store.shards)
    assert lines.bytes_at_cut == lines.num_bytes // len(store.shards)
    assert 1.0 < bill_of(store, plan, 2.0).epochs[0].times_store < 2.0  # a shard at each of three cuts is fetched twice


def test_costs_are_those_of_the_prices(store: Store) -> None:
    first = bill_of(store, plan_of(store, 2), 0.5, prices=Prices(per_1000_gets=0.4, per_gb_out=90.0)).epochs[0]
    assert first.cost == pytest.approx(first.gets * 0.0004 + first.store_bytes * 90e-9)


def test_a_slow_link_waits_a_fast_one_does_not_and_a_larger_cache_helps(store: Store) -> None:
    plan = plan_of(store, 2)
    each = store_lines(store, plan, "train").num_bytes / 2 / plan.steps_before(1)  # bytes that a machine needs in a step

    def waits(rate: float, cache: float) -> list[bool | None]:
        return [epoch.waits for epoch in bill_of(store, plan, cache, step_bytes=rate * each).epochs]

    assert waits(100.0, 0.3) == [False, False, False]
    assert waits(0.1, 0.3) == [True, True, True]
    assert waits(0.1, 2.0) == [True, False, False]  # the caches hold all lines by then


def test_the_smallest_cache_is_one_that_does_not_wait(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bill_module, "LEAST_BYTES", 0)
    plan = plan_of(store, 2)
    lines = store_lines(store, plan, "train")
    given: dict[str, Any] = {"machines": 2, "epochs": 2, "ring_bytes": 8 * LINE, "kept_bytes": LINE}
    given["step_bytes"] = 0.3 * lines.num_bytes / plan.steps_before(1)
    smallest = make_bill(lines, plan, cache_bytes=10 * LINE, **given).smallest_cache_bytes
    for cache, waits in ((smallest + LINE, False), (smallest - LINE, True)):
        assert make_bill(lines, plan, cache_bytes=cache, **given).epochs[1].waits is waits


def test_a_repeated_store_is_counted_by_what_is_read(store: Store) -> None:
    twice = join([WeightedStore(store=store, repeats=2)])
    once, found = (store_lines(one, plan_of(one, 2), "train") for one in (store, twice))
    assert found.num_bytes == once.num_bytes
    assert found.bytes_again == once.num_bytes + 2 * once.bytes_again


def test_another_order_or_number_of_machines_has_no_bill(store: Store) -> None:
    with pytest.raises(PlanError, match="the plan's window is None"):
        store_lines(store, make_plan(store, LoaderConfig(batch_size=4)), "train")
    with pytest.raises(PlanError, match="3 machines do not divide 4 lanes"):
        bill_of(store, plan_of(store, 4), 0.5, machines=3)


@pytest.mark.parametrize(
    ("bandwidth", "step", "step_bytes"),
    [("10Gbit", 1, 1.25e9), ("100 Mbit/s", 0.5, 6.25e6), ("1.5GB", 2, 3e9), ("2GiB/s", 1, 2.0 * (1 << 30)), ("8bit", 1.0, 1.0)],
)
def test_bandwidths_are_read(bandwidth: str, step: float, step_bytes: float) -> None:
    assert parse_rates(f"step={step}, bandwidth={bandwidth}", "--bill") == Rates(step_bytes=step_bytes)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("10Gbit", "'10Gbit'"),
        ("bandwidth=10Gbit", "bandwidth=10Gbit by itself"),
        *((f"bandwidth={one},step=1", f"bandwidth={one}") for one in ("", "10", "0Gbit", "fast", "10gbit", "-1GB")),
        ("bandwidth=1Gbit,step=0", "step=0"),
        ("requests=0.1", "requests=0.1 by itself"),
        ("requests=0.1;egress=0.2", "requests=0.1;egress=0.2 by itself"),
        ("requests=-1,egress=0.1", "requests=-1"),
        ("requests=0.1,egress=0.2,USD", "'USD'"),
        ("requests=0.1,egress=0.2,egress=1", "'egress=1'"),
        ("prices.toml", "'prices.toml'"),
    ],
)
def test_other_rates_are_refused(text: str, found: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_rates(text, "--bill")
    assert str(refused.value).startswith(f"--bill has {found}, expected bandwidth=10Gbit,step=0.4 (seconds), requests=")


def test_the_command_prints_the_bill(store: Store) -> None:
    asked = (
        "plan",
        store.path,
        "--batch",
        8,
        "--window",
        4096,
        "--world-size",
        "2@2",
        "--cache-bytes",
        "1G",
    )
    priced = ("--bill", "requests=0.0004,egress=0.09")
    timed = ("--bill", "requests=0.0004,egress=0.09,bandwidth=10Gbit,step=0.2")
    bill = call("loader", *asked, *timed, "--json").json["bill"]
    assert (bill["machines"], bill["lanes"], bill["cache_bytes"], len(bill["epochs"])) == (2, 2, 1 << 30, 2)
    assert bill["epochs"][0]["waits"] is False
    shown = call("loader", *asked, *priced, "--epochs", 3).out
    assert "2 machines with 2 lanes together, caches of 1.0 GiB each" in shown
    assert "assumed: requests are for one line of 8 MiB" in shown
    for window, words in (((), "shuffled, since the cache holds the store"), (("--window", 0), "in stored order")):
        other = call("loader", "plan", store.path, "--batch", 8, "--world-size", "1@1", "--cache-bytes", "1G", *window)
        assert other.code == 2
        assert f"a bill is of rows that are mixed in windows, and all are {words}; set --window 4096" in other.err


def test_the_bill_of_a_cache_that_does_not_hold_the_store_is_of_the_window_that_is_chosen_by_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_needs, "LINE_BYTES", LINE)
    size = sum(shard.entry.lmdb.num_bytes for shard in store.shards)
    options = ("--batch", 8, "--world-size", "2@2", "--cache-bytes", size // 2, "--json")
    chosen = call("loader", "plan", store.path, *options).done()
    plan = make_plan(
        store, LoaderConfig(batch_size=8, lanes=2, window=None, cache_bytes="1"), world_size=2, cache_bytes=size // 2
    )
    assert plan.window
    assert chosen.json["plan"] == plan.digest


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--world-size", "2@2"), "--world-size is 2@2 without --cache-bytes, the size of each machine's cache"),
        (("--bill", "bandwidth=1Gbit,step=0.2"), "--bill is bandwidth=1Gbit,step=0.2, and it is of machines"),
        (
            ("--world-size", "3@2", "--cache-bytes", "1G"),
            "--world-size is '3@2', expected 1 rank or more, such as 8, or a multiple",
        ),
        (("--world-size", "2@0", "--cache-bytes", "1G"), "--world-size is '2@0', expected 1 rank or more"),
        (("--world-size", "1@1", "--cache-bytes", "1G", "--bill", "bandwidth=1Gbit"), "--bill has bandwidth=1Gbit by itself"),
        (("--world-size", "1@1", "--cache-bytes", "some"), "--cache-bytes is 'some'"),
        (("--machines", 2), "there is no option --machines; name them after the ranks: --world-size RANKS@MACHINES"),
        (("--prices", "1,1"), "there is no option --prices; say --bill bandwidth=10Gbit,step=0.4,"),
    ],
)
def test_what_does_not_make_a_bill_is_refused(store: Store, options: tuple[Any, ...], words: str) -> None:
    ran = call("loader", "plan", store.path, "--batch", 8, "--window", 4096, *options)
    assert ran.code != 0
    assert words in ran.err
