"""Windows of steps, and cutting the file back."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest
import torch

from bucketline.errors import TrainError
from bucketline.train.metrics_file import WindowState, cut_back, read_metrics
from bucketline.train.outputs.metrics import Scale, WindowRecorder
from bucketline.train.step import StepOutcome
from tests.unit.train.tiny_run import config

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.typed_json import Json


def outcome(loss: float, bucket: str = "train/64x64", norm: float = 1.0) -> StepOutcome:
    return StepOutcome(bucket=bucket, learning_rate=0.1, loss=torch.tensor(loss), grad_norm=torch.tensor(norm))


def recorder(ranks: int = 1, begun: WindowState | None = None) -> WindowRecorder:
    """Record windows of two steps of 4 samples, or 6 of the larger bucket; rank r's losses are larger by r."""
    scale = Scale(num_devices=2, samples={"train/64x64": 4, "train/96x64": 6}, flops={}, peak_flops=None)
    return WindowRecorder(
        log_every=2, scale=scale, gather=lambda losses: torch.cat([losses + rank for rank in range(ranks)]), begun=begun
    )


def add(windows: WindowRecorder, first: int, *losses: float) -> list[dict[str, Json] | None]:
    return [windows.add(step, outcome(loss), took=(10.0, 10.5), wait_s=0.1) for step, loss in enumerate(losses, first)]


def test_a_windows_line_comes_when_the_next_one_ends() -> None:
    windows = recorder()
    first = add(windows, 0, 1.0, 2.0, 3.0, 4.0)
    assert first[:3] == [None, None, None]
    assert first[3] == {
        "step": 1,
        "loss": 1.5,
        "skipped_steps": 0,
        "samples": 8,
        "samples_per_s": 8.0,
        "samples_per_s_per_device": 4.0,
        "data_wait_fraction": pytest.approx(0.2),
        "step_s_p50": 0.5,
        "step_s_p99": 0.5,
        "lr": 0.1,
        "grad_norm": 1.0,
        "buckets": {"train/64x64": 2},
    }
    last = windows.flush()
    assert last is not None
    assert (last["step"], last["loss"]) == (3, 3.5)


def test_a_loss_is_the_mean_over_ranks() -> None:
    windows = recorder(ranks=3)
    add(windows, 0, 1.0, 2.0)
    line = windows.flush()
    assert line is not None
    assert line["loss"] == 2.5


def test_a_window_counts_the_steps_of_each_bucket() -> None:
    windows = recorder()
    windows.add(0, outcome(1.0, "train/96x64"), took=(0.0, 1.0), wait_s=0)
    windows.add(1, outcome(1.0, "train/64x64"), took=(0.0, 1.0), wait_s=0)
    line = windows.flush()
    assert line is not None
    assert line["buckets"] == {"train/64x64": 1, "train/96x64": 1}
    assert line["samples"] == 10


def test_counted_flops_give_a_rate_and_its_share_of_the_peak() -> None:
    scale = Scale(num_devices=2, samples={"a": 4, "b": 4}, flops={"a": 2e12, "b": 6e12}, peak_flops=8e12)
    windows = WindowRecorder(log_every=2, scale=scale, gather=lambda losses: losses)
    windows.add(0, outcome(1.0, "a"), took=(0.0, 0.5), wait_s=0)
    windows.add(1, outcome(1.0, "b"), took=(1.0, 1.5), wait_s=0)
    line = windows.flush()
    assert line is not None
    assert (line["tflops_per_s_per_device"], line["mfu"]) == (4.0, 0.5)


def test_a_window_cut_by_a_checkpoint_goes_on_exactly() -> None:
    whole, first = recorder(), recorder()
    add(whole, 0, 0.1, 0.7)
    add(first, 0, 0.1)
    state = first.state()
    assert state is not None
    second = recorder(begun=state)
    add(second, 1, 0.7)
    assert second.flush() == whole.flush()


