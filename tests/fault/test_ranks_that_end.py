"""Several ranks of one pack, one of which fails, is killed or told to stop: the others end too, and nothing is lost.

Here the ranks are forked, without a launcher: what they do they do by themselves. Under torchrun: the family `ranks`.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from bucketline.command_line import launch_name
from bucketline.store import Store
from tests.commands import ROOT, spawn
from tests.conftest import once
from tests.fault.same_store import committed_ids, compare, noted_ids
from tests.models import SMALL, write_images

NUM_IMAGES = 60
BROKEN = {"empty.png": b"", "letters.jpg": b"no image"}
RUNS = (
    "one,1,-",
    "two,2,-",
    "three,3,-",
    "killed,3,1:row:9:kill",
    "killed,2,-",
    "killed_first,2,0:row:9:kill",
    "killed_first,3,-",
    "killed_at_the_end,2,1:gather:kill",
    "killed_at_the_end,1,-",
    "killed_while_loading,2,1:load:kill",
    "full_disk,3,2:row:9:disk",
    "full_disk,2,-",
    "full_disk_of_first,2,0:row:9:disk",
    "sealing_at_the_end,2,1:end:sealing",
    "sealing_at_the_end,3,-",
    "sealing_at_the_end_of_first,2,0:end:sealing",
    "sealing_at_the_end_of_one,1,0:end:sealing",
    "defect,2,1:row:9:defect",
    "other_model,2,1:load:model",
    "defect_while_listing,3,0:list:defect",
    "told,3,1:row:9:term",
    "interrupted,2,0:row:9:ctrl-c",
    "interrupted_by_terminal_and_launcher,2,1:row:9:two-ctrl-c",
    "interrupted_twice,1,0:row:9:two-ctrl-c",
    "told_while_listing,2,0:list:term",
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Any]:
    """The folder, and by the run's own words what came of it; and what was committed after it."""
    with once(tmp_path_factory, "ranks-that-end") as (folder, is_first):
        if is_first:
            write_images(folder / "photos", NUM_IMAGES)
            for name, data in BROKEN.items():
                (folder / "photos" / name).write_bytes(data)
            asked = ["pack", folder / "photos", folder / "{}", "--model", model, *SMALL, "--batch-size", 2, "--json"]
            done = spawn([sys.executable, "-m", "tests.fault.ranks_at_moments", *RUNS, "--", *asked], PYTHONPATH=str(ROOT))
            assert done.code == 0, done.err
            (folder / "ran.json").write_text(done.out, encoding="utf-8")
    return {"folder": folder, **dict(zip(RUNS, json.loads((folder / "ran.json").read_bytes()), strict=True))}


def said(run: Mapping[str, Any]) -> str:
    """Return what all ranks wrote to stderr, without the progress bar."""
    return "".join(line for err in run["err"] for line in err.splitlines(keepends=True) if not line.startswith("pack ("))


@pytest.mark.parametrize(
    "name", ["two", "three", "killed", "killed_first", "killed_at_the_end", "full_disk", "sealing_at_the_end"]
)
def test_however_many_ranks_packed_and_however_they_ended_the_finished_store_is_the_same(
    name: str, ran: dict[str, Any]
) -> None:
    last = ran[[run for run in RUNS if run.startswith(f"{name},")][-1]]
    assert set(last["codes"]) == {0}, last
    summary = json.loads(last["out"][0])
    assert [out for out in last["out"][1:] if out] == []  # one summary, from one place
    assert (summary["found"], summary["rejected"]) == (NUM_IMAGES + len(BROKEN), len(BROKEN))
    compared = compare(ran["folder"] / name, ran["folder"] / "one")
    assert (compared.samples, compared.faults) == (NUM_IMAGES, [])
    rejects = [(ran["folder"] / store / "rejects.jsonl").read_text(encoding="ascii") for store in (name, "one")]
    assert rejects[0] == rejects[1]


@pytest.mark.parametrize(("run", "rank"), [("killed,3,1:row:9:kill", 1), ("killed_at_the_end,2,1:gather:kill", 1)])
def test_a_rank_that_is_killed_is_named_once_and_the_others_stop(run: str, rank: int, ran: dict[str, Any]) -> None:
    found = ran[run]
    assert found["codes"] == [-signal.SIGKILL if r == rank else 1 for r in range(len(found["codes"]))]
    assert re.fullmatch(
        rf"error: rank {rank} \(pid \d+ on \S+\) ended without a message: killed, or out of memory; the other ranks have "
        r"stopped, (with \d+ images encoded and committed|before anything was encoded); rerun the command, "
        r"with any number of ranks, to continue\n",
        said(found),
    )


def test_ranks_without_their_first_stop_by_themselves_and_name_it(ran: dict[str, Any]) -> None:
    found = ran["killed_first,2,0:row:9:kill"]
    assert found["codes"] == [-signal.SIGKILL, 1]
    assert re.match(r"error: rank 0 \(pid \d+ on \S+\) ended without a message: .*; rank 1 has stopped, ", found["err"][1])


def test_a_rank_that_is_killed_before_anything_is_encoded_is_named_too(ran: dict[str, Any]) -> None:
    found = ran["killed_while_loading,2,1:load:kill"]
    assert found["codes"] == [1, -signal.SIGKILL]
    assert re.match(r"error: rank 1 \(.*; the other ranks have stopped, before anything was encoded; ", said(found))


