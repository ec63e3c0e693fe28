"""A pack that is killed or interrupted loses nothing that it committed, and the next run finishes it."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from numpy.typing import NDArray

from bucketline.ingest.encoders.vae import VaeEncoder
from bucketline.ingest.pipeline.model import load_encoders
from bucketline.store import Store
from bucketline.store.write import shard_writer
from tests.commands import ROOT, Ran, call, spawn
from tests.conftest import once
from tests.fault.same_store import committed_ids, compare
from tests.kit import tree
from tests.models import SMALL, write_images

NUM_IMAGES = 30
DRAW = random.Random(7)
MOMENTS = [
    *(f"commit:{n}+" for n in sorted(DRAW.sample(range(2, 30), 6))),  # right after a commit
    "row:9",  # within a transaction
    "compact:1+",
    "sidecar:1",
    "sidecar:1+",  # the extents are there, the index is not
    "move:1",
    "move:1+",  # in shards/, not yet listed, and still pending
    "move:2+",
    "publish:2",
    "manifest:1+",
    "manifest:2",  # the generation's own file is there, manifest.json is not
    "manifest:3+",  # the same, with everything packed
    "manifest:4+",  # published, and killed before it could say so
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A folder of images, and a store for each moment at which the packing of them was killed."""
    with once(tmp_path_factory, "killed-packs") as (folder, is_first):
        if is_first:
            write_images(folder / "photos", NUM_IMAGES)
            shutil.copytree(model, folder / "model")
            asked = ["pack", folder / "photos", folder / "{}", "--model", folder / "model", *SMALL, "--batch-size", 3]
            runs = [f"{moment},1,0:{moment}:kill" for moment in MOMENTS]
            ran = spawn([sys.executable, "-m", "tests.fault.ranks_at_moments", *runs, "--", *asked], PYTHONPATH=str(ROOT))
            assert [run["codes"] for run in json.loads(ran.out)] == [[-signal.SIGKILL]] * len(MOMENTS), ran
            counts = {moment: len(committed_ids(folder / moment)) for moment in MOMENTS}
            (folder / "committed.json").write_text(json.dumps(counts), encoding="ascii")
            whole = pack(folder / "photos", folder / "whole", folder / "model")
            assert (whole.code, whole.json["packed"]) == (0, NUM_IMAGES)
    return folder


def pack(source: Path, store: Path, model: Path) -> Ran:
    return call("ingest", "pack", source, store, "--model", model, *SMALL, "--batch-size", 3, "--json")


def rows_of(store: Path) -> dict[str, NDArray[np.float16]]:
    opened = Store.open(store)
    found: dict[str, NDArray[np.float16]] = {}
    for bucket in opened.buckets():
        rows = np.arange(bucket.num_rows)
        ids = bucket.sample_ids(rows)
        assert not set(ids) & set(found)
        assert len(set(ids)) == len(ids)
        found |= dict(zip(ids, bucket.read(rows, "latent"), strict=True))
    return found


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_run_after_a_kill_keeps_what_was_committed_and_packs_the_rest(moment: str, killed: Path) -> None:
    store = killed / moment
    before = committed_ids(store)
    ran = pack(killed / "photos", store, killed / "model").done()
    assert (ran.json["found"], ran.json["rejected"]) == (NUM_IMAGES, 0)
    assert ran.json["unchanged"] == len(before)
    assert ran.json["packed"] == NUM_IMAGES - len(before)
    assert call("store", "verify", store).code == 0
    assert compare(store, killed / "whole").faults == []
    left = [name for name in tree(store) if name.startswith("pending/") and name not in ("pending/", "pending/writer.lock")]
    assert left == []
    assert not [name for name in tree(store) if name.endswith(".tmp")]


def test_the_moments_lie_between_a_store_with_next_to_nothing_and_one_with_everything(killed: Path) -> None:
    """The test above would mean little if every run had died at the same point."""
    counts = json.loads((killed / "committed.json").read_text(encoding="ascii"))
    assert min(counts.values()) < 5
    assert max(counts.values()) == NUM_IMAGES
    assert len(set(counts.values())) >= 6


