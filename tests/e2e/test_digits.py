"""The whole chain, from image files to drawn images, held by what a classifier of the real digits makes of the drawn ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from tests.commands import ROOT, spawn


@pytest.mark.slow
def test_drawn_digits_are_those_that_were_asked_for(tmp_path: Path) -> None:
    ran = spawn(["bash", ROOT / "demo" / "run_digits", tmp_path], OMP_NUM_THREADS="2")
    assert ran.code == 0, ran.out + ran.err
    right, asked = map(int, re.findall(r"^(\d+) of (\d+) drawn digits are what was asked", ran.out, re.MULTILINE)[0])
    assert asked == 80
    assert right >= 0.9 * asked
    with Image.open(tmp_path / "run" / "digits.png") as sheet:
        assert sheet.size[0] > sheet.size[1] > 300
    for number in range(asked):  # each drawn digit is a file of its own
        assert (tmp_path / "run" / "images" / "step-00000540" / f"{number + 1:02}.png").exists()
