"""The files that a drawing and a run leave: images of their own size, a sheet of all, captions, the loss curve."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from bucketline.train.images.image_files import CELL_PX, GAP_PX, DrawnSample, contact_sheet, write_images
from bucketline.train.report.loss_curve import draw_loss_curve
from bucketline.train.run import train
from tests.kit import make_sample
from tests.unit.train.tiny_run import ALONE, add_to_store, config

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

CHINESE = "一只猫坐在窗边看雨"


def drawn(shade: int, height: int, width: int, *, real: int | None = None) -> DrawnSample:
    generated, other = (np.full((height, width, 3), value, dtype=np.uint8) for value in (shade, real or 0))
    return DrawnSample(entry={"id": f"cats/{shade}.png"}, real=None if real is None else other, generated=generated)


def test_each_image_is_a_file_of_its_own_size_and_the_sheet_has_all_of_them_in_rows(tmp_path: Path) -> None:
    samples = [drawn(10, 40, 20), drawn(20, 20, 40), drawn(30, 20, 20), drawn(40, 20, 20), drawn(50, 20, 20)]
    write_images(samples, tmp_path / "images.png", tmp_path / "images" / "step-00000007")
    files = sorted((tmp_path / "images" / "step-00000007").iterdir())
    assert [path.name for path in files] == ["01.png", "02.png", "03.png", "04.png", "05.png"]
    for path, one in zip(files, samples, strict=True):
        with Image.open(path) as image:
            assert np.array_equal(np.asarray(image), one.generated)
    assert json.loads((tmp_path / "images.json").read_bytes()) == [one.entry for one in samples]
    with Image.open(tmp_path / "images.png") as sheet:
        side = 40 + GAP_PX
        assert sheet.size == (4 * side + GAP_PX, 2 * side + GAP_PX)
        places = [(number % 4 * side + GAP_PX, number // 4 * side + GAP_PX) for number in range(5)]
        assert [sheet.getpixel(place) for place in places] == [(n, n, n) for n in (10, 20, 30, 40, 50)]


def test_a_generated_image_is_below_the_real_one_and_large_ones_are_made_smaller() -> None:
    sheet = contact_sheet([drawn(10 * n, 1000, 500, real=5 * n) for n in range(1, 6)])
    width, height = CELL_PX // 2 + GAP_PX, CELL_PX + GAP_PX
    assert sheet.size == (4 * width + GAP_PX, 4 * height + GAP_PX)
    shades = [[sheet.getpixel((GAP_PX, row * height + GAP_PX)) for row in range(4)]]
    assert shades == [[(n, n, n) for n in (5, 10, 25, 50)]]


def test_a_sheet_of_many_images_is_a_square() -> None:
    assert contact_sheet([drawn(1, 8, 8)] * 100).size == (168, 168)


def test_a_lone_window_has_a_marker_and_ticks_are_whole_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    save = Figure.savefig

    def noting(figure: Figure, *args: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", noting)
    draw_loss_curve([{"step": 19, "loss": 0.5}], tmp_path / "loss.png")
    (axes,) = figures[0].axes
    assert axes.lines[0].get_marker() == "o"
    assert list(np.asarray(axes.lines[0].get_xdata())) == [20]
    assert all(tick == int(tick) for tick in axes.get_xticks())


def test_a_run_leaves_the_captions_next_to_the_images(folder: Path) -> None:
    path = folder / "chinese.store"
    rows = {"train/128x128": 9, "val/128x128": 3}
    made = [make_sample(f"{name}/{n}.png", name, (f"{CHINESE} {n}",)) for name, count in rows.items() for n in range(count)]
    add_to_store(path, made)
    asked = config(folder, store=(path,), max_steps=2, num_images=2, images_every=1)
    train(asked, ALONE)
    for file in (asked.output_dir / "images.json", asked.output_dir / "images" / "step-00000001.json"):
        for entry in (entries := json.loads(file.read_text(encoding="utf-8"))):
            assert entry["caption"] == f"{CHINESE} {entry['id'].removeprefix('val/128x128/').removesuffix('.png')}"
        assert len(entries) == 2
