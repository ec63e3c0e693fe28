"""The log of a long run: lines that say how far it is and what holds it up, and none of a short one."""

from __future__ import annotations

import io
import json
import sys

import pytest

from bucketline.ingest import progress
from bucketline.ingest.images.crop import CropLoss, note_crop_loss
from bucketline.ingest.images.decode import Reason, RejectedError
from bucketline.ingest.parallel.ranks import PackRanks
from bucketline.ingest.parallel.signals import Interrupts
from bucketline.ingest.pipeline.pool import DECODE, ENCODE, WRITE, StageTimer, slowest_of
from bucketline.ingest.summary import RunSummary, by_reason, check_identity, joined_summaries, rejects_as_lines


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


def test_accounts_of_several_ranks_are_added_up_in_every_part() -> None:
    one = RunSummary(packed=3, unchanged=1, without_caption=2, enlarged=1, captions_beyond=["a"], captions_truncated=4)
    other = RunSummary(packed=1, unchanged=5, without_caption=1, enlarged=3, captions_beyond=["b"], dropped=["c"])
    other.reject("z.png", RejectedError(Reason.EMPTY, "0 bytes"))
    one.reject("é\n.png", RejectedError(Reason.TOO_SMALL, "1x1"))
    one.reject("a.png", RejectedError(Reason.EMPTY, "0 bytes"))
    for account, bucket, lost in ((one, "a", 0.0), (one, "a", 0.25), (other, "a", 0.5), (other, "b", 0.25)):
        note_crop_loss(account.crop_losses, bucket, lost)
    whole = joined_summaries([one, other])
    assert whole.total == 3 + 1 + 1 + 5 + 3
    assert (whole.without_caption, whole.enlarged, whole.captions_truncated) == (3, 4, 4)
    assert (whole.captions_beyond, whole.dropped) == (["a", "b"], ["c"])
    check_identity(13, whole)
    assert whole.crop_losses == {"a": CropLoss(images=3, total=0.75, most=0.5), "b": CropLoss(images=1, total=0.25, most=0.25)}
    assert by_reason(whole) == {"empty file": 2, "too small": 1}
    lines = [json.loads(line) for line in rejects_as_lines(whole).splitlines()]
    assert [line["id"] for line in lines] == ["a.png", "z.png", "é\n.png"]
    assert set(lines[0]) == {"id", "reason", "detail"}
