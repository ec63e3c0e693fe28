"""Three ranks under torchrun, one of which is killed; the store that the next run finishes is that of one process.

What else can happen to a rank, and without a launcher: `tests/fault/test_ranks_that_end.py`; at random moments:
the family `ranks` of `tests/fault/test_faults.py`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.commands import call, torchrun
from tests.fault.same_store import compare
from tests.models import SMALL, write_images

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_a_rank_killed_under_torchrun_is_named_before_its_trace_and_the_next_run_finishes(tmp_path: Path, model: Path) -> None:
    write_images(tmp_path / "photos", 60)
    (tmp_path / "photos" / "broken.png").write_bytes(b"no image")
    options = ("--model", model, *SMALL, "--batch-size", 2, "--json")
    asked = ("pack", tmp_path / "photos", tmp_path / "s", *options)
    ran = torchrun(3, "-m", "tests.fault.noted_pack", tmp_path / "s.committed", "1:row:9:kill-late", *asked)
    assert (ran.code, ran.out) == (1, "")
    before, named, after = ran.err.partition("error: rank 1 (pid ")
    assert named
    assert "Traceback" not in before
    assert re.match(r"\d+ on \S+\) ended without a message: .*with \d+ images? encoded and committed; rerun the command", after)
    assert "Signal 9 (SIGKILL)" in after  # torchrun's own words
    again = call("ingest", *asked).done()
    assert again.json["unchanged"] > 0
    assert again.json["packed"] + again.json["unchanged"] == 60
    assert call("ingest", "pack", tmp_path / "photos", tmp_path / "whole", *options).code == 0
    compared = compare(tmp_path / "s", tmp_path / "whole")
    assert (compared.samples, compared.faults) == (60, [])
