"""Packs into one URL, of processes at once and of ranks with no common disk: nothing is lost or half there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bucketline.store import Store
from bucketline.store.remote.generations import newest_generation
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.push_pull import pull
from bucketline.store.verify.verify import verify, verify_folder
from tests.commands import ROOT, call, spawn
from tests.fault.same_store import compare
from tests.kit import by_id
from tests.models import SMALL, write_images
from tests.object_storage import S3Bucket


def begin(source: Path, place: ObjectFolder, model: Path, work: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bucketline.ingest", "pack", source, place.url, "--model", model, "--work", work, *SMALL]
    return subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


@pytest.mark.slow
def test_processes_that_pack_at_once_lose_nothing(
    s3: S3Bucket, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "BUCKETLINE_CACHE": tmp_path / "cache",
        "AWS_ENDPOINT_URL": s3.endpoint,
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, str(value))
    place = s3.folder("photos.store")
    sources, ids = [], []
    for n in range(3):
        sources.append(tmp_path / f"source {n}")
        ids += [f"{n}/{name}" for name in write_images(tmp_path / f"source {n}" / str(n), 10)]
    running = [begin(source, place, model, tmp_path / f"work {n}") for n, source in enumerate(sources)]
    said = [process.communicate(timeout=240)[0].decode() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], said
    assert newest_generation(place).generation == 3
    assert not verify_folder(place, lambda _: None, 1).corrupt
    pull(place, tmp_path / "pulled.store")
    store = Store.open(tmp_path / "pulled.store")
    assert sorted(by_id(store)) == sorted(ids)
    found = verify(store, lambda _: None, 1)
    assert (found.corrupt, found.strays) == ((), ())


NUM_IMAGES = 40


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_images(tmp_path / "photos", NUM_IMAGES)
    (tmp_path / "photos" / "broken.png").write_bytes(b"no image")
    return tmp_path / "photos"


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BUCKETLINE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bucket").mkdir()
    return f"file://{tmp_path / 'bucket'}"


def ranks(runs: Sequence[str], asked: Sequence[object], tmp_path: Path) -> list[dict[str, Any]]:
    """Run two ranks, as on two machines: a launcher would say how many are on one."""
    work = ["--work", tmp_path / "{} RANK"]
    done = spawn([sys.executable, "-m", "tests.fault.noted_pack", *runs, "--", *asked, *work], PYTHONPATH=str(ROOT)).done()
    found: list[dict[str, Any]] = json.loads(done.out)
    return found


def counts(summary: dict[str, Any]) -> tuple[int, int, int]:
    return summary["packed"], summary["unchanged"], summary["rejected"]


@pytest.mark.slow
def test_they_pack_what_one_process_packs(photos: Path, url: str, tmp_path: Path, model: Path) -> None:
    options = ["--model", model, *SMALL, "--batch-size", 2, "--json"]
    asked = ["pack", photos, f"{url}/{{}}", *options]
    first, again = ranks(["s,2,-", "s,2,-"], [*asked, "--publish-every", "0.001s"], tmp_path)
    assert first["codes"] == again["codes"] == [0, 0], (first, again)
    assert counts(json.loads(first["out"][0])) == (NUM_IMAGES, 0, 1)
    assert json.loads(first["out"][0])["generations_meanwhile"] > 0
    assert counts(json.loads(again["out"][0])) == (0, NUM_IMAGES, 1)
    assert call("ingest", "pack", photos, tmp_path / "one", *options).code == 0
    objects = ObjectFolder.open(f"{url}/s")
    pull(objects, tmp_path / "pulled")
    compared = compare(tmp_path / "pulled", tmp_path / "one")
    assert (compared.samples, compared.faults) == (NUM_IMAGES, [])
    assert not verify_folder(objects, lambda _: None, 1).corrupt
    assert not list(objects.names("pending"))
    assert not (tmp_path / "s 1").exists()
    assert not list((tmp_path / "s 1.workers").iterdir())


@pytest.mark.slow
def test_what_each_had_encoded_is_kept_after_a_signal_to_one_or_an_error(
    photos: Path, url: str, tmp_path: Path, model: Path
) -> None:
    asked = ["pack", photos, f"{url}/{{}}", "--model", model, *SMALL, "--batch-size", 2, "--json"]
    told, failed = ranks(["told,2,1:row:9:term", "failed,2,0:row:9:defect"], asked, tmp_path)
    assert told["codes"] == [143, 143]
    found = re.search(r"all encoded images are committed \((\d+) images\)", "".join(told["err"]))
    assert found is not None, told
    assert failed["codes"] == [1, 1]
    for name, is_enough in (("told", int(found[1]).__eq__), ("failed", (1).__le__)):
        again = call("ingest", *[str(part).format(name) for part in asked], "--work", tmp_path / f"{name} 0")
        packed, unchanged, rejected = counts(again.json)
        assert (packed + unchanged, rejected) == (NUM_IMAGES, 1)
        assert is_enough(unchanged), unchanged
