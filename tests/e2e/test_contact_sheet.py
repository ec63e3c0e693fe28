"""The contact sheet of real photographs, by the installed command: one file that shows what each crop loses."""

from __future__ import annotations

import re
from pathlib import Path

from bucketline.bench.fixtures.photographs import PHOTOGRAPHS
from tests.commands import BIN, spawn
from tests.pages import parsed
from tests.photographs import photograph


def test_the_sheet_of_photographs_and_a_strip(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for file in PHOTOGRAPHS:
        photograph(file).save(photos / f"{file.rpartition('/')[2].partition('.')[0]}.jpg")
    photograph(PHOTOGRAPHS[0]).resize((20_000, 100)).save(photos / "strip.png")
    ran = spawn([BIN / "ingest", "scan", photos, "--grid", "square:512", "-o", tmp_path / "sheet.html"]).done()
    assert "strip.png: too much cropped away (100x20000 px, in its bucket of 512x512 the crop would lose 99.5 % of" in ran.out
    page = (tmp_path / "sheet.html").read_text(encoding="utf-8")
    assert page.count("<img ") == len(PHOTOGRAPHS) + 1
    losses = [float(share) for share in re.findall(r"px, ([0-9.]+) % cropped away[^<]*</span>", page)]
    assert losses == [*sorted(losses[:-1], reverse=True), 99.5]
    assert losses[0] == 33.5  # a cat of 300x451 px
    parsed(tmp_path / "sheet.html")
    assert not list(tmp_path.glob("*.tmp"))
