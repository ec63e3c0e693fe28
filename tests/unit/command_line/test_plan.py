"""The output and exit codes of `loader plan`: others script them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from bucketline.loader import Loader, LoaderConfig
from tests.commands import call
from tests.kit import make_store, samples_of

if TYPE_CHECKING:
    from pathlib import Path


def test_plan_prints_one_object_with_buckets_and_with_list_every_step(packed: tuple[Path, Path]) -> None:
    asked = ("plan", packed[1], "--batch-size", 2, "--world-size", 2, "--epochs", 3, "--seed", 5, "--json")
    brief = call("loader", *asked).json
    assert {"steps", "rows", "buckets"} <= set(brief)
    assert "batches" not in brief
    for bucket in brief["buckets"]:
        assert set(bucket) == {"name", "split", "rows", "global_batch", "batches", "carried"}
        assert bucket["carried"] == 3 * bucket["rows"] - bucket["batches"] * bucket["global_batch"]
    assert brief["rows"] == sum(bucket["batches"] * bucket["global_batch"] for bucket in brief["buckets"])
    assert brief["steps"] == sum(bucket["batches"] for bucket in brief["buckets"])
    listed = call("loader", *asked, "--list").json
    assert {key: listed[key] for key in brief} == brief
    assert [batch["step"] for batch in listed["batches"]] == list(range(brief["steps"]))
    for batch in listed["batches"]:
        assert set(batch) == {"step", "epoch", "bucket", "ranks"}
        assert [len(ids) for ids in batch["ranks"]] == [2, 2]


def test_plan_lists_what_a_loader_reads(packed: tuple[Path, Path]) -> None:
    from bucketline.store.format.block import sample_digest

    listed = call("loader", "plan", packed[1], "--batch-size", 2, "--accumulation", 2, "--epochs", 2, "--list", "--json").json
    with Loader(packed[1], LoaderConfig(batch_size=2, accumulation=2)) as loader:
        read = [bytes(row.tolist()) for _ in range(2) for batch in loader for row in batch.ids]
    assert read == [sample_digest(i) for batch in listed["batches"] for ids in batch["ranks"] for i in ids]


@pytest.mark.parametrize("window", [None, 32, 0])
def test_plan_of_several_stores_by_a_budget_lists_what_a_loader_reads(
    packed: tuple[Path, Path], tmp_path: Path, window: int | None
) -> None:
    from bucketline.store.format.block import sample_digest

    one = make_store(tmp_path / "one.store", samples_of({"train/64x64": 9, "train/64x128": 5}, "one/")).path
    two = make_store(tmp_path / "two.store", samples_of({"train/64x64": 4}, "two/")).path
    asked = ("plan", one, f"{two}:3", "--batch-size", "17000px/2", "--world-size", 2)
    order = () if window is None else ("--window", window)
    listed = call("loader", *asked, *order, "--list", "--json").json
    assert {bucket["name"]: (bucket["rows"], bucket["global_batch"]) for bucket in listed["buckets"]} == {
        "train/64x64": (9 + 3 * 4, 8),
        "train/64x128": (5, 4),
    }
    assert [(store["path"], store["repeats"]) for store in listed["stores"]] == [(str(one), 1), (str(two), 3)]
    assert f"{two} x 3" in call("loader", *asked).out
    config = LoaderConfig(batch_pixels=17_000, batch_multiple=2, window=window)
    for rank in range(2):
        with Loader([one, f"{two}:3"], config, rank=rank, world_size=2) as loader:
            read = [bytes(row.tolist()) for batch in loader for row in batch.ids]
        assert read == [sample_digest(i) for batch in listed["batches"] for i in batch["ranks"][rank]]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "error: loader plan needs either --batch-size N|4MP or --run RUN"),
        (("--batch-size", 0), "--batch-size is '0', expected rows, such as 8, or"),
        (("--batch-size", 1, "--epochs", 0), "--epochs is 0, expected 1 or more"),
        (("--batch-size", 1, "--window", "all"), "all"),
        (
            ("--batch-size", 1, "--split", "train:keep"),
            "--split is 'train:keep', expected a split, such as val, or with carry or",
        ),
        (("--batch-size", 1, "--world-size", 0), "--world-size is '0', expected 1 rank or more"),
        (
            ("--batch-size", 1, "--run", "runs/a"),
            "--batch-size is 1 with --run runs/a, which decides it; leave out one of them",
        ),
        (("--batch-size", "4GP"), "--batch-size is '4GP', expected rows, such as 8, or as many as fit 4MP"),
    ],
)
def test_a_plan_that_makes_no_sense_ends_with_2_naming_what(
    packed: tuple[Path, Path], more: tuple[object], message: str
) -> None:
    call("loader", "plan", packed[1], *more).fails(message, code=2)


def test_a_bucket_smaller_than_a_batch_is_no_error(tmp_path: Path) -> None:
    make_store(tmp_path, samples_of({"train/64x64": 9, "train/96x64": 1}))
    report = call("loader", "plan", tmp_path, "--batch-size", 4, "--json").done()
    assert {bucket["name"]: bucket["batches"] for bucket in report.json["buckets"]} == {"train/64x64": 2, "train/96x64": 0}


SMALL_BUCKETS = {f"train/{64 * (n + 1)}x64": n for n in range(1, 6)} | {"train/64x64": 99, "train/64x128": 6}


@pytest.mark.parametrize(
    ("remainder", "words"),
    [
        ("carry", "images repeat within them"),
        ("partial", "rows of weight 0 fill them"),
        ("drop", "these images are never read"),
    ],
)
def test_plan_warns_of_buckets_too_small_for_their_batch(tmp_path: Path, remainder: str, words: str) -> None:
    make_store(tmp_path, samples_of(SMALL_BUCKETS))
    asked = ("loader", "plan", tmp_path, "--batch-size", 6, "--world-size", 2, "--split", f"train:{remainder}")
    ran = call(*asked)
    assert ran.err.startswith("warning: train/128x64 has 1 image, train/192x64 has 2 images, train/256x64 has 3 images, ")
    assert ran.err.count("\n") == 1
    others = f", {len(SMALL_BUCKETS) - 1 - 3} more such buckets, and batches take 12"
    assert f"{others}, so {words}; use a smaller batch or fewer GPUs" in ran.err
    assert ("--split train:drop" in ran.err) is (remainder != "drop")
    assert call(*asked, "--json").err == ran.err


@pytest.mark.parametrize("remainder", ["carry", "partial", "drop"])
def test_plan_does_not_warn_of_ordinary_buckets(tmp_path: Path, remainder: str) -> None:
    make_store(tmp_path, samples_of({"train/64x64": 99, "train/64x128": 6}))
    assert call("loader", "plan", tmp_path, "--batch-size", 5, "--split", f"train:{remainder}").err == ""


def test_the_plan_of_a_run_is_the_one_that_its_state_was_made_by(packed: tuple[Path, Path], tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    with Loader(packed[1], LoaderConfig(batch_size=2, seed=7, accumulation=2), world_size=2) as loader:
        state.write_text(json.dumps(loader.state_dict()), encoding="utf-8")
        digest = loader.plan.digest
    found = call("loader", "plan", packed[1], "--run", state, "--list", "--json").done().json
    asked = ("--batch-size", 2, "--seed", 7, "--accumulation", 2, "--world-size", 2)
    assert found["plan"] == digest
    assert found == call("loader", "plan", packed[1], *asked, "--list", "--json").done().json
    call("loader", "plan", "--run", tmp_path / "no").fails(f"--run {tmp_path}/no: {tmp_path}/no cannot be read: No such file")
