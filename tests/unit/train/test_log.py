"""Windows of steps, against a plain reckoning of them; cutting the file back; progress, and what trackers get."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bucketline.train.log import (
    NotFiniteError,
    ProgressLine,
    RunLog,
    RunStatus,
    StepWork,
    WindowRecorder,
    cut_back,
    read_metrics,
    write_status,
)
from bucketline.train.step import StepOutcome
from tests.unit.train.tiny_run import config

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.typed_json import Json

SAMPLES, FLOPS = {"train/64x64": 4, "train/96x64": 6}, {"train/64x64": 2e12, "train/96x64": 6e12}
RANKS, SECONDS, WAITED = 3, 0.5, 0.1
NAN, INF = math.nan, math.inf


class Step(NamedTuple):
    """What a step measures: a loss of rank 0, those of rank r are larger by r."""

    bucket: str
    loss: float
    norm: float


def outcome_of(one: Step) -> StepOutcome:
    return StepOutcome(bucket=one.bucket, learning_rate=0.1, loss=torch.tensor(one.loss), grad_norm=torch.tensor(one.norm))


MEASURED = (
    [(0.5, 1.0), (1.0, 0.25), (2.25, 1.0)] * 5 + [(1.0, INF), (NAN, INF), (1.0, NAN), (NAN, NAN)] * 3 + [(NAN, 1.0), (INF, 1.0)]
)
steps_of_a_run = st.lists(
    st.builds(lambda bucket, measured: Step(bucket, *measured), st.sampled_from(sorted(SAMPLES)), st.sampled_from(MEASURED)),
    max_size=24,
)


def reckoned(steps: list[Step], first: int, log_every: int, ends: set[int]) -> list[dict[str, Any]]:
    """Return the lines of all windows, which also end before each of `ends`, up to an error, which is a line of its step."""
    lines: list[dict[str, Any]] = []
    in_a_row = 0
    for _, numbered in groupby(
        enumerate(steps, first), lambda pair: (pair[0] // log_every, sum(first + end <= pair[0] for end in ends))
    ):
        numbers, window = map(list, zip(*numbered, strict=True))
        taken = [math.isfinite(one.norm) and math.isfinite(one.loss) for one in window]
        for number, one, is_taken in zip(numbers, window, taken, strict=True):
            in_a_row = 0 if is_taken else in_a_row + 1
            if math.isfinite(one.norm) and not is_taken:
                return [*lines, {"error": f"step {number} (in the window"}]
            if in_a_row == 5:
                return [*lines, {"error": f"step {number - 4} (bucket {steps[number - first - 4].bucket})"}]
        kept = [one for one, is_taken in zip(window, taken, strict=True) if is_taken]
        samples, seconds = sum(SAMPLES[one.bucket] for one in window), SECONDS * len(window)
        rate = sum(FLOPS[one.bucket] for one in window) / seconds / 2
        lines.append({
            "step": numbers[-1], "skipped_steps": len(window) - len(kept), "samples": samples, "lr": 0.1,
            "loss": fmean(one.loss + 1 for one in kept) if kept else None,
            "grad_norm": fmean(one.norm for one in kept) if kept else None,
            "samples_per_s": samples / seconds, "samples_per_s_per_device": samples / seconds / 2,
            "data_wait_fraction": pytest.approx(WAITED / SECONDS), "step_s_p50": SECONDS, "step_s_p99": SECONDS,
            "buckets": {name: n for name in SAMPLES if (n := sum(one.bucket == name for one in window))},
            "tflops_per_s_per_device": rate / 1e12, "mfu": rate / 8e12,
        })  # fmt: skip
    return lines


@given(
    steps=steps_of_a_run,
    first=st.integers(0, 5),
    log_every=st.integers(1, 4),
    validated=st.sets(st.integers(0, 23)),
    saved=st.sets(st.integers(1, 23), max_size=3),
)
def test_lines_are_those_of_a_plain_reckoning_each_one_window_late(
    steps: list[Step], first: int, log_every: int, validated: set[int], saved: set[int]
) -> None:
    """Lines are written before a validation's, and a checkpoint ends a window."""
    expected = reckoned(steps, first, log_every, saved)

    work = StepWork(num_devices=2, samples=SAMPLES, flops=FLOPS, peak_flops=8e12)
    windows = WindowRecorder(
        log_every=log_every, work=work, gather=lambda own: torch.cat([own + rank for rank in range(RANKS)])
    )
    found, complete = list[dict[str, Any]](), 0
    try:
        for number, one in enumerate(steps):
            if number in saved:
                found += windows.end()
                assert windows.end() == []
                complete = len(found)
            if number in validated:
                found += windows.flush()
            lines = windows.add(first + number, outcome_of(one), took=(10.0, 10.0 + SECONDS), wait_s=WAITED)
            is_complete = (first + number + 1) % log_every == 0
            complete += is_complete
            assert not lines or is_complete, "only when the next window ends"
            found += lines
            assert len(found) >= complete - 1
        found += windows.end()
    except NotFiniteError as error:
        assert str(error).startswith(str(expected[-1].get("error"))), error  # noqa: PT017 - the lines before it count too
        assert found == expected[: len(found)]
        assert len(found) <= len(expected) - 1
    else:
        assert found == expected