def test_taking_the_state_does_not_change_the_window() -> None:
    plain, watched = recorder(), recorder()
    add(plain, 0, 0.1, 0.7)
    add(watched, 0, 0.1)
    watched.state()
    add(watched, 1, 0.7)
    assert watched.flush() == plain.flush()


def test_a_partial_window_has_a_line_at_the_end_of_a_run() -> None:
    windows = recorder()
    add(windows, 0, 1.0, 2.0, 5.0)
    windows.flush()
    line = windows.partial()
    assert line is not None
    assert (line["step"], line["loss"], line["samples"]) == (2, 5.0, 4)


def test_without_a_step_there_is_no_partial_window() -> None:
    windows = recorder()
    add(windows, 0, 1.0, 2.0)
    assert windows.partial() is None


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (float("inf"), 1.0)])
def test_what_is_no_number_is_an_error_that_names_step_and_bucket(loss: float, norm: float) -> None:
    windows = recorder()
    windows.add(6, outcome(1.0), took=(0.0, 1.0), wait_s=0)
    windows.add(7, outcome(loss, "train/96x64", norm), took=(0.0, 1.0), wait_s=0)
    with pytest.raises(TrainError, match=r"step 7 \(in the window of steps 6 to 7\), bucket train/96x64"):
        windows.flush()


def test_what_is_no_number_never_gets_into_a_state() -> None:
    windows = recorder()
    windows.add(6, outcome(float("nan")), took=(0.0, 1.0), wait_s=0)
    with pytest.raises(TrainError, match="step 6"):
        windows.state()


def test_a_step_without_a_finite_gradient_counts_in_no_mean_and_five_in_a_row_are_an_error() -> None:
    windows = recorder()
    nan, norms = float("nan"), (1.0, *[float("inf")] * 4, 3.0, *[float("nan")] * 5)
    lines = []
    for step, norm in enumerate(norms[:-1]):
        lines.append(windows.add(step, outcome(nan if math.isnan(norm) else 1.0, norm=norm), took=(0.0, 1.0), wait_s=0))
    found = [(line["loss"], line["grad_norm"], line["skipped_steps"]) for line in lines if line]
    assert found == [(1.0, 1.0, 1), (None, None, 2), (1.0, 3.0, 1), (None, None, 2)]
    windows.flush()
    assert windows.skipped
    windows.add(10, outcome(nan, norm=nan), took=(0.0, 1.0), wait_s=0)
    with pytest.raises(TrainError, match=r"^step 6 \(bucket train/64x64\): the loss is nan .* 5 in a row"):
        windows.state()


def write(folder: Path, *lines: dict[str, Json]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_cutting_back_leaves_what_an_uninterrupted_run_would_have(tmp_path: Path) -> None:
    kept: list[dict[str, Json]] = [{"step": 0, "val_loss": 1.0}, {"step": 3, "loss": 1.0}, {"step": 4, "val_loss": 1.0}]
    cut_short: dict[str, Json] = {"step": 5, "loss": 1.0}
    made_at_the_end: dict[str, Json] = {"step": 6, "val_loss": 1.0}
    later: list[dict[str, Json]] = [{"step": 7, "loss": 1.0}, {"step": 8, "val_loss": 1.0}]
    write(tmp_path, *kept, made_at_the_end, cut_short, *later)
    asked = config(tmp_path, output_dir=tmp_path, validate_every=4)
    assert cut_back(asked, 6, WindowState(first_step=4)) == [0, 4]
    assert read_metrics(tmp_path) == kept


def test_validations_before_a_resume_stay_whatever_is_scheduled_from_there_on(tmp_path: Path) -> None:
    before: list[dict[str, Json]] = [{"step": step, "val_loss": 1.0} for step in (0, 2, 4)]
    write(tmp_path, *before)
    assert cut_back(config(tmp_path, output_dir=tmp_path, validate_every=None), 5, None) == [0, 2, 4]
    assert read_metrics(tmp_path) == before


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"step": 1, "loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    assert not cut_back(config(tmp_path, output_dir=tmp_path), 4, None)
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 1.0}]
