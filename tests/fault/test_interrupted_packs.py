"""A pack that is interrupted, or fails half-way, keeps what it committed, and the next run finishes it."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import lmdb
import pytest

from bucketline.ingest.encoders.vae import VaeEncoder
from bucketline.ingest.pipeline.model import load_encoders
from bucketline.store import Store
from bucketline.store.write import shard_writer
from tests.commands import Ran, call, spawn
from tests.fault.same_store import committed_ids
from tests.kit import Held, by_id
from tests.models import SMALL


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


def at_call(number: int, function: Callable[..., Any], fail: Callable[[], object]) -> Callable[..., Any]:
    """Return a function that fails at its n-th call, before its work."""
    calls = [0]

    def failing(*args: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            fail()
        return function(*args, **more)

    return failing


def test_ctrl_c_before_anything_was_encoded_says_so(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_encoders, "load_text_encoder", lambda *_: signal.raise_signal(signal.SIGINT))
    ran = pack(source, tmp_path / "s", model)
    assert (ran.code, ran.out) == (130, "")
    assert ran.err == "interrupted: nothing had been encoded yet; rerun the command\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_batch_under_way_and_keeps_what_was_encoded(
    number: signal.Signals, code: int, source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(VaeEncoder, "encode", at_call(4, VaeEncoder.encode, lambda: signal.raise_signal(number)))
        ran = pack(source, tmp_path / "s", model)
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.splitlines()[-1] == (
        "interrupted: all encoded images are committed (12 images); rerun the command to continue"
    )
    assert len(committed_ids(tmp_path / "s")) == 12
    again = pack(source, tmp_path / "s", model)
    assert (again.json["packed"], again.json["unchanged"]) == (2, 12)
    assert call("store", "verify", tmp_path / "s").code == 0


def out_of_memory() -> NoReturn:
    raise RuntimeError("out of memory")


def full_disk() -> NoReturn:
    raise lmdb.DiskError("mdb_txn_commit: No space left on device")


@pytest.fixture
def commits_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_writer, "COMMIT_BYTES", 1)
    monkeypatch.setattr(shard_writer, "FLUSH_AFTER_S", -1.0)


@pytest.mark.usefixtures("commits_often")
def test_an_error_in_the_middle_keeps_what_was_committed(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(VaeEncoder, "encode", at_call(3, VaeEncoder.encode, out_of_memory))
        with pytest.raises(RuntimeError, match="out of memory"):
            pack(source, tmp_path / "s", model)
    assert len(committed_ids(tmp_path / "s")) == 6
    assert pack(source, tmp_path / "s", model).json["unchanged"] == 6


@pytest.mark.usefixtures("commits_often")
def test_a_full_disk_ends_with_one_says_so_and_the_next_run_goes_on(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shard_writer, "_put_block", at_call(8, shard_writer._put_block, full_disk))
        ran = pack(source, tmp_path / "s", model)
    assert (ran.code, ran.out) == (1, "")
    assert "the disk is full" in ran.err
    assert "make room and rerun the command" in ran.err
    kept = len(committed_ids(tmp_path / "s"))
    assert kept > 0
    assert pack(source, tmp_path / "s", model).json["unchanged"] == kept