def test_a_window_of_skipped_steps_has_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    work = StepWork(num_devices=2, samples=SAMPLES, peak_flops=None)
    windows = WindowRecorder(log_every=2, work=work, gather=lambda own: torch.cat([own, own.nan_to_num(0.5)]))
    for step, loss, seconds in ((6, 1.0, 3.0), (7, NAN, 1.0)):
        windows.add(step, outcome_of(Step("train/64x64", loss, INF)), took=(0.0, seconds), wait_s=0)
    (line,) = windows.flush()
    assert (line["loss"], "mfu" in line, len(windows.skipped)) == (None, False, 2)
    assert (line["step_s_p50"], line["step_s_p99"]) == (1.0, 3.0), "by nearest rank"
    assert "step 6 (bucket train/64x64): the loss is 1.0 and the gradient's norm inf, expected finite numbers" in caplog.text
    assert "step 7 (bucket train/64x64): the loss is nan and the gradient's norm inf, expected finite numbers" in caplog.text


@pytest.mark.parametrize(
    ("steps", "validate_every", "done", "kept"),
    [  # a validation is a negative step, -8 of step 8, or 0; `kept` are those that an uninterrupted run would have written
        ((0, 3, -4, 5, -6, 7, -8), 4, 6, (0, 3, -4, 5)),
        ((0, 3, -4, 4, -8), 4, 4, (0, 3, -4)),
        ((0, -2, -4), None, 5, (0, -2, -4)),
        ((1, "cut"), 4, 4, (1,)),
    ],
)
def test_cutting_back_leaves_what_an_uninterrupted_run_would_have(
    tmp_path: Path, steps: tuple[object, ...], validate_every: int | None, done: int, kept: tuple[int, ...]
) -> None:
    def line(step: object) -> dict[str, Json]:
        assert isinstance(step, int)
        return {"step": -step, "val_loss": 1.0} if step <= 0 else {"step": step, "loss": 1.0}

    text = "".join('{"step": 2, "lo' if one == "cut" else json.dumps(line(one)) + "\n" for one in steps)
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    asked = config(tmp_path, output_dir=tmp_path, validate_every=validate_every)
    validated = cut_back(asked, done)
    assert validated == [-one for one in kept if one <= 0]
    assert read_metrics(tmp_path) == [line(one) for one in kept]


