"""A pack that is interrupted, or fails half-way, keeps what it committed, and the next run finishes it.

Several ranks of one pack, one of which fails, is killed or told to stop: the others end too, and nothing is lost.

Here the ranks are forked, without a launcher: what they do they do by themselves. Under torchrun: the family `ranks`.

A pack into a bucket that is killed again and again, at every kind of moment: nothing is lost, sent or encoded twice.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from bucketline.command_line import launch_name
from bucketline.ingest.encoders.vae import VaeEncoder
from bucketline.ingest.pipeline import model as pipeline_model
from bucketline.store import Store
from bucketline.store.remote.generations import find_newest, newest_generation
from bucketline.store.sync.push_pull import pull
from bucketline.store.verify.verify import verify_folder
from tests.commands import ROOT, Ran, call, spawn
from tests.conftest import once
from tests.fault.noted_pack import run_apart
from tests.fault.same_store import committed_ids, compare, noted_ids
from tests.kit import Held, by_id
from tests.models import SMALL, write_images
from tests.object_storage import S3Bucket


def pack(source: Path, store: Path, model: Path, *more: object) -> Ran:
    return call("ingest", "pack", source, store, "--model", model, *SMALL, "--batch-size", 3, "--json", *more)


@pytest.mark.parametrize(
    "moment", ["row:5", "end", "finish"]
)  # the fifth block is written, all rows are, all shards are sealed
def test_a_recaption_that_is_killed_leaves_the_captions_as_they_were_and_the_next_run_decides(
    moment: str, source: Path, tmp_path: Path, model: Path
) -> None:
    def held(name: str) -> dict[str, Held]:
        assert call("store", "verify", tmp_path / name).code == 0
        return by_id(Store.open(tmp_path / name))

    def captions(found: dict[str, Held]) -> dict[str, tuple[str, ...]]:
        return {sample_id: one.record.captions for sample_id, one in found.items()}

    rules = ("--caption-template", "dog")
    pack(source, tmp_path / "s", model).done()
    before = held("s")
    plain = captions(before)
    asked = ["pack", source, tmp_path / "s", "--model", model, *SMALL, "--batch-size", 3, *rules, "--recaption"]
    command = [sys.executable, "-m", "tests.fault.noted_pack", tmp_path / "notes", f"0:{moment}:kill", "--", *asked]
    assert spawn(command, RANK="0", WORLD_SIZE="1").code == -signal.SIGKILL
    assert captions(held("s")) == plain
    assert "add --recaption" in pack(source, tmp_path / "s", model, *rules).err
    shutil.copytree(tmp_path / "s", tmp_path / "back")

    report = pack(source, tmp_path / "s", model, *rules, "--recaption").json
    assert report["packed"] + report["unchanged"] == len(plain)
    assert report["packed"] == report["latents_kept"]
    assert (report["unchanged"] > 0) == (moment != "row:5") or report["unchanged"] < len(plain)
    after = held("s")
    expected = {sample_id: (*(f"dog, {text}" for text in texts),) or ("dog",) for sample_id, texts in plain.items()}
    assert captions(after) == expected
    rules_now: Any = Store.open(tmp_path / "s").manifest.rules["caption_template"]
    assert rules_now == ["dog"]
    pack(source, tmp_path / "back", model).done()
    assert captions(held("back")) == plain
    for found in (after, held("back")):
        assert all(found[sample_id].columns["latent"] == one.columns["latent"] for sample_id, one in before.items())


def test_ctrl_c_before_anything_was_encoded_says_so(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_model, "load_text_encoder", lambda *_: signal.raise_signal(signal.SIGINT))
    ran = pack(source, tmp_path / "s", model)
    assert (ran.code, ran.out) == (130, "")
    assert ran.err == "interrupted: nothing had been encoded yet; rerun the command\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_batch_under_way_and_keeps_what_was_encoded(
    number: signal.Signals, code: int, source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, encode = itertools.count(1), VaeEncoder.encode

    def encoding(*args: Any, **more: Any) -> Any:
        if next(calls) == 4:
            signal.raise_signal(number)
        return encode(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(VaeEncoder, "encode", encoding)
        ran = pack(source, tmp_path / "s", model)
    assert (ran.code, ran.out) == (code, "")
    assert re.fullmatch(STOPPED, ran.err.splitlines(keepends=True)[-1])[1] == "12"  # type: ignore[index]
    assert len(committed_ids(tmp_path / "s")) == 12
    again = pack(source, tmp_path / "s", model)
    assert (again.json["packed"], again.json["unchanged"]) == (2, 12)
    assert call("store", "verify", tmp_path / "s").code == 0


NUM_IMAGES = 40
BROKEN = {"empty.png": b"", "letters.jpg": b"no image"}
SOME = r"with \d+ images encoded and committed"
NONE = r"before anything was encoded"
ANY = rf"({SOME}|{NONE})"  # on a busy machine another rank may have encoded nothing yet
KILLED = r"error: rank %d \(pid \d+ on \S+\) ended without a message: killed, or out of memory; "
AGAIN = r"rerun the command, with any number of ranks, to continue\n"
CANNOT_SEAL = r"r%04d-\d+\.lmdb cannot be sealed: .*No space left on device;.*\n"
DISK = r"\S+r%04d-\d+\.lmdb cannot be written: .*the disk is full.*make room and rerun the command.*\n"
STOPPED = r"interrupted: all encoded images are committed \((\d+) images\); rerun the command to continue\n"
KILL, INT = -signal.SIGKILL, -signal.SIGINT
OR_DONE = (1, 0)  # of a rank that may have committed its share before it noticed that another one failed
# a store, ranks and a failure; the exit codes that each rank may have, and what all say in one place
ENDS: dict[str, tuple[list[int | tuple[int, ...]], str]] = {
    "killed,3,1:row:9:kill": ([1, KILL, OR_DONE], rf"{KILLED % 1}the other ranks have stopped, {ANY}; {AGAIN}"),
    "killed_first,2,0:row:9:kill": ([KILL, OR_DONE], rf"({KILLED % 0}rank 1 has stopped, {ANY}; {AGAIN})?"),
    "killed_when_met,3,1:meet:1+:kill": ([1, KILL, 1], rf"{KILLED % 1}the other ranks have stopped, {NONE}; {AGAIN}"),
    "killed_when_done,2,1:done:1+:kill": ([0, KILL], ""),
    "killed_at_the_end,2,1:done:kill": ([1, KILL], rf"{KILLED % 1}the other ranks have stopped, {ANY}; {AGAIN}"),
    "killed_while_loading,2,1:load:kill": ([1, KILL], rf"{KILLED % 1}the other ranks have stopped, {NONE}; {AGAIN}"),
    "full_disk,3,2:row:9:disk": ([1, OR_DONE, 1], rf"error: rank 2: {DISK % 2}"),
    "full_disk_of_first,2,0:row:9:disk": ([1, OR_DONE], rf"error: {DISK % 0}"),
    "full_disk_of_one,1,0:row:9:disk": ([1], rf"error: {DISK % 0}"),
    "sealing_at_the_end,2,1:end:sealing": ([1, 1], rf"error: rank 1: \S+{CANNOT_SEAL % 1}"),
    "sealing_at_the_end_of_first,2,0:end:sealing": ([1, OR_DONE], rf"error: \S+{CANNOT_SEAL % 0}"),
    "sealing_at_the_end_of_one,1,0:end:sealing": ([1], rf"error: \S+{CANNOT_SEAL % 0}"),
    "other_model,2,1:load:model": (
        [1, 1],
        rf"error: rank 1: the model is not as .* \(the other ranks have stopped, {NONE}.*\n",
    ),
    "told,3,1:row:9:term": ([143, 143, (143, 0)], STOPPED),
    "interrupted,2,0:row:9:ctrl-c": ([130, (130, 0)], STOPPED),
    "interrupted_by_terminal_and_launcher,2,1:row:9:two-ctrl-c": ([130, 130], STOPPED),
    "interrupted_twice,1,0:row:9:two-ctrl-c": ([INT], ""),
    "told_while_listing,2,0:list:term": ([143, 143], r"interrupted: nothing had been encoded yet; rerun the command\n"),
}
DEFECTS = ("defect,2,1:row:9:defect", "defect_while_listing,3,0:list:defect", "defect_of_one,1,0:row:9:defect")
FINISHED = (
    *("one,1,-", "two,2,-", "three,3,-", "late,3,2:meet:late", "clock,3,1:meet:clock", "paused,3,1:row:9:pause"),
    *("paused_first,2,0:row:9:pause", "killed_when_met,2,-"),  # those so far find nothing that was committed before
    *("killed_when_done,3,-", "killed,2,-", "killed_first,3,-", "killed_at_the_end,1,-"),
    *("full_disk,2,-", "sealing_at_the_end,3,-", "full_disk_of_one,1,-", "defect_of_one,1,-"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The stores after the runs that ended, and after those that finished them; and by a run's own words what came of it."""
    with once(tmp_path_factory, "ranks-that-end") as (folder, is_first):
        if is_first:
            write_images(folder / "photos", NUM_IMAGES)
            for name, data in BROKEN.items():
                (folder / "photos" / name).write_bytes(data)
            asked = ["pack", folder / "photos", folder / "{}", "--model", model, *SMALL, "--batch-size", 2, "--json"]
            found = {}
            for runs in ((*ENDS, *DEFECTS), FINISHED):
                for name, own in zip(runs, run_apart(runs, asked), strict=True):
                    store = folder / name.partition(",")[0]
                    found[name] = {**own, "noted": noted_ids(store), "committed": sorted(committed_ids(store))}
                    found[name]["left"] = [path.name for path in (store / "pending").glob("g*.lock")]
                    found[name]["published"] = (
                        Store.open(store).manifest.samples if (store / "manifest.json").exists() else None
                    )
            (folder / "ran.json").write_text(json.dumps(found), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((folder / "ran.json").read_bytes())
    return found


def said(run: dict[str, Any]) -> str:
    """Return what all ranks wrote to stderr, without the progress bar."""
    return "".join(line for err in run["err"] for line in err.splitlines(keepends=True) if not line.startswith("pack ("))


@pytest.mark.parametrize("name", ENDS)
def test_all_ranks_end_soon_the_cause_is_said_once_and_what_was_committed_is_kept(
    name: str, ran: dict[str, dict[str, Any]]
) -> None:
    codes, words = ENDS[name]
    run = ran[name]
    assert len(run["codes"]) == len(codes)
    assert all(code in (own if isinstance(own, tuple) else (own,)) for code, own in zip(run["codes"], codes, strict=True))
    match = re.fullmatch(words, said(run))
    assert match is not None, said(run)
    assert set(run["noted"]) <= set(run["committed"])
    if (
        words is not STOPPED and "end" not in name and codes[0]
    ):  # the one that failed did not pack all of its images; who is told may have
        assert len(run["committed"]) < NUM_IMAGES
    assert (run["published"] or 0) <= len(run["committed"])
    if ",1," in name:  # of several ranks, another one may have finished, and committed its shards
        assert not run["published"]
    if words is STOPPED:
        assert len(run["committed"]) == len(run["noted"]) == int(match[1])
    if "seal" in name:
        assert run["left"] == []
    if "listing" in name:
        assert run["published"] is None


def test_a_defect_in_one_rank_leaves_its_traceback_and_ends_all(ran: dict[str, dict[str, Any]]) -> None:
    found, listing, one = (ran[name] for name in DEFECTS)
    assert found["codes"] == [1, 1]
    assert "error: rank 1: RuntimeError: nobody expects this (the other ranks have stopped, " in found["err"][0]
    assert found["err"][1].startswith("Traceback")
    assert (listing["codes"], one["codes"]) == ([1, 1, 1], [1])
    assert said(listing).count("Traceback") == said(one).count("Traceback") == 1
    assert 0 < len(one["noted"]) <= len(one["committed"]) < NUM_IMAGES


@pytest.mark.parametrize("name", FINISHED[1:])
def test_however_many_ranks_packed_and_however_they_ended_the_finished_store_is_the_same(
    name: str, folder: Path, ran: dict[str, dict[str, Any]]
) -> None:
    last, store, one = ran[name], folder / name.partition(",")[0], folder / "one"
    assert set(last["codes"]) == {0}, last
    summary = json.loads(last["out"][0])
    assert [out for out in last["out"][1:] if out] == []  # one summary, from one place
    assert (summary["found"], summary["rejected"]) == (NUM_IMAGES + len(BROKEN), len(BROKEN))
    assert (summary["unchanged"] > 0) == (name not in FINISHED[:8])  # what was committed is adopted
    compared = compare(store, one)
    assert (compared.samples, compared.faults) == (NUM_IMAGES, [])
    assert (store / "rejects.jsonl").read_bytes() == (one / "rejects.jsonl").read_bytes()


@pytest.mark.parametrize(
    "moment", ["row:9", "end:1+", "finish", "manifest:3"]
)  # writing, sealed, with a commit ahead, within it
def test_two_packs_of_one_source_at_once_make_the_store_of_one(moment: str, folder: Path, tmp_path: Path, model: Path) -> None:
    asked = ["pack", folder / "photos", tmp_path / "s", "--model", model, *SMALL, "--batch-size", 2, "--json"]
    command = [sys.executable, "-m", "tests.fault.noted_pack"]
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(ROOT)}

    def begin(failure: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*map(str, [*command, tmp_path / "notes", failure, "--", *asked])], env=environment)

    with begin(f"0:{moment}:stop") as first:
        os.waitid(os.P_PID, first.pid, os.WSTOPPED)
        second = begin("-")
        try:
            if moment != "manifest:3":  # who is stopped within a commit has the lock
                assert second.wait(240) == 0
        finally:
            first.send_signal(signal.SIGCONT)
        assert (first.wait(240), second.wait(240)) == (0, 0)
    compared = compare(tmp_path / "s", folder / "one")
    assert (compared.samples, compared.faults) == (NUM_IMAGES, [])
    assert [path.name for path in (tmp_path / "s" / "pending").iterdir()] == ["writer.lock"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_waits_for_one_that_never_comes_ends_when_told(
    number: signal.Signals, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos").mkdir()
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1"), ("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    met = tmp_path / "store" / "pending" / "runs" / f"{launch_name()}-2"
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


MOMENTS = (
    *("commit:5+", "move:1+", "send:2", "note:1", "shorten:1", "shorten:1+", "note:2+", "send:4+"),
    *("url-commit:1", "url-commit:1+", "let-go:1", "never:1"),
)


@pytest.mark.parametrize("more", [(), ("--publish-every", "0.01s")])
def test_a_killed_pack_goes_on_without_sending_or_encoding_again(
    s3: S3Bucket, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    ids = write_images(tmp_path / "photos", 150)
    place, notes = s3.folder("photos.store"), tmp_path / "committed"
    asked = ["pack", tmp_path / "photos", place.url, "--model", model, *SMALL, "--batch-size", 3, "--work", tmp_path / "work"]
    runs = [f"-,1,0:{moment}:kill" for moment in MOMENTS]
    done = run_apart(runs, [*asked, *more], NOTES=str(notes))
    assert [run["codes"] for run in done] == [*[[-signal.SIGKILL]] * (len(MOMENTS) - 1), [0]], done
    found = Counter(Path(f"{notes}.0").read_text().splitlines())
    assert set(found.values()) == {1}  # nothing was encoded again that had been committed
    assert found.keys() <= set(ids)
    assert find_newest(place) is not None
    assert not verify_folder(place, lambda _: None, 1).corrupt
    pull(place, tmp_path / "pulled.store")
    assert call("ingest", "pack", tmp_path / "photos", tmp_path / "here.store", "--model", model, *SMALL).code == 0
    compared = compare(tmp_path / "pulled.store", tmp_path / "here.store")
    assert (compared.samples, compared.faults) == (150, [])
    listed = {f"shards/{entry.name}.lmdb" for entry in newest_generation(place).shards}
    assert {
        name for name in (file.name for file in place.names("shards")) if name.endswith(".lmdb")
    } == listed  # nor sent again by another name
    assert not list(place.names("pending"))
    assert all(path.stat().st_blocks == 0 for path in (tmp_path / "work" / "shards").glob("*.lmdb"))
