"""The log of a long run: lines that say how far it is and what holds it up, and none of a short one."""

from __future__ import annotations

import io
import sys

import pytest

from bucketline.ingest import progress
from bucketline.ingest.parallel.ranks import PackRanks
from bucketline.ingest.parallel.signals import Interrupts
from bucketline.ingest.pipeline.stage_timer import DECODE, ENCODE, WRITE, StageTimer, slowest_of


def test_a_log_has_a_line_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stages = StageTimer(on_shared_cores=lambda: False)
    stages.add(ENCODE, 1.0)
    stages.add(DECODE, 0.5)
    ranks = PackRanks(rank=0, world_size=2, interrupts=Interrupts())
    with progress.packing_progress(10, ranks, "pack", lambda: f"slowest: {stages.slowest}") as on_image:
        on_image()
        monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
        on_image()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pack (rank 0 of 2): 2 of 10, ")
    assert "images/s" in err
    assert err.endswith("min left, slowest: decode\n")


def test_a_terminal_that_takes_no_bar_has_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", stderr := Terminal())
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with progress.counting_progress("scan", 2) as on_image:
        on_image()
    assert stderr.getvalue().startswith("scan: 1 of 2, ")


def test_a_short_run_leaves_no_line_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.counting_progress("scan", 2) as on_image:
        on_image()
        on_image()
    assert capsys.readouterr() == ("", "")


def test_only_the_first_rank_reports(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    ranks = PackRanks(rank=1, world_size=2, interrupts=Interrupts())
    with progress.packing_progress(10, ranks, "pack") as on_image:
        on_image()
    assert capsys.readouterr() == ("", "")


def test_the_slowest_stage_is_the_one_that_is_waited_for() -> None:
    waits = {DECODE: 0.0, ENCODE: 10.0, WRITE: 2.0}
    assert slowest_of(waits, on_shared_cores=False) == WRITE
    assert slowest_of(waits, on_shared_cores=True) == ENCODE
    assert slowest_of({DECODE: 11.0, ENCODE: 10.0}, on_shared_cores=True) == DECODE
    assert slowest_of({}, on_shared_cores=False) == ENCODE


def test_what_is_long_ago_is_forgotten() -> None:
    stages = StageTimer(on_shared_cores=lambda: False)
    stages.add(DECODE, 8.0)
    for _ in range(100):
        stages.add(ENCODE, 1.0)
    assert stages.slowest == ENCODE
    assert stages.seconds == {DECODE: 8.0, ENCODE: 100.0, WRITE: 0.0}
