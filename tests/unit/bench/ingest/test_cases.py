"""The cases of ingest at a tiny size: that their figures can be true. None is held against a clock."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from bucketline.bench import harness
from bucketline.bench.cases.importing import Import
from bucketline.bench.cases.pack import Pack, PackAgain, PackMemory, pack_apart, together
from bucketline.bench.cases.scale import ScaleListing
from bucketline.bench.fixtures.trained_model import ModelShape, Pieces, kept_photographs, kept_random_model
from bucketline.bench.harness import run_case
from bucketline.errors import BucketlineError
from tests.unit.bench.measured import measured, read_results

pytestmark = pytest.mark.slow

TINY = ModelShape(vae_widths=(4, 4), text_width=32, text_layers=1)


@pytest.fixture(autouse=True)
def _torchs_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "WARM_UPS", 0)  # a round for figures that here nobody looks at


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


def test_a_listing_is_compared_with_stores_of_each_size_and_its_memory_told(capsys: pytest.CaptureFixture[str]) -> None:
    results = measured(ScaleListing, capsys, "--samples", 200, 400, "--shards", 2, 4, "--ranks", 4, "--repeats", 1)
    steps = ("which are new", "which are gone", "what a rank looks up in", "which rows give way")
    for step in steps:
        least = results[f"{step}: 200 samples, 2 shards"]
        for name in (f"{step}: {samples} samples, {shards} shards" for samples in (200, 400) for shards in (2, 4)):
            assert results[name]["limit_ratio"] == pytest.approx(results[name]["median"] / least["median"], rel=1e-2)
            assert results[name]["mark"] == "at most 2.5"
    whole, first, other = (
        results[f"listing {name}"]["median"]
        for name in ("as it comes from a source", "kept by rank 0 of 1", "kept by rank 1 of 4")
    )
    assert other < first < whole
    assert len(results) == 4 * len(steps) + 4


def test_a_run_that_did_something_else_is_no_figure(tmp_path: Path) -> None:
    source = kept_photographs(tmp_path, Pieces(count=2, sides_px=(64, 64)))
    command = [str(source), str(tmp_path / "x.store"), "--model", str(kept_random_model(tmp_path, TINY)), "--grid", "64x64"]
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