def test_a_rank_that_fails_stops_the_others_soon_and_its_cause_is_said_once(ran: dict[str, Any]) -> None:
    found = ran["full_disk,3,2:row:9:disk"]
    assert found["codes"] == [1, 1, 1]
    (line,) = said(found).splitlines()
    assert re.match(
        r"error: rank 2: \S+r0002-\d+\.lmdb cannot be written: .*disk is full .*make room and rerun the command \(the",
        line,
    )
    again = json.loads(ran["full_disk,2,-"]["out"][0])
    assert 0 < again["unchanged"] < NUM_IMAGES  # what was committed is adopted, and the others did not pack all of theirs


def test_rank_0_that_fails_says_why_and_the_others_end_with_it(ran: dict[str, Any]) -> None:
    found = ran["full_disk_of_first,2,0:row:9:disk"]
    assert found["codes"] == [1, 1]
    (line,) = said(found).splitlines()
    assert re.match(r"error: \S+r0000-\d+\.lmdb cannot be written: .*; the disk is full", line)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (
            "sealing_at_the_end,2,1:end:sealing",
            r"error: rank 1: \S+r0001-\d+\.lmdb cannot be sealed: .* \(the other ranks have",
        ),
        (
            "sealing_at_the_end_of_first,2,0:end:sealing",
            r"error: \S+r0000-\d+\.lmdb cannot be sealed: .*No space left on device;",
        ),
        (
            "sealing_at_the_end_of_one,1,0:end:sealing",
            r"error: \S+r0000-\d+\.lmdb cannot be sealed: .*No space left on device;",
        ),
    ],
)
def test_a_rank_whose_last_shard_cannot_be_sealed_ends_and_so_do_the_others_and_what_was_committed_is_kept(
    run: str, says: str, ran: dict[str, Any]
) -> None:
    found = ran[run]
    assert set(found["codes"]) == {1}
    (line,) = said(found).splitlines()
    assert re.match(says, line)
    store = ran["folder"] / run.partition(",")[0]
    assert set(noted_ids(store)) <= committed_ids(store)
    assert list((store / "pending").glob("g*.lock")) == []


def test_a_model_that_one_rank_alone_cannot_load_ends_all_before_the_store_is_made(ran: dict[str, Any]) -> None:
    found = ran["other_model,2,1:load:model"]
    assert found["codes"] == [1, 1]
    assert said(found).startswith("error: rank 1: the model is not as on the other ranks (the other ranks have stopped, before")


def test_a_defect_in_one_rank_leaves_its_traceback_and_ends_all(ran: dict[str, Any]) -> None:
    found = ran["defect,2,1:row:9:defect"]
    assert found["codes"] == [1, 1]
    # On a busy machine rank 0 may have encoded nothing yet, and the words behind the comma say so.
    assert "error: rank 1: RuntimeError: nobody expects this (the other ranks have stopped, " in found["err"][0]
    assert found["err"][1].startswith("Traceback")
    listing = ran["defect_while_listing,3,0:list:defect"]
    assert listing["codes"] == [1, 1, 1]
    assert said(listing).count("Traceback") == 1


@pytest.mark.parametrize(
    ("run", "code"),
    [
        ("told,3,1:row:9:term", 143),
        ("interrupted,2,0:row:9:ctrl-c", 130),
        ("interrupted_by_terminal_and_launcher,2,1:row:9:two-ctrl-c", 130),
    ],
)
def test_a_signal_to_one_rank_stops_all_and_says_so_in_one_line(run: str, code: int, ran: dict[str, Any]) -> None:
    found = ran[run]
    assert set(found["codes"]) == {code}
    match = re.fullmatch(
        r"interrupted: all encoded images are committed \((\d+) images\); rerun the command to continue\n", said(found)
    )
    assert match is not None, found
    store = ran["folder"] / run.partition(",")[0]
    assert len(committed_ids(store)) == len(noted_ids(store)) == int(match[1])
    assert Store.open(store).manifest.samples == 0  # only a run that ends publishes


def test_a_second_ctrl_c_ends_one_process_at_once(ran: dict[str, Any]) -> None:
    found = ran["interrupted_twice,1,0:row:9:two-ctrl-c"]
    assert found["codes"] == [-signal.SIGINT]
    assert said(found) == ""


def test_a_signal_before_anything_was_encoded_says_so(ran: dict[str, Any]) -> None:
    found = ran["told_while_listing,2,0:list:term"]
    assert found["codes"] == [143, 143]
    assert said(found) == "interrupted: nothing had been encoded yet; rerun the command\n"
    assert not (ran["folder"] / "told_while_listing").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_waits_for_one_that_never_comes_ends_when_told(
    number: signal.Signals, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos").mkdir()
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1"), ("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    met = tmp_path / "store" / "pending" / "ranks" / f"{launch_name()}-2"
    (met / "run").mkdir(parents=True)
    (met / "open.json").write_text('"run"', encoding="ascii")
    asked = ["pack", tmp_path / "photos", tmp_path / "store", "--model", model]
    with subprocess.Popen([sys.executable, "-m", "bucketline.ingest", *map(str, asked)], stderr=subprocess.PIPE) as process:
        try:
            until = monotonic() + 240.0
            while not (met / "run" / "1-hello.json").exists():
                assert monotonic() < until
                sleep(0.01)
            process.send_signal(number)
            said = process.communicate(timeout=120)[1]
        finally:
            process.kill()
    assert process.returncode == -number
    assert b"Traceback" not in said
