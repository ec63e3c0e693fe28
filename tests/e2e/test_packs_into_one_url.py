"""Processes that pack into one URL at the same time, in ranks, or until they are killed: nothing is lost or half there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bucketline.store import Store
from bucketline.store.remote.generations import find_newest, newest_generation
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.push_pull import pull
from bucketline.store.verify.verify import verify, verify_folder
from tests.commands import torchrun
from tests.kit import everything
from tests.models import SMALL, write_images
from tests.object_storage import S3Bucket

pytestmark = pytest.mark.slow


@pytest.fixture
def place(s3: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectFolder:
    monkeypatch.setenv("BUCKETLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    return s3.folder("photos.store")


def begin(source: Path, place: ObjectFolder, model: Path, work: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bucketline.ingest", "pack", source, place.url, "--model", model, "--work", work, *SMALL]
    return subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def ids_in(place: ObjectFolder, path: Path) -> list[str]:
    assert not verify_folder(place, lambda _: None, 1).corrupt
    pull(place, path)
    store = Store.open(path)
    found = verify(store, lambda _: None, 1)
    assert not found.corrupt
    assert not found.strays
    return sorted(row.record.id for rows in everything(store).values() for row in rows)


def test_processes_that_pack_at_once_lose_nothing(place: ObjectFolder, model: Path, tmp_path: Path) -> None:
    sources, ids = [], []
    for n in range(3):
        sources.append(tmp_path / f"source {n}")
        ids += [f"{n}/{name}" for name in write_images(tmp_path / f"source {n}" / str(n), 10)]
    running = [begin(source, place, model, tmp_path / f"work {n}") for n, source in enumerate(sources)]
    said = [process.communicate(timeout=240)[0].decode() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], said
    assert newest_generation(place).generation == 3
    assert ids_in(place, tmp_path / "pulled.store") == sorted(ids)


def test_ranks_pack_into_a_url_as_one_process_does(place: ObjectFolder, model: Path, source: Path, tmp_path: Path) -> None:
    arguments = ["-m", "bucketline.ingest", "pack", source, place.url, "--model", model, *SMALL]
    done = torchrun(2, *arguments).done()
    assert "14 images found = 14 packed" in done.out
    assert len(newest_generation(place).shards) == 2
    again = torchrun(2, *arguments)
    assert "14 images found = 0 packed + 14 unchanged" in again.out
    assert len(ids_in(place, tmp_path / "pulled.store")) == 14


def test_a_killed_pack_leaves_the_old_generation_and_is_continued(
    place: ObjectFolder, model: Path, source: Path, tmp_path: Path
) -> None:
    """Killed at moments that reach from its start to after its commit; each time something whole is there."""
    began = time.monotonic()
    first = begin(source, place, model, tmp_path / "work")
    first.communicate(timeout=240)
    assert first.returncode == 0
    seconds = time.monotonic() - began
    before = newest_generation(place)
    names = write_images(tmp_path / "more", 26)
    for name in names:
        if not (source / name).exists():
            shutil.copy(tmp_path / "more" / name, source / name)
    for share in (0.6, 0.8, 0.95):
        process = begin(source, place, model, tmp_path / "work")
        time.sleep(share * seconds)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        found = find_newest(place)
        assert found is not None
        assert found.samples in (before.samples, 26)
        assert not verify_folder(place, lambda _: None, 1).corrupt
    last = begin(source, place, model, tmp_path / "work")
    said = last.communicate(timeout=240)[0].decode()
    assert last.returncode == 0, said
    assert ids_in(place, tmp_path / "pulled.store") == names
