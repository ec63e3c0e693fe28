"""Each case at a tiny size: what it prints, and that its figures can be true. No figure is held against a clock."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from bucketline.bench import harness
from bucketline.bench.cases.hot import Hot, HotBusy, HotMany, HotRows, HotText
from bucketline.bench.cases.importing import Import
from bucketline.bench.cases.pack import Pack, PackAgain, PackMemory, pack_apart, together
from bucketline.bench.cases.references import TrainReferences
from bucketline.bench.cases.scale import Scale
from bucketline.bench.cases.start import FirstBatch, Start
from bucketline.bench.cases.stream import Stream, StreamMachines, StreamService
from bucketline.bench.cases.train import Train, TrainSaves, Window, interval, results_of, results_of_saves
from bucketline.bench.cases.writing import Write, WriteMemory
from bucketline.bench.fixtures.trained_model import MODELS, ModelShape, Pieces, kept_photographs, kept_random_model, kept_store
from bucketline.bench.harness import Case, run_case
from bucketline.errors import BucketlineError
from bucketline.store import Store
from tests.commands import spawn

pytestmark = pytest.mark.slow

FIELDS = {"case", "subject", "unit", "median", "q1", "q3", "repeats", "limit_ratio", "ratios", "mark", "is_met"}


@pytest.fixture(autouse=True)
def _torchs_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "WARM_UPS", 0)  # a round for figures that here nobody looks at


def measured(case: type[Case], capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, dict[str, Any]]:
    """Run a case in this process; return its results, each held to what every result must be.

    They are by subject, with `, FIGURE` after it unless the figure is that of the case itself.
    """
    code = run_case(case, [*map(str, args), "--json"])
    out = capsys.readouterr()
    assert code == 0, out.err
    found = json.loads(out.out)
    for result in found["results"]:
        assert set(result) == FIELDS
        assert result["q1"] <= result["median"] <= result["q3"]
        assert result["repeats"] >= 1
        # a part of the disk's bytes may be none, and so may be a tiny store's share of the ranks' memory, and late graphs
        assert result["limit_ratio"] > 0 or result["unit"] in ("of payload", "MB", "graphs")
        assert all(ratio > 0 for ratio in result["ratios"].values())
        assert (result["mark"] is None) == (result["is_met"] is None)
    cases = [result["case"] for result in found["results"]]
    assert all(case == cases[0] or case.startswith(f"{cases[0]}, ") for case in cases)
    by_name = {result["subject"] + result["case"].removeprefix(cases[0]): result for result in found["results"]}
    assert len(by_name) == len(cases)
    return by_name


def read_results(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    found = json.loads(capsys.readouterr().out)
    return found["header"], found["results"]


def test_quantised_text_is_compared_with_f16_on_disk_and_delivered(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--rows", 16, "--num-tokens", 64, "--token-width", 256, "--latent-side", 8, "--batch-size", 4, "--batches", 3)
    results = measured(HotText, capsys, *small, "--repeats", 1)
    for dtype in ("I8", "F8_E4M3"):
        assert 0.4 < results[f"disk: {dtype}"]["ratios"]["disk: F16"] < 0.7
        for form in ("dequantised by the loader", "as stored"):
            assert results[f"{dtype}, {form}"]["ratios"]["F16"] > 0
    assert {result["unit"] for result in results.values()} == {"MiB/sample", "samples/s", "CPU-ms/sample"}


def test_open_cost_compares_few_rows_with_many(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--rows", 40, 4000, "--num-shards", 3, "--many", 3, "--many-rows", 24)
    results = measured(Start, capsys, *small, "--repeats", 1)
    assert {results[f"open: 3 {what}, many, CPU"]["mark"] for what in ("buckets", "shards")} == {"at most 50"}
    large = results["open: 4,000 rows, 3 shards"]
    assert (large["mark"], large["unit"]) == ("at most 1.5", "ms")
    assert results["open and locate a row of each shard: 4,000 rows, 3 shards"]["limit_ratio"] > 0


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
    assert {"fresh start, CPU", "a second loader of the process, CPU"} <= set(results)


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


def results_of_case(case: type[Case], capsys: pytest.CaptureFixture[str], *args: object) -> dict[tuple[str, str], Any]:
    """Run a case whose results have no common start."""
    assert run_case(case, [*map(str, args), "--repeats", "1", "--json"]) == 0
    return {(one["case"], one["subject"]): one for one in read_results(capsys)[1]}


def test_machines_fetch_a_share_of_the_shards_each(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--num-shards", 2, "--rows-per-shard", 16, "--row-kib", 8, "--batch-size", 4, "--ranks", 1, 2)
    found = results_of_case(StreamMachines, capsys, *sizes, "--cache-share", 1000)
    assert found["stream, machines, epoch 1", "1 machine"]["median"] == pytest.approx(1.0, abs=0.1)
    assert found["stream, machines, epoch 2", "1 machine"]["median"] < 0.1, "the cache holds the store"
    assert {name: one["mark"] for (_, name), one in found.items()} == {"1 machine": "at most 1.05", "2 machines": None}, "small"


def test_writing_is_held_against_puts_of_lmdb_and_a_tiny_row_against_microseconds(capsys: pytest.CaptureFixture[str]) -> None:
    found = results_of_case(Write, capsys, "--rows", 4, "--tiny-rows", 8)
    assert found["write, rows of 70 KiB, CPU", "StoreWriter"]["mark"] == "at most 1.5"
    assert found["write, tiny rows, CPU, itself", "StoreWriter"]["mark"] == "at most 30"
    found = results_of_case(WriteMemory, capsys, "--rows", 10, 20)
    assert found["write, memory", "20 rows"]["mark"] == "at most 1.1"


def test_small_batches_are_held_against_lmdb_and_microseconds(capsys: pytest.CaptureFixture[str]) -> None:
    found = results_of_case(HotRows, capsys, "--sizes", 1, 8, "--samples", 16)
    assert found["hot, rows, CPU", "loader, 8 large rows"]["mark"] == "at most 0.5"
    itself = found["hot, rows, wall, itself", "loader, 1 small row"]
    assert (itself["mark"], itself["limit_ratio"]) == ("at most 100", itself["median"])


def test_many_buckets_and_shards_are_held_against_few(capsys: pytest.CaptureFixture[str]) -> None:
    found = results_of_case(HotMany, capsys, "--buckets", 40, "--shards", 20, "--rows", 400, "--batch-size", 4, "--batches", 5)
    assert found["hot, many, CPU", "40 buckets"]["mark"] == "at most 1.3"
    assert found["hot, many, first of later", "20 shards"]["mark"] == "at most 1.3"


TINY = ("--num-shards", 3, "--rows-per-shard", 8, "--row-kib", 8, "--batch-size", 4, "--prefetch-mib", 1)


def test_delivery_has_memcpy_beside_the_loader_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    results = measured(Hot, capsys, *TINY, "--batches", 6, "--repeats", 1, "--threads", 2)
    by_row = "memcpy, a row at a time"
    assert set(results) == {f"{name}, 2 threads" for name in ("memcpy", by_row, "loader", "service")}
    assert results["loader, 2 threads"]["ratios"].keys() == {f"{by_row}, 2 threads"}
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


SHAPE = ModelShape(vae_widths=(4, 4), text_width=32, text_layers=1)


def test_a_whole_pack_is_held_against_what_its_stages_can_be_together(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--images", 12, "--sides-px", 64, 100, "--grid", "64x64,64x96", "--vae-widths", 4, 4, "--batch-size", 4)
    results = measured(Pack, capsys, *small, "--repeats", 1)
    decoding, encoding, writing = (results[f"{stage} only"]["median"] for stage in ("decode", "encode", "write"))
    limits = {
        "limit on shared cores": 1 / (1 / decoding + 1 / encoding),
        "the slower stage, limit with a GPU": min(decoding, encoding),
        "limit of all three": together(decoding, encoding, writing),
    }
    for name, limit in limits.items():
        assert results[name]["median"] == pytest.approx(limit, rel=1e-3), name
    whole = results["whole pack"]
    held = "the slower stage, limit with a GPU" if torch.cuda.is_available() else "limit on shared cores"
    assert whole["limit_ratio"] == pytest.approx(whole["median"] / limits[held], rel=1e-3)
    assert whole["mark"] == "at least 0.9"
    assert set(whole["ratios"]) == set(limits) - {held}


def test_the_memory_of_a_few_and_of_many_images_is_compared_and_a_listing_told_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_case(PackMemory, ["--images", "3", "40", "--repeats", "1", "--json"]) == 0
    _, found = read_results(capsys)
    results = {(one["case"].removeprefix("pack, memory, "), one["subject"]): one for one in found}
    assert set(results) == {
        *((kind, f"{count} images") for kind in ("private", "resident") for count in (3, 40)),
        ("listing", "40 images"),
    }
    assert results["private", "40 images"]["limit_ratio"] > 0
    assert not any(result["mark"] for result in found), "the mark is for sources that fill the buffers"
    for count in (3, 40):
        private, resident = (results[kind, f"{count} images"]["median"] for kind in ("private", "resident"))
        assert 50 < private < resident, "MiB of a process that has imported torch, most of its code in mapped files"


def test_a_run_again_is_held_against_a_walk_of_the_folder_in_time_and_in_cpu_time(capsys: pytest.CaptureFixture[str]) -> None:
    results = measured(PackAgain, capsys, "--images", 5, "--repeats", 1)
    for of in ("", ", CPU"):
        start, walk, one = (
            results[f"{name}{of}"] for name in ("python -c pass", "walk and stat of 5 images", "again over 1 image")
        )
        assert one["limit_ratio"] == pytest.approx(one["median"] / start["median"], rel=1e-2)
        for name in ("again over 5 images", "again over 5 images, --check content"):
            again = results[f"{name}{of}"]
            assert again["ratios"] == {one["subject"]: pytest.approx(again["median"] / one["median"], rel=1e-2)}
            assert again["limit_ratio"] == pytest.approx(again["median"] / walk["median"], rel=1e-2)
    assert len(results) == 10


def test_a_run_that_did_something_else_is_no_figure(tmp_path: Path) -> None:
    source = kept_photographs(tmp_path, Pieces(count=2, sides_px=(64, 64)))
    command = [str(source), str(tmp_path / "x.store"), "--model", str(kept_random_model(tmp_path, SHAPE)), "--grid", "64x64"]
    with pytest.raises(BucketlineError, match=r"says \{'packed': 2\}, expected \{'packed': 3\}"):
        pack_apart(command, expected={"packed": 3})
    with pytest.raises(BucketlineError, match="ended with 2: error: --grid"):
        pack_apart([*command, "--grid", "65x64"], expected={})


def test_pieces_are_real_images_of_the_sizes_asked_for_and_each_has_a_caption(tmp_path: Path) -> None:
    folder = kept_photographs(tmp_path, Pieces(count=25, sides_px=(300, 700)))
    images = sorted(folder.rglob("*.jpg"))
    assert len(images) == 25
    sizes = set()
    for path in images:
        with Image.open(path) as image:
            assert image.mode == "RGB"
            assert all(300 <= side <= 700 for side in image.size)
            assert len(image.getcolors(1 << 20) or []) > 1000, "a photograph"
            sizes.add(image.size)
        assert len(path.with_suffix(".txt").read_text(encoding="ascii").split()) == 12
    assert len(sizes) > 20
    before = images[0].stat().st_mtime_ns
    assert kept_photographs(tmp_path, Pieces(count=25, sides_px=(300, 700))) == folder
    assert images[0].stat().st_mtime_ns == before, "kept, not made again"


def test_photographs_that_are_not_installed_are_an_error_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BucketlineError, match=r"coffee.png is not installed.*run `make env`"):
        kept_photographs(tmp_path, Pieces(count=1, sides_px=(64, 64)))
    assert not list(tmp_path.glob("*.photos"))


def test_an_import_is_held_against_reading_and_against_reading_and_writing(capsys: pytest.CaptureFixture[str]) -> None:
    results = measured(Import, capsys, "--samples", 5, "--repeats", 1)
    read, write = (results[name]["median"] for name in ("read the files", "write the rows"))
    assert results["both, one after the other"]["median"] == pytest.approx(1 / (1 / read + 1 / write), rel=1e-3)
    assert results["import"]["mark"] == "at least 0.7"
    assert set(results["import"]["ratios"]) == {"read the files, one process", "both, one after the other"}
    assert results["import, CPU"]["unit"] == "CPU-s/GB"
    assert results["import, CPU"]["median"] > 0


def test_a_loaders_images_are_held_against_resident_ones(capsys: pytest.CaptureFixture[str]) -> None:
    results = measured(Train, capsys, "--rows", 8, "--steps", 2, "--repeats", 2)
    assert results["resident batches"]["limit_ratio"] == 1
    assert results["the loader's"]["mark"] == "at least 0.99"
    low, high = (results[f"the pairs' mean ratio, 95 % {end}"]["median"] for end in ("from", "to"))
    assert low <= results["the loader's"]["limit_ratio"] <= high
    assert results["compiled after the warm-up"]["median"] == 0
    assert results["mixed buckets ÷ the buckets alone, a FLOP"]["mark"] == "at least 0.97"
    assert "MFU" not in results, "no peak of a CPU is known"


def test_stored_references_are_held_against_encoding_them_in_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--side-px", 32, "--layers", 1, "--heads", 1, "--vae-width", 8, "--steps", 1, "--repeats", 1)
    found = measured(TrainReferences, capsys, *sizes)
    assert found.keys() == {"encoded in each step", "stored", "no references"}
    assert found["stored"]["limit_ratio"] > 0


def test_a_mixed_window_is_held_against_the_best_bucket_by_its_flops() -> None:
    def window(flops: float, seconds: float) -> Window:
        return Window(images=4, seconds=seconds, wait_s=0.5, flops=flops)

    pairs = [(window(8e12, 2.0), window(8e12, 1.0))]
    alone = {"small": [window(2e12, 1.0)], "large": [window(16e12, 1.0)]}
    found = {one.subject: one for one in results_of("m", pairs, 0, alone, peak_flops=8e12)}
    assert found["the loader's"].limit_ratio == 0.5
    assert found["data wait"].median == 0.25
    assert found["MFU"].median == 0.5
    assert found["buckets alone ÷ the best one, a FLOP"].median == pytest.approx(9 / 16)
    assert found["mixed buckets ÷ the buckets alone, a FLOP"].median == pytest.approx(8 / 9)


def test_the_interval_holds_the_mean_and_narrows_with_the_number_of_pairs() -> None:
    few, many = interval([0.98, 1.02] * 2), interval([0.98, 1.02] * 50)
    assert few[0] < many[0] < 1 < many[1] < few[1]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_store_of_each_model_has_its_buckets_and_columns(tmp_path: Path, name: str) -> None:
    store = Store.open(kept_store(tmp_path, name, 2))
    model = MODELS[name]
    assert {(one.height_px, one.width_px) for one in store.buckets("train")} == set(model.buckets_px)
    assert list(store.manifest.text.tokens) == [model.tokens.name]
    assert list(store.manifest.text.fixed) == ([] if model.pooled is None else ["pooled"])


# The time that a save stops training is in the step that follows it.


def test_a_step_with_a_save_is_held_against_the_others() -> None:
    took = [1.0, 1.0, 9.0, 1.0, 1.0, 3.0, 1.0, 1.0, 5.0, 1.0, 1.0]  # after 1 step, and after 3, 6 and 9 a save
    first_end = 100.0
    found = {one.subject: one for one in results_of_saves("m", [*itertools.accumulate(took, initial=first_end)], 3)}
    assert found["a step"].median == 1.0
    assert found["the first step with a save"].limit_ratio == 9.0
    assert found["a step with a save"].limit_ratio == 4.0
    assert found["a step with a save"].is_met is False


def test_a_run_is_measured_and_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    results = measured(TrainSaves, capsys, "--model", "tiny", "--rows", 8, "--save-every", 2, "--repeats", 1)
    assert results["a step"]["repeats"] == 3
    assert results["a step with a save"]["mark"] == "at most 2"
