"""A pack into a bucket that is killed again and again, at every kind of moment: nothing is lost, sent or encoded twice."""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from bucketline.store.remote.generations import find_newest, newest_generation
from bucketline.store.sync.push_pull import pull
from bucketline.store.verify.verify import verify_folder
from tests.commands import ROOT, call, spawn
from tests.fault.same_store import compare
from tests.models import SMALL, write_images
from tests.object_storage import S3Bucket

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
    command = [sys.executable, "-m", "tests.fault.noted_pack", *runs, "--", *asked, *more]
    done = spawn(command, PYTHONPATH=str(ROOT), NOTES=str(notes)).done()
    codes = {moment: run["codes"] for moment, run in zip(MOMENTS, json.loads(done.out), strict=True)}
    assert codes.pop("never:1") == [0], done
    assert list(codes.values()) == [[-signal.SIGKILL]] * len(codes), (codes, done)
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