@pytest.mark.parametrize(
    "moment", ["row:5", "end", "finish"]
)  # the fifth block is written, all rows are, all shards are sealed
def test_a_recaption_that_is_killed_leaves_the_captions_as_they_were_and_the_next_run_decides(
    moment: str, source: Path, tmp_path: Path, model: Path
) -> None:
    def captions(store: Path) -> dict[str, tuple[str, ...]]:
        opened = Store.open(store)
        return {sample_id: opened.sample(sample_id)[1].captions for sample_id in rows_of(store)}

    asked = ("ingest", "pack", source, tmp_path / "s", "--model", model, *SMALL, "--batch-size", 3, "--json")
    rules = ("--caption-template", "dog")
    assert call(*asked).code == 0
    plain, latents = captions(tmp_path / "s"), rows_of(tmp_path / "s")
    dead = [sys.executable, "-m", "tests.fault.noted_pack", tmp_path / "notes", f"0:{moment}:kill", *asked[1:], *rules]
    assert spawn([*dead, "--recaption"]).code == -signal.SIGKILL
    assert captions(tmp_path / "s") == plain
    assert call("store", "verify", tmp_path / "s").code == 0
    assert "add --recaption" in call(*asked, *rules).err
    shutil.copytree(tmp_path / "s", tmp_path / "back")

    report = call(*asked, *rules, "--recaption").json
    assert report["packed"] + report["unchanged"] == len(plain)
    assert report["packed"] == report["latents_kept"]
    assert (report["unchanged"] > 0) == (moment != "row:5") or report["unchanged"] < len(plain)
    found = captions(tmp_path / "s")
    assert {*found} == {*plain}
    assert all(own == (*(f"dog, {text}" for text in plain[sample_id]),) or own == ("dog",) for sample_id, own in found.items())
    rules_now: Any = Store.open(tmp_path / "s").manifest.rules["captions"]
    assert rules_now["trigger_word"] == "dog"

    call("ingest", "pack", source, tmp_path / "back", *asked[4:]).done()
    assert captions(tmp_path / "back") == plain
    for store in (tmp_path / "s", tmp_path / "back"):
        assert call("store", "verify", store).code == 0
        now = rows_of(store)
        assert all(np.array_equal(now[sample_id], latent) for sample_id, latent in latents.items())


def test_ctrl_c_before_anything_was_encoded_says_so(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(load_encoders, "load_text_encoder", interrupted)
    ran = pack(source, tmp_path / "s", model)
    assert (ran.code, ran.out) == (130, "")
    assert ran.err == "interrupted: nothing had been encoded yet; rerun the command\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigterm_ends_with_143_and_keeps_what_was_encoded(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = VaeEncoder.encode

    def told(self: VaeEncoder, pixels: NDArray[np.uint8], seeds: Sequence[int] = ()) -> object:
        signal.raise_signal(signal.SIGTERM)
        return encode(self, pixels, seeds)

    with monkeypatch.context() as patch:
        patch.setattr(VaeEncoder, "encode", told)
        ran = pack(source, tmp_path / "s", model)
    kept = len(committed_ids(tmp_path / "s"))
    assert kept > 0
    assert (ran.code, ran.out) == (143, "")
    said = f"interrupted: all encoded images are committed ({kept} images); rerun the command to continue"
    assert ran.err.splitlines()[-1] == said
    assert pack(source, tmp_path / "s", model).json["unchanged"] == kept


def test_ctrl_c_ends_with_130_and_keeps_what_was_encoded(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, calls = VaeEncoder.encode, [0]

    def interrupted(self: VaeEncoder, pixels: NDArray[np.uint8], seeds: Sequence[int] = ()) -> object:
        calls[0] += 1
        if calls[0] == 4:
            signal.raise_signal(signal.SIGINT)
        return encode(self, pixels, seeds)

    with monkeypatch.context() as patch:
        patch.setattr(VaeEncoder, "encode", interrupted)
        ran = pack(source, tmp_path / "s", model)
    assert (ran.code, ran.out) == (130, "")
    assert "rerun the command to continue" in ran.err
    assert "Traceback" not in ran.err
    assert len(committed_ids(tmp_path / "s")) == 12  # the batch under way is finished
    again = pack(source, tmp_path / "s", model)
    assert (again.json["packed"], again.json["unchanged"]) == (2, 12)
    assert call("store", "verify", tmp_path / "s").code == 0


def test_an_error_in_the_middle_keeps_what_was_committed_ids(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_writer, "COMMIT_BYTES", 1)
    monkeypatch.setattr(shard_writer, "FLUSH_AFTER_S", -1.0)
    encode, calls = VaeEncoder.encode, [0]

    def failing(self: VaeEncoder, pixels: NDArray[np.uint8], seeds: Sequence[int] = ()) -> object:
        calls[0] += 1
        if calls[0] == 3:
            raise RuntimeError("out of memory")
        return encode(self, pixels, seeds)

    with monkeypatch.context() as patch:
        patch.setattr(VaeEncoder, "encode", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            pack(source, tmp_path / "s", model)
    assert len(committed_ids(tmp_path / "s")) == 6
    assert pack(source, tmp_path / "s", model).json["unchanged"] == 6


def test_a_full_disk_ends_with_one_says_so_and_the_next_run_goes_on(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_writer, "COMMIT_BYTES", 1)
    monkeypatch.setattr(shard_writer, "FLUSH_AFTER_S", -1.0)
    calls = [0]
    write: Callable[..., int] = shard_writer._put_block

    def full(*args: object) -> int:
        calls[0] += 1
        if calls[0] == 8:
            raise lmdb.DiskError("mdb_txn_commit: No space left on device")
        return write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(shard_writer, "_put_block", full)
        ran = pack(source, tmp_path / "s", model)
    assert (ran.code, ran.out) == (1, "")
    assert "the disk is full" in ran.err
    assert "make room and rerun the command" in ran.err
    kept = len(committed_ids(tmp_path / "s"))
    assert kept > 0
    assert pack(source, tmp_path / "s", model).json["unchanged"] == kept
