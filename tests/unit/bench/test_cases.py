"""Each case at a tiny size: what it prints, and that its figures can be true. No figure is held against a clock."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from bucketline.bench import harness
from bucketline.bench.__main__ import FULL, MODULES, QUICK, main
from bucketline.bench.harness import run_case
from bucketline.bench.loader.busy_trainer import BusyTrainer
from bucketline.bench.loader.delivery import Delivery
from bucketline.bench.loader.delivery_columns import DeliveryColumns
from bucketline.bench.loader.first_batch import FirstBatch
from bucketline.bench.loader.network_delivery import NetworkDelivery
from bucketline.bench.loader.plan_cost import PlanCost
from bucketline.bench.loader.quantised_text import QuantisedText
from bucketline.bench.loader.ragged_text import RaggedText
from bucketline.bench.loader.rank_memory import RankMemory
from bucketline.bench.loader.remote_delivery import RemoteDelivery
from bucketline.bench.store.cold_gather import ColdGather
from bucketline.bench.store.hot_gather import HotGather
from bucketline.bench.store.open_cost import OpenCost
from tests.commands import spawn
from tests.unit.bench.measured import measured, read_results

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _torchs_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "WARM_UPS", 0)  # a round for figures that here nobody looks at


def test_hot_gather_has_memcpy_beside_each_number_of_threads(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--num-shards", 3, "--rows-per-shard", 8, "--row-kib", 8, "--batch-size", 4, "--batches", 3, "--together", 2)
    results = measured(HotGather, capsys, *small, "--repeats", 2, "--threads", 1, 2)
    ways = ("gather, bare", "gather, located together", "gather, located one by one", "plain reads", "loader")
    for threads in ("1 thread", "2 threads"):
        assert results[f"memcpy, {threads}"]["limit_ratio"] == 1.0
        for way in (*ways, "torch copy_"):
            assert results[f"{way}, {threads}"]["limit_ratio"] > 0
        for way in ways:
            assert set(results[f"{way}, {threads}"]["ratios"]) == {f"torch copy_, {threads}"}
    assert {name for name, result in results.items() if result["mark"]} == {
        f"{way}, {threads}" for way in ways[:2] for threads in ("1 thread", "2 threads")
    }


def test_ragged_text_is_measured_hot_and_cold(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--num-shards", 3, "--captions-per-shard", 4, "--tokens", 2, 9, "--token-width", 64, "--batch-size", 4)
    results = measured(RaggedText, capsys, *small, "--batches", 2, "--repeats", 1, "--depths", 2, 4, "--threads", 1)
    payload, written = results["hot: gather, payload, 1 thread"], results["hot: gather, written, 1 thread"]
    assert payload["limit_ratio"] > 0
    assert written["mark"] == "at least 0.9"
    assert results["cold: gather, with readahead"]["mark"] == "at least 0.9"
    assert {name for name in results if "O_DIRECT" in name} == {"cold: O_DIRECT, 2 threads", "cold: O_DIRECT, 4 threads"}


def test_quantised_text_is_compared_with_f16_on_disk_hot_and_cold(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--rows", 16, "--num-tokens", 64, "--token-width", 256, "--latent-side", 8, "--batch-size", 4, "--batches", 3)
    results = measured(QuantisedText, capsys, *small, "--repeats", 1)
    for dtype in ("I8", "F8_E4M3"):
        assert 0.4 < results[f"disk: {dtype}"]["ratios"]["disk: F16"] < 0.7
        for form in ("dequantised by the loader", "as stored"):
            for how in ("hot", "cold"):
                assert results[f"{how}: {dtype}, {form}"]["ratios"][f"{how}: F16"] > 0
    assert {result["unit"] for result in results.values()} == {"MiB/sample", "samples/s", "CPU-ms/sample"}


def test_cold_gather_is_held_against_the_best_direct_reads_and_py_lmdb(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--size-mib", 2, "--num-shards", 2, "--row-kib", 32, "--batch-size", 4, "--batches", 6, "--batches-of-get", 6)
    results = measured(ColdGather, capsys, *small, "--repeats", 1, "--depths", 2, 4, "--ahead-mib", 1, "--reading-threads", 2)
    ours = [result for name, result in results.items() if name.startswith(("gather", "plain reads"))]
    assert len(ours) == 3
    for result in ours:
        (block, row) = result["ratios"]
        assert block.startswith("py-lmdb get of its block")
        assert row.startswith("py-lmdb get, one row per value")
        assert result["limit_ratio"] > 0
    assert max(one["limit_ratio"] for name, one in results.items() if name.startswith("O_DIRECT")) == 1.0
    assert sum(name.startswith("py-lmdb") for name in results) == 4


def test_a_store_of_fewer_rows_than_a_batch_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_case(ColdGather, ["--size-mib", "1", "--num-shards", "2"]) == 2
    assert "the store has 8 rows, a batch is 32" in capsys.readouterr().err


def test_open_cost_compares_few_rows_with_many(capsys: pytest.CaptureFixture[str]) -> None:
    results = measured(OpenCost, capsys, "--rows", 40, 4000, "--num-shards", 3, "--shards", 1, 2, "--repeats", 1)
    large = results["open: 4,000 rows, 3 shards"]
    assert (large["mark"], large["unit"]) == ("at most 1.5", "ms")
    assert results["open and locate a row of each shard: 4,000 rows, 3 shards"]["limit_ratio"] > 0
    assert {"open: 1 shard", "open: 2 shards"} <= set(results)
    assert results["private memory to open: 4,000 rows, 3 shards"]["median"] > 0


def test_full_after_a_cases_name_stands_for_the_sizes_of_its_marks() -> None:
    ran = spawn([sys.executable, "-m", "bucketline.bench", "hot_gather", "--full", "--repeats", "0"])
    assert ran.code == 2, "the case has parsed its sizes and then refused this"
    assert "--repeats is 0" in ran.err


def test_plan_cost_compares_a_million_million_rows_with_a_million_and_measures_states(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = measured(PlanCost, capsys, "--windows", 2, "--together", 4, "--batch-size", 3, "--repeats", 1)
    for shuffle in ("full", "blocks", "lines", "none"):
        for how in ("drawn together", "drawn one by one"):
            large = results[f"{shuffle}, {how}: 1,044,536,046,387 rows"]
            assert large["unit"] == "us"
            assert large["mark"] == ("at most 1.5" if shuffle == "full" else None)
    assert 0 < results["memory: 1,044,536,046,387 rows"]["median"] < 16
    for stores in ("1 store", "8 stores"):
        assert results[f"state: {stores}"]["is_met"] is True
        assert results[f"state: {stores}"]["median"] <= 1024


def test_first_batch_compares_a_resume_with_a_run_begun_anew(capsys: pytest.CaptureFixture[str]) -> None:
    results = measured(FirstBatch, capsys, "--rows", 4000, "--num-shards", 3, "--batch-size", 4, "--repeats", 1)
    for part in ("loader", "process"):
        resumed = results[f"{part}: resumed at 90% of an epoch"]
        assert (resumed["mark"], resumed["unit"]) == ("at most 1.1", "ms")
    assert results["process: fresh start"]["median"] > results["loader: fresh start"]["median"]


def test_network_delivery_compares_the_clients_cost_with_that_of_receiving(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--num-shards", 2, "--rows-per-shard", 16, "--row-kib", 8, "--batch-size", 4, "--batches", 8, "--repeats", 1)
    assert run_case(NetworkDelivery, [str(one) for one in (*sizes, "--json")]) == 0
    _, results = read_results(capsys)
    assert [(one["subject"], one["unit"]) for one in results] == [
        ("recv_into", "CPU-s/GB"),
        ("RemoteLoader", "CPU-s/GB"),
        ("recv_into", "GB/s"),
        ("RemoteLoader", "GB/s"),
    ]
    assert results[1]["mark"] == "at most 1.5"
    assert min(one["median"] for one in results) > 0


def test_remote_delivery_compares_with_its_limits(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--num-shards", 3, "--rows-per-shard", 8, "--row-kib", 8, "--batch-size", 4)
    more = ("--first-batch-rows", 100, "--latency-ms", 2, "--repeats", 1)
    assert run_case(RemoteDelivery, [str(one) for one in (*sizes, *more, "--json")]) == 0
    _, results = read_results(capsys)
    by_case = {(one["case"], one["subject"]): one for one in results}
    first = by_case["remote_delivery, first epoch", "loader"]
    assert (first["unit"], first["mark"]) == ("GB/s", "at least 0.9")
    assert by_case["remote_delivery, first epoch, CPU", "loader"]["mark"] == "at most 1.3"
    assert by_case["remote_delivery, in the cache", "loader"]["mark"] == "at least 0.95"
    assert by_case["remote_delivery, first batch", "100 rows"]["median"] >= 2 * 4, "four answers, one after the other"
    assert by_case["remote_delivery, first batch, round trips made", "100 rows"]["median"] >= 4
    assert by_case["remote_delivery, first batch, its bytes at the link's rate", "100 rows"]["median"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", MODULES)
def test_every_case_shows_an_example(case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bucketline.bench", case, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"Example: python -m bucketline.bench.{MODULES[case]}" in " ".join(out.split())
    assert "--stores" in out


def test_the_help_of_all_cases_names_them() -> None:
    ran = spawn([sys.executable, "-m", "bucketline.bench", "--help"])
    assert ran.code == 0, ran.err
    assert [case for case in MODULES if case not in ran.out] == []


def test_every_case_has_a_quick_and_a_full_size() -> None:
    assert set(MODULES) == set(QUICK) == set(FULL)


TINY = ("--num-shards", 3, "--rows-per-shard", 8, "--row-kib", 8, "--batch-size", 4, "--prefetch-mib", 1)


def test_delivery_has_memcpy_beside_the_loader_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    results = measured(Delivery, capsys, *TINY, "--batches", 6, "--repeats", 1, "--threads", 2)
    assert set(results) == {"memcpy, 2 threads", "loader, 2 threads", "service, 2 threads"}
    assert results["service, 2 threads"]["mark"] == "at least 0.85"


def test_a_busy_trainer_is_measured_both_ways_beside_itself_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run_case(BusyTrainer, [*map(str, TINY), "--batches=6", "--paced-batches=2", "--every-ms=1", "--repeats=1", "--json"])
        == 0
    )
    results = json.loads(capsys.readouterr().out)["results"]
    assert {(one["case"], one["subject"]) for one in results} == {
        (f"busy_trainer, {case}", f"{way}, {how}")
        for case, more in (("rate", ("next to a spinning process",)), ("next()", ()))
        for way in ("in the process", "through the service")
        for how in ("quiet", "busy", *more)
    }
    assert [one["mark"] for one in results if one["mark"]] == ["at least 0.8"]


def test_the_memory_of_ranks_is_told_apart_into_the_stores_and_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    results = measured(RankMemory, capsys, *TINY, "--ranks", 2, "--epochs", 40, "--repeats", 1)
    assert set(results) == {
        f"{part}, 2 ranks, {way}" for part in ("store", "buffers and the rest") for way in ("in the process", "the service")
    }


def test_columns_that_are_not_requested_are_held_against_a_store_without_them(capsys: pytest.CaptureFixture[str]) -> None:
    results = measured(DeliveryColumns, capsys, *TINY, "--batches", 4, "--repeats", 1)
    assert set(results) == {"three of 3 columns", "three of 7 columns"}
    assert results["three of 7 columns"]["mark"] == "at least 0.97"


def test_cold_delivery_is_held_against_the_best_direct_reads(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--num-shards", 3, "--rows-per-shard", 16, "--row-kib", 32, "--batch-size", 8, "--batches", 4)
    results = measured(Delivery, capsys, *small, "--repeats", 1, "--threads", 1, "--depths", 2, "--cold")
    assert results["O_DIRECT, 2 threads"]["limit_ratio"] == 1.0
    assert results["loader, cold, threads that fill: 1"]["mark"] == "at least 0.9"


def test_running_all_refuses_a_case_that_there_is_not() -> None:
    ran = spawn([sys.executable, "-m", "bucketline.bench", "--only", "nothing"])
    assert ran.code == 2, ran.err
    assert "--only has nothing; expected names from against_peers" in ran.err
