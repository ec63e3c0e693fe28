"""Captions under the images: readable in any script, or the sample's name in their place."""

from __future__ import annotations

import json
import logging
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager
from PIL import Image

from bucketline.train.evaluation import fonts, image_grid
from bucketline.train.evaluation.fonts import fonts_for
from bucketline.train.evaluation.image_grid import COLUMNS, DrawnSample, draw_grid, draw_loss_curve, wrapped
from bucketline.train.trainer import train
from tests.building import make_sample
from tests.unit.train.tiny_run import ALONE, add_to_store, config

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

CHINESE = "一只猫坐在窗边看雨,窗外是一条安静的老街,街上没有行人,只有几把雨伞和一盏昏黄的路灯在风里摇晃"
JAPANESE, KOREAN, EMOJI = "窓辺に座る猫とひらがな", "창가에 앉은 고양이", "a cat 🦖🫠"
OTHERS = (CHINESE, JAPANESE, KOREAN, EMOJI)


@pytest.fixture(autouse=True)
def no_other_fonts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep to the fonts that come with matplotlib: a machine may have any others."""
    own = [entry for entry in font_manager.fontManager.ttflist if "mpl-data" in entry.fname]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", own)
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda *_, **__: [])
    for cached in (fonts.preferred_fonts, fonts._codes, fonts.warn_of_no_font):
        cached.cache_clear()


def install(path: Path, name: str, text: str) -> None:
    """Make a font whose glyphs are squares, and make it known."""
    pen = TTGlyphPen(None)
    for move in (pen.moveTo, pen.lineTo, pen.lineTo, pen.lineTo):
        move(((0, 0), (0, 700), (700, 700), (700, 0))[(pen.moveTo, pen.lineTo).index(move)])
    pen.closePath()
    square = pen.glyph()
    names = {ord(letter): f"u{ord(letter):x}" for letter in sorted(set(text))}
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", *names.values()])
    builder.setupCharacterMap(names)
    builder.setupGlyf(dict.fromkeys([".notdef", *names.values()], square))
    builder.setupHorizontalMetrics(dict.fromkeys([".notdef", *names.values()], (800, 0)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": name, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)
    font_manager.fontManager.addfont(path)
    for cached in (fonts.preferred_fonts, fonts._codes):
        cached.cache_clear()


def drawn(caption: str, name: str = "cats/a.png") -> DrawnSample:
    image = np.full((16, 16, 3), 90, dtype=np.uint8)
    return DrawnSample(entry={"id": name, "caption": caption}, real=image, generated=image)


def test_a_negative_prompt_is_below_its_image_and_a_lone_window_has_a_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(image_grid, "_save", lambda figure, _: figures.append(figure))
    image = np.full((16, 16, 3), 90, dtype=np.uint8)
    entries = [{"id": f"default/{n}", "caption": "a cat", "negative_prompt": text} for n, text in enumerate(("ugly", ""))]
    samples = [DrawnSample(entry=entry, real=None, generated=image) for entry in entries]
    draw_grid(samples, tmp_path / "images.png", title="a title")
    assert [cell.get_xlabel() for cell in figures[0].axes] == ["not: ugly", ""]
    draw_loss_curve([{"step": 19, "loss": 0.5}], tmp_path / "loss.png")
    (axes,) = figures[1].axes
    assert axes.lines[0].get_marker() == "o"
    assert all(tick == int(tick) for tick in axes.get_xticks())


def titles(monkeypatch: pytest.MonkeyPatch, path: Path, *samples: DrawnSample) -> list[str]:
    """Draw, fail at any warning, and return the titles of the columns."""
    figures: list[Figure] = []
    real = image_grid._save

    def save(figure: Figure, path: Path) -> None:
        figures.append(figure)
        real(figure, path)

    monkeypatch.setattr(image_grid, "_save", save)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_grid(samples, path, title="a title")
    assert path.read_bytes().startswith(b"\x89PNG")
    return [axes.get_title() for axes in figures[0].axes[: len(samples)]]


def test_a_caption_that_no_font_has_is_replaced_by_the_samples_name_with_one_line_of_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    samples = [drawn(text, f"cats/{number}.png") for number, text in enumerate((CHINESE, JAPANESE, KOREAN, "a cat"))]
    with caplog.at_level(logging.WARNING):
        found = titles(monkeypatch, tmp_path / "images.png", *samples)
        draw_grid(samples, tmp_path / "again.png", title="a title")
    assert found == ["[cats/0.png]", "[cats/1.png]", "[cats/2.png]", "a cat"]
    (said,) = caplog.messages
    assert "images.json has the captions" in said
    assert "Noto Sans CJK" in said


def test_single_characters_that_no_font_has_are_question_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caption = "a dinosaur 🦖 on a hill, in the evening\x07 light ❤️"
    assert titles(monkeypatch, tmp_path / "p.png", drawn(caption)) == ["a dinosaur ? on a hill,\nin the evening light ❤"]


@pytest.mark.parametrize("name", ["Noto Sans CJK JP", "WenQuanYi Micro Hei", "Droid Sans Fallback"])
def test_an_installed_font_that_has_the_caption_is_used(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "wide.ttf", name, "".join(OTHERS))
    assert fonts_for("".join(OTHERS)) == (["DejaVu Sans", name], set())
    (chinese, *_, emoji) = titles(monkeypatch, tmp_path / "p.png", *map(drawn, OTHERS))
    assert chinese.startswith(CHINESE[:5])
    assert emoji == EMOJI


def test_a_font_installed_since_matplotlib_looked_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "any.ttf", "Noto Sans CJK JP", CHINESE)
    known = [entry for entry in font_manager.fontManager.ttflist if entry.name != "Noto Sans CJK JP"]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", known)
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda *_, **__: [str(tmp_path / "any.ttf")])
    for cached in (fonts.preferred_fonts, fonts._codes):
        cached.cache_clear()
    assert fonts_for(CHINESE) == (["DejaVu Sans", "Noto Sans CJK JP"], set())


def test_a_caption_of_wide_characters_is_broken_at_half_as_many_and_cut_with_a_mark() -> None:
    assert wrapped(CHINESE).replace("\n", "") == CHINESE
    lines = wrapped(2 * CHINESE).split("\n")
    assert [len(line) for line in lines[:-1]] == [COLUMNS // 2] * 3
    assert lines[-1].endswith(" …")
    assert wrapped("of twelve letters " * 9).endswith("\nof twelve letters of …")
    assert wrapped("a " + "long" * 9) == "a\nlonglonglonglonglonglonglo\nnglonglong"
    assert wrapped("costs $5 or $6") == "costs $5 or $6"
    assert wrapped("") == "(no caption)"


def test_a_run_leaves_the_captions_beside_the_images(folder: Path) -> None:
    path = folder / "chinese.store"
    rows = {"train/128x128": 9, "val/128x128": 3}
    made = [make_sample(f"{name}/{n}.png", name, (f"{CHINESE} {n}",)) for name, count in rows.items() for n in range(count)]
    add_to_store(path, made)
    asked = config(folder, store=(path,), max_steps=2, num_images=2, images_every=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Glyph")
        train(asked, ALONE)
    for file in (asked.output_dir / "images.json", asked.output_dir / "images" / "step-00000001.json"):
        for entry in (entries := json.loads(file.read_text(encoding="utf-8"))):
            assert entry["caption"] == f"{CHINESE} {entry['id'].removeprefix('val/128x128/').removesuffix('.png')}"
        assert len(entries) == 2


def test_prompts_are_drawn_in_rows_of_no_more_pixels_than_a_file_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A side of 65,536 px or more is refused by the libraries that write images."""
    monkeypatch.setattr(image_grid, "MAX_PX", 900)
    image = np.zeros((40, 8, 3), np.uint8)
    entries = [{"id": f"default/{n}", "caption": f"prompt {n}", "seed": 7, "guidance": None} for n in range(1, 7)]
    samples = [DrawnSample(entry=entry, real=None, generated=image) for entry in entries]
    draw_grid(samples, tmp_path / "grid.png", title="a title")
    with Image.open(tmp_path / "grid.png") as drawn:
        assert 850 < drawn.height == max(drawn.size) <= 900
    assert json.loads((tmp_path / "grid.json").read_bytes()) == entries
