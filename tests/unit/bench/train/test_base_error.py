"""The errors of a quantised base, for the user's own store and model; nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from bucketline.bench.cases.train import TrainBase
from bucketline.bench.harness import run_case
from tests.unit.bench.measured import measured
from tests.unit.train.tiny_run import make_training_store, write_unet


def test_more_bits_change_less_and_take_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_training_store(tmp_path / "tiny.store")
    write_unet(tmp_path / "model")
    before = sorted(tmp_path.rglob("*"))
    asked = ("--store", tmp_path / "tiny.store", "--model", tmp_path / "model", "--batch-size", 4, "--repeats", 2)
    found = {name: result["median"] for name, result in measured(TrainBase, capsys, *asked).items()}
    assert "error of weights, none" not in found
    assert 0 < found["error of weights, int8"] < found["error of weights, fp8"] < found["error of weights, nf4"] < 0.15
    assert 0 < found["error of predictions, int8"] < found["error of predictions, nf4"] < 0.15
    assert found["loss, none"] == pytest.approx(found["loss, nf4"], rel=0.02)  # of the same batches
    held = [found[f"bytes of the frozen weights, {base}"] for base in ("nf4", "int8", "none")]
    assert held == sorted(set(held))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_store_without_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_case(TrainBase, ["--store", str(tmp_path)]) == 2
    assert "give both or neither" in capsys.readouterr().err
