"""Fixtures that several folders use. What takes seconds is made once a session and only read after that."""

from __future__ import annotations

import os

from tests.devices import without_gpus

os.environ.update(without_gpus(os.environ))  # read when torch first looks for devices
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported; no test may reach for a network
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; the images here are tiny

import fcntl
import gc
import importlib
import signal
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.commands import ROOT, spawn
from tests.kit import Sample, make_store, samples_of
from tests.models import write_images, write_model
from tests.object_storage import new_bucket, s3_on_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bucketline.store import Store
    from tests.object_storage import S3Bucket
    from tests.unit.ingest.importers.known import Known

# A shell has its background jobs ignore SIGINT, and so does all that they start: `nohup make test &` must hear Ctrl-C too.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("bucketline", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("bucketline")

FAULTS = ROOT / "tests" / "fault"  # what breaks things on purpose takes its time, each test of it


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what is in `tests/fault/` as slow: `make test` leaves it to `make test-full`."""
    if item.path.is_relative_to(FAULTS):
        item.add_marker(pytest.mark.slow)


def pytest_collection(session: pytest.Session) -> None:
    """Import the files of tests, each worker from another one on: what one compiles the others read. Collect no garbage."""
    gc.disable()
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if count > 1 and session.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        files = sorted((ROOT / "tests").rglob("test_*.py"))
        first = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) * len(files) // count
        for file in files[first:] + files[:first]:
            with suppress(Exception):  # collection imports it again, and says so
                importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Freeze what collection has imported: looking through it took each of the many garbage collections a tenth of a second."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a commit that finds the store locked fail at once."""
    monkeypatch.setattr("bucketline.store.write.publish.WAIT_S", 0.0)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Freeze what a module's tests have imported and made for the session, for the same reason."""
    yield
    gc.collect()
    gc.freeze()


@contextmanager
def once(tmp_path_factory: pytest.TempPathFactory, name: str) -> Iterator[tuple[Path, bool]]:
    """Yield a folder that all workers of a run share, and whether it is to be made: the first one makes it, the others wait."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared" / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".made").open("a+b") as made:
        fcntl.flock(made, fcntl.LOCK_EX)
        yield folder, made.seek(0, os.SEEK_END) == 0
        made.write(b"made")


ROWS = {"train/64x64": 23, "train/96x64": 9, "train/64x128": 1, "val/64x64": 6}


@pytest.fixture(scope="session")
def samples() -> list[list[Sample]]:
    return [samples_of(ROWS, "first/"), samples_of({"train/64x64": 12, "train/96x64": 2}, "second/")]


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, samples: list[list[Sample]]) -> Store:
    return make_store(tmp_path_factory.mktemp("small") / "small.store", *samples)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """A server on the loopback interface with S3's semantics; its address. It keeps everything in memory."""
    with s3_on_loopback() as endpoint:
        yield endpoint


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> S3Bucket:
    """A new bucket, and an environment with credentials that are worth nothing."""
    return new_bucket(s3_server, monkeypatch)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_images(tmp_path / "photos", 14)
    return tmp_path / "photos"


@pytest.fixture(scope="session")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with once(tmp_path_factory, "photographs") as (folder, is_first):
        if is_first:
            spawn([sys.executable, ROOT / "demo" / "photographs.py", folder / "photographs"]).done()
    return folder / "photographs"


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model folder: a VAE trained on photographs, a sentence encoder, a UNet's configuration."""
    with once(tmp_path_factory, "demo-model") as (folder, is_first):
        if is_first:
            spawn([sys.executable, ROOT / "demo" / "model.py", folder / "model"]).done()
    return folder / "model"


@pytest.fixture
def quick_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes most of a tiny training run: its curve, and the thawing of all that the tests have imported."""
    from bucketline.train import report  # which imports matplotlib

    monkeypatch.setattr(report, "draw_loss_curve", lambda _, path: path.write_bytes(b"\x89PNG"))
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture(scope="session")
def known(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Known]:
    """Return the images of a text family whose latents and embeddings are known; they are packed once for all tests."""
    from tests.unit.ingest.importers.known import make_known

    made: dict[str, Known] = {}

    def of(family: str) -> Known:
        if family not in made:
            made[family] = make_known(tmp_path_factory.mktemp(family.replace(" ", "-")), family)
        return made[family]

    return of
