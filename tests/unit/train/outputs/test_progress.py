"""The progress of a run on a terminal and in a log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.train.log import ProgressLine

if TYPE_CHECKING:
    import pytest

    from bucketline.typed_json import Json

LINE: dict[str, Json] = {"step": 9, "loss": 0.51234, "samples_per_s": 12.34, "data_wait_fraction": 0.012}


def shown(capsys: pytest.CaptureFixture[str], line: dict[str, Json], *, talks: bool = True) -> str:
    progress = ProgressLine(talks=talks)
    progress.begin(0, 10)
    progress.window(line)
    progress.close()
    return capsys.readouterr().err


def test_a_windows_line_says_loss_rate_data_wait_and_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, LINE) == "step 10 of 10  loss 0.5123  12.3 samples/s  data wait 1.2%  0:00:00 left\n"


def test_mfu_is_shown_where_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert "MFU 42.0%" in shown(capsys, {**LINE, "mfu": 0.42})


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, LINE, talks=False) == ""


def test_force_color_draws_no_bar_into_a_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert shown(capsys, LINE).startswith("step 10 of 10  ")