@pytest.mark.parametrize(
    ("changes", "talks", "shown"),
    [
        ({}, True, "step 10 of 30  loss 0.5123  12.3 samples/s  data wait 1.2 %  0:00:08 left\n"),
        ({"mfu": 0.42}, True, "step 10 of 30  loss 0.5123  12.3 samples/s  data wait 1.2 %  MFU 42.0 %  0:00:08 left\n"),
        ({"step": 29}, True, "step 30 of 30  loss 0.5123  12.3 samples/s  data wait 1.2 %\n"),
        ({"step": 1, "passed_s": 0.5, "mfu": 0.42}, True, "step 2 of 30  loss 0.5123\n"),
        (
            {"val_loss": 1.034, "val_zero_loss": 1.0},
            True,
            "validation after 9 steps: loss 1.0340, 103.4 % of the zero baseline\n",
        ),
        ({}, False, ""),
    ],
)
def test_a_windows_line_says_loss_rate_data_wait_and_the_time_left_also_in_a_log_with_colour_forced(
    changes: dict[str, Json],
    talks: bool,  # noqa: FBT001 - a parameter
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    progress = ProgressLine(talks=talks)
    passed_s = cast("float", changes.get("passed_s", 4.0))
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    progress.begin(0, 30)
    monkeypatch.setattr("time.monotonic", lambda: passed_s)
    progress.window({"step": 9, "loss": 0.51234, "samples_per_s": 12.34, "data_wait_fraction": 0.012, **changes})
    progress.close()
    assert capsys.readouterr().err == shown


def test_a_warning_is_told_once_and_a_long_line_continues_indented_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressLine(talks=True)
    progress.console = Console(file=sys.stderr, width=20, force_terminal=True, no_color=True)
    with progress:
        for _ in range(14):
            logging.getLogger("bucketline.train.images").warning("no images: %s has no VAE", "a")
    assert capsys.readouterr().err.split("\n")[:2] == ["warning: no images:", "  a has no VAE"]


def test_a_tracker_gets_windows_and_validations_at_the_steps_done_with_nested_numbers_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, dict[str, Any]]] = []
    configs: list[dict[str, Any]] = []
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(accelerator, "log", lambda values, step: sent.append((step, values)))
    monkeypatch.setattr(accelerator, "init_trackers", lambda _, config: configs.append(config))
    asked = config(tmp_path, output_dir=tmp_path, seed=3, clip_norm=None)
    log = RunLog(asked, accelerator, ProgressLine(talks=False))
    log.write({"step": 9, "loss": 0.5, "buckets": {"train/64x64": 10}, "samples_per_s": 2.0, "data_wait_fraction": 0.0}, 10)
    log.write({"step": 10, "val_loss": 0.4, "val_zero_loss": 1.0, "val_loss_per_timestep": {"250": 0.3}}, 10)
    log.close()
    assert {"seed": 3, "clip_norm": "None", "store": str([str(path) for path in asked.store])}.items() <= configs[0].items()
    (first, window), (second, validation) = sent
    assert (first, second) == (10, 10)
    assert {"loss": 0.5, "buckets/train/64x64": 10}.items() <= window.items()
    assert "step" not in window
    assert validation == {"val_loss": 0.4, "val_zero_loss": 1.0, "val_loss_per_timestep/250": 0.3}


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b"[" * 100_000])
def test_the_status_of_a_run_that_continues_waits_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    write_status(tmp_path, RunStatus.RUNNING, 3)
    assert not synced
    assert json.loads((tmp_path / "status.json").read_bytes())["step"] == 3
    write_status(tmp_path, RunStatus.FAILED, 4, "the first")
    assert synced
    write_status(tmp_path, RunStatus.FAILED, 4, "the next")
    assert json.loads((tmp_path / "status.json").read_bytes())["reason"] == "the first"
    write_status(tmp_path, RunStatus.RUNNING, 2, begins=True)
    (tmp_path / "status.json").write_bytes(damage)
    write_status(tmp_path, RunStatus.RUNNING, 2)
    assert json.loads((tmp_path / "status.json").read_bytes()) == {"state": "running", "step": 2, "reason": None}
