"""What each dtype of text costs on real captions. The demo itself is run by `.ci/run`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT, spawn


@pytest.mark.slow
def test_quantised_text_costs_little_on_real_captions_and_less_in_training(tmp_path: Path) -> None:
    script, out = ROOT / "demo" / "text_dtype.py", tmp_path / "out"
    done = spawn([sys.executable, script, out, "--steps", "4", "--batch-size", "2"]).done()
    relative = {
        name: float(percent)
        for name, percent in re.findall(r"^(F16|BF16|I8|F8_E4M3) +[0-9.]+ +([0-9.]+)%", done.out, re.MULTILINE)
    }
    assert 0 < relative["F16"] < relative["BF16"] < relative["I8"] < 1 < relative["F8_E4M3"] < 4
    f16, i8 = (int(number.replace(",", "")) for number in re.findall(r"(?:F16|I8) ([0-9,]+) bytes", done.out))
    assert i8 < 0.55 * f16
    both = re.search(r"^all: ([0-9.]+) and ([0-9.]+); validation: ([0-9.]+) and ([0-9.]+)", done.out, re.MULTILINE)
    assert both is not None
    first, second, val_first, val_second = map(float, both.groups())
    assert second == pytest.approx(first, rel=0.01)
    assert val_second == pytest.approx(val_first, rel=0.01)
