"""A pull asks again for what was missing, cut or wrong once, and says so of what stays so."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from bucketline.bench.fixtures.range_server import Fault, RangeServer, Schedule
from bucketline.errors import CorruptError
from bucketline.store.folder import MissingObjectError
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import RemoteOptions
from bucketline.store.sync.push_pull import pull, push
from bucketline.store.verify.verify import verify_folder
from tests.kit import flip_bit, make_store, samples_of

FAULTS = (
    Fault.MISSING,
    Fault.SHORT_RANGE,
    Fault.SHORT_LENGTH,
    Fault.CUT,
    Fault.LONG_LENGTH,
    Fault.HUGE_LENGTH,
    Fault.WHOLE,
    Fault.MORE,
    Fault.WRONG_BYTE,
    Fault.INTERNAL,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pulled")
    store = make_store(path / "a.store", samples_of({"train/64x64": 9}), samples_of({"train/64x64": 5}, "b/"))
    push(store.path, ObjectFolder.open(f"file://{path}/served/a"))
    return path


def reaching(server: RangeServer, deadline_s: float) -> ObjectFolder:
    return ObjectFolder.open(f"{server.url}/a", RemoteOptions(deadline_s=deadline_s))


@pytest.mark.parametrize("fault", FAULTS)
def test_one_wrong_answer_does_not_end_a_pull(fault: Fault, made: Path, tmp_path: Path) -> None:
    once = Schedule([fault] * 2, concerns=lambda path: path.endswith((".lmdb", ".index")))
    with RangeServer(made / "served", schedule=once) as server:
        pulled = pull(reaching(server, 20.0), tmp_path / "b.store")
    assert (pulled.samples, once.given) == (14, 2)
    for path in (made / "a.store" / "shards").iterdir():
        assert (tmp_path / "b.store" / "shards" / path.name).read_bytes() == path.read_bytes()


def test_what_stays_missing_ends_a_pull_within_the_deadline(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "served", tmp_path / "served")
    (tmp_path / "served" / "a" / "shards" / "g1.index").unlink()
    with RangeServer(tmp_path / "served") as server:
        begun = time.monotonic()
        with pytest.raises(MissingObjectError, match=r"g1\.index is missing"):
            pull(reaching(server, 8.0), tmp_path / "b.store")
        assert time.monotonic() - begun < 8.0
        assert server.statistics.refused > 2


def test_what_stays_wrong_ends_a_pull_after_a_few_tries(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "served", tmp_path / "served")
    flip_bit(tmp_path / "served" / "a" / "shards" / "g1.index", 4000)
    with RangeServer(tmp_path / "served") as server:
        with pytest.raises(CorruptError, match=r"g1\.index is damaged: its digest is not the manifest's"):
            pull(reaching(server, 60.0), tmp_path / "b.store")
        assert server.statistics.gets["/a/shards/g1.index"] == 3


def test_verifying_waits_for_no_deadline_where_objects_are_missing(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "served", tmp_path / "served")
    for name in ("g0.index", "g1.index"):
        (tmp_path / "served" / "a" / "shards" / name).unlink()
    with RangeServer(tmp_path / "served") as server:
        begun = time.monotonic()
        found = verify_folder(reaching(server, 60.0), lambda _: None, 1)
        assert [fault.shard for fault in found.corrupt] == ["g0", "g1"]
        assert time.monotonic() - begun < 30.0
