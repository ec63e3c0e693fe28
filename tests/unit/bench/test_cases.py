"""Each case at a tiny size: what it prints, and that its figures can be true. No figure is held against a clock."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest
import torch

from bucketline.bench import harness
from bucketline.bench.__main__ import CASES, RUNS, main
from bucketline.bench.cases.hot import Hot, HotBusy, HotText
from bucketline.bench.cases.scale import Scale
from bucketline.bench.cases.start import FirstBatch, Start
from bucketline.bench.cases.stream import Stream, StreamService
from bucketline.bench.harness import run_case
from tests.commands import spawn
from tests.unit.bench.measured import measured, read_results

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _torchs_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "WARM_UPS", 0)  # a round for figures that here nobody looks at


def test_quantised_text_is_compared_with_f16_on_disk_and_delivered(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--rows", 16, "--num-tokens", 64, "--token-width", 256, "--latent-side", 8, "--batch-size", 4, "--batches", 3)
    results = measured(HotText, capsys, *small, "--repeats", 1)
    for dtype in ("I8", "F8_E4M3"):
        assert 0.4 < results[f"disk: {dtype}"]["ratios"]["disk: F16"] < 0.7
        for form in ("dequantised by the loader", "as stored"):
            assert results[f"{dtype}, {form}"]["ratios"]["F16"] > 0
    assert {result["unit"] for result in results.values()} == {"MiB/sample", "samples/s", "CPU-ms/sample"}


def test_open_cost_compares_few_rows_with_many(capsys: pytest.CaptureFixture[str]) -> None:
    results = measured(Start, capsys, "--rows", 40, 4000, "--num-shards", 3, "--shards", 1, 2, "--repeats", 1)
    large = results["open: 4,000 rows, 3 shards"]
    assert (large["mark"], large["unit"]) == ("at most 1.5", "ms")
    assert results["open and locate a row of each shard: 4,000 rows, 3 shards"]["limit_ratio"] > 0
    assert {"open: 1 shard", "open: 2 shards"} <= set(results)
    assert results["open: 4,000 rows, 3 shards, memory, private"]["median"] > 0


def test_full_after_a_cases_name_stands_for_the_sizes_of_its_marks() -> None:
    for flags in ([], ["--text"], ["--busy"]):
        spawn([sys.executable, "-m", "bucketline.bench", "hot", *flags, "--full", "--repeats", "0"]).fails(
            "--repeats is 0", code=2
        )


def test_plan_cost_compares_a_million_million_rows_with_a_million(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = measured(Scale, capsys, "--windows", 2, "--together", 4, "--batch-size", 3, "--repeats", 1)
    for window in ("all shuffled", "window 4096", "window 0"):
        for how in ("drawn together", "drawn one by one"):
            large = results[f"{window}, {how}: 1,044,536,046,387 rows"]
            assert large["unit"] == "us"
            assert large["mark"] == ("at most 1.5" if window == "all shuffled" else None)
    assert 0 < results["memory: 1,044,536,046,387 rows"]["median"] < 16


def test_first_batch_compares_a_resume_with_a_run_begun_anew(capsys: pytest.CaptureFixture[str]) -> None:
    results = measured(FirstBatch, capsys, "--rows", 4000, "--num-shards", 3, "--batch-size", 4, "--repeats", 1)
    for part in ("", ", process"):
        resumed = results[f"resumed at 90% of an epoch{part}"]
        assert (resumed["mark"], resumed["unit"]) == ("at most 1.1", "ms")
    assert results["fresh start, process"]["median"] > results["fresh start"]["median"]


def test_network_delivery_compares_the_clients_cost_with_that_of_receiving(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--num-shards", 2, "--rows-per-shard", 16, "--row-kib", 8, "--batch-size", 4, "--batches", 8, "--repeats", 1)
    assert run_case(StreamService, [str(one) for one in (*sizes, "--json")]) == 0
    _, results = read_results(capsys)
    assert [(one["subject"], one["unit"]) for one in results] == [
        ("recv_into", "GB/s"),
        ("Loader over TCP", "GB/s"),
        ("recv_into", "s/GB"),
        ("Loader over TCP", "s/GB"),
    ]
    assert results[3]["mark"] == "at most 1.5"
    assert min(one["median"] for one in results) > 0


def test_remote_delivery_compares_with_its_limits(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--num-shards", 3, "--rows-per-shard", 8, "--row-kib", 8, "--batch-size", 4)
    more = ("--first-batch-rows", 100, "--latency-ms", 2, "--repeats", 1)
    assert run_case(Stream, [str(one) for one in (*sizes, *more, "--json")]) == 0
    _, results = read_results(capsys)
    by_case = {(one["case"], one["subject"]): one for one in results}
    first = by_case["stream, first epoch", "loader"]
    assert (first["unit"], first["mark"]) == ("GB/s", "at least 0.9")
    assert by_case["stream, first epoch, CPU", "loader"]["mark"] == "at most 1.3"
    assert by_case["stream, in the cache", "loader"]["mark"] == "at least 0.95"
    assert by_case["stream, first batch", "100 rows"]["median"] >= 2 * 4, "four answers, one after the other"


@pytest.mark.parametrize("run", RUNS)
def test_every_case_shows_an_example(run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bucketline.bench", *run.split(), "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"Example: python -m bucketline.bench {run}" in " ".join(out.split())
    assert "--stores" in out


def test_the_help_of_all_cases_names_them() -> None:
    ran = spawn([sys.executable, "-m", "bucketline.bench", "--help", "all"]).done()
    assert [word for run in RUNS for word in run.split() if word not in ran.out] == []
    first = spawn([sys.executable, "-m", "bucketline.bench", "--help"]).done().out
    assert [case for case in CASES if case not in first] == []
    assert len(CASES) == 8


TINY = ("--num-shards", 3, "--rows-per-shard", 8, "--row-kib", 8, "--batch-size", 4, "--prefetch-mib", 1)


def test_delivery_has_memcpy_beside_the_loader_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    results = measured(Hot, capsys, *TINY, "--batches", 6, "--repeats", 1, "--threads", 2)
    assert set(results) == {"memcpy, 2 threads", "loader, 2 threads", "service, 2 threads"}
    assert results["service, 2 threads"]["mark"] == "at least 0.85"


def test_a_busy_trainer_is_measured_both_ways_beside_itself_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run_case(HotBusy, [*map(str, TINY), "--batches=6", "--paced-batches=2", "--every-ms=1", "--repeats=1", "--json"]) == 0
    )
    results = json.loads(capsys.readouterr().out)["results"]
    assert {(one["case"], one["subject"]) for one in results} == {
        (f"hot, busy trainer{case}", f"{way}, {how}")
        for case, more in (("", ("next to a spinning process",)), (", next()", ()))
        for way in ("in the process", "through the service")
        for how in ("quiet", "busy", *more)
    }
    assert [one["mark"] for one in results if one["mark"]] == ["at least 0.8"]


def test_running_all_refuses_a_case_that_there_is_not() -> None:
    spawn([sys.executable, "-m", "bucketline.bench", "--only", "nothing"]).fails(
        "--only has nothing; expected names from peers, hot", code=2
    )
