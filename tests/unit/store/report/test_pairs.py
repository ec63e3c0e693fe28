"""References and masks on the pages: counted, beside their target and over it."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from bucketline.pages.page import png, tinted
from bucketline.store import LatentColumn, MaskColumn, ReferenceColumn, Store
from bucketline.store.report.facts import RowPlace, check_pairs
from tests.commands import call
from tests.kit import Form, Sample
from tests.pages import parsed
from tests.unit.store.report.conftest import SD, smooth

FORM = Form(
    columns=(
        LatentColumn(channels=4),
        ReferenceColumn(0, channels=4),
        ReferenceColumn(1, channels=4),
        MaskColumn(),
    ),
    encoders={"vae": SD, "text_encoder": {"width": 5}},
)
ROWS = {"train/64x96x0x0x0x0": 3, "train/64x96x64x96x0x0": 4, "val/64x96x128x64x64x64": 5}
EMPTY = RowPlace(bucket="train/64x96x64x96x0x0", row=2)


def mask_of(sample: Sample, n: int) -> NDArray[np.uint8]:
    """Leave out the left half of every second image, and all of one."""
    mask = np.full((8, 12), 255, dtype=np.uint8)
    mask[:, : 6 * (n % 2)] = 0
    return mask * np.uint8(sample.id != f"{EMPTY.bucket}/{EMPTY.row}")


def write_pairs(path: Path) -> Store:
    samples = []
    for bucket, count in ROWS.items():
        for n in range(count):
            sample = FORM.sample(f"{bucket}/{n}", bucket, captions=("make it red",))
            drawn = {role: smooth(n, *array.shape[1:]) for role, array in sample.columns.items() if array.ndim == 3}
            columns = {role: array.astype(np.float16) for role, array in drawn.items()} | {"mask": mask_of(sample, n)}
            samples.append(replace(sample, columns=columns))
    return FORM.make_store(path, samples)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "s")


def images_of(page: Path, anchor: str, sample: str) -> list[Image.Image]:
    """Return the images of a sample's first card in a section."""
    section = page.read_text(encoding="utf-8").split(f'id="{anchor}"', 1)[1].split("</section>")[0]
    card, *_ = [one for one in section.split("<figure>") if f"<b>{sample}</b>" in one]
    return [Image.open(io.BytesIO(base64.b64decode(found))) for found in re.findall(r"base64,([^\"]+)", card)]


def test_references_are_counted_and_masks_measured(store: Store) -> None:
    found = check_pairs(store, 1000)
    assert found.by_number == {0: 3, 1: 4, 2: 5}
    areas = [1, 0.5, 1, 1, 0.5, 0, 0.5, 1, 0.5, 1, 0.5, 1]
    assert (found.masks, found.read, found.area, found.full) == (12, 12, sum(areas), areas.count(1))
    assert found.empty == [EMPTY]
    assert check_pairs(store, 6).read < 12


def test_a_report_shows_references_beside_their_target_and_names_masks_that_are_all_zero(store: Store, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    ran = call("store", "report", store.path, "-o", page).done()
    assert "warning: 1 mask all zero. Of 12 read" in ran.out
    text = parsed(page).text
    for words in ("Samples by number of references", "0 references", "1 reference", "2 references", "70.8 % of an", "6 leave"):
        assert words in text
    for bucket, sizes in {
        "train/64x96x0x0x0x0": [(12, 8)],
        "train/64x96x64x96x0x0": [(12, 8), (12, 8)],
        "val/64x96x128x64x64x64": [(12, 8), (8, 16), (8, 8)],
    }.items():
        assert [image.size for image in images_of(page, "samples", f"{bucket}/1")] == sizes
    (shown, _) = images_of(page, "pairs", f"{EMPTY.bucket}/{EMPTY.row}")
    red, green, _ = np.asarray(shown.convert("RGB")).reshape(-1, 3).mean(axis=0)
    assert red > green + 100


def test_a_peek_at_a_step_shows_references_and_masks(store: Store, tmp_path: Path) -> None:
    seen = dict[str, int]()
    for step in range(4):
        page = tmp_path / f"{step}.html"
        told = call("loader", "peek", store.path, "--step", step, "--batch-size", 3, "-o", page, "--json").done().json
        for row in told["batches"][0]["rows"]:
            number = int(row["id"].rpartition("/")[2])
            target, *references = images_of(page, "batch", row["id"])
            assert (target.size, len(references)) == ((12, 8), int(told["bucket"] == EMPTY.bucket))
            is_red = np.asarray(target.convert("RGB"))[:, :6, 0].min() > 0.5 * 230
            assert bool(is_red) is (number % 2 == 1 or row["id"] == f"{EMPTY.bucket}/{EMPTY.row}")
            seen[told["bucket"]] = seen.get(told["bucket"], 0) + 1
        assert "Red is what a mask leaves out." in parsed(page).text
    assert len(seen) == 2


def test_what_a_mask_leaves_out_is_red_and_the_rest_as_it_was() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    mask = np.full((8, 12), 255, dtype=np.uint8)
    mask[:, :6] = 0
    found = np.asarray(Image.open(io.BytesIO(tinted(png(pixels), mask)))).astype(int)
    assert (found[:, 12:] == pixels[:, 12:]).all()
    assert np.abs(found[:, :12] - (0.4 * pixels[:, :12] + 0.6 * np.array([230, 0, 40]))).max() <= 1


def test_a_store_of_images_has_no_section_of_pairs(tmp_path: Path) -> None:
    form = Form(columns=(LatentColumn(channels=4),), encoders=FORM.encoders)
    form.make_store(tmp_path / "s", form.samples({"train/64x96": 3}))
    call("store", "report", tmp_path / "s", "-o", tmp_path / "r.html").done()
    assert "pairs" not in parsed(tmp_path / "r.html").ids
