"""Loaders that read a store from a server: through its faults, through kills, on a full disk, and on a slow line."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import pytest

from bucketline.bench.fixtures.range_server import Fault, RangeServer, Schedule
from bucketline.bench.fixtures.server_process import ServerProcess
from bucketline.errors import BucketlineError
from bucketline.loader import Loader
from bucketline.store.remote.urls import RemoteOptions
from tests.commands import spawn
from tests.fault.served import IMAGES, LARGE, SLACK_S, Served, check_batch, in_lines, one_pass, reaching, served

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module")
def small(folder: Path) -> Served:
    return served(folder, IMAGES)


@pytest.fixture(scope="module")
def large(folder: Path) -> Served:
    return served(folder, LARGE)


def test_faults_of_every_kind_cost_no_byte_no_sample_and_no_more_than_the_deadline() -> None:
    ran = spawn([sys.executable, "-m", "tests.fault.remote_faults", "--faults", 2 * len(Fault), "--seed", 3])
    assert ran.code == 0, ran.out + ran.err
    assert all(fault in ran.out for fault in Fault)
    assert "0 passes that went wrong" in ran.out


@pytest.mark.parametrize("outage", [Fault.STALL_HEADER, Fault.STALL_BODY, Fault.UNAVAILABLE, Fault.REDIRECT_LOOP])
def test_a_store_that_stalls_is_an_error_within_the_deadline_and_iterating_again_resumes(
    outage: Fault, small: Served, folder: Path, tmp_path: Path
) -> None:
    config = in_lines(batch_size=4, seed=5)
    expected = small.digests(config)
    deadline_s = 3.0
    with RangeServer(folder / "served") as server:
        url = f"{server.url}/{small.name}"
        options = RemoteOptions(cache=tmp_path / "cache", deadline_s=deadline_s)
        with Loader(url, reaching(config, options)) as loader:
            server.outage = outage
            step, error, seconds = until_error(loader, expected)
            assert seconds < deadline_s + SLACK_S
            assert url in str(error)
            server.outage = None
            for batch in loader:
                check_batch(batch, step, expected)
                step += 1
    assert step == len(expected)


def until_error(loader: Loader, expected: list[str]) -> tuple[int, BucketlineError, float]:
    """Take batches until an error; return their number, the error, and how long it took."""
    step, begun = 0, time.perf_counter()
    try:
        for batch in loader:
            check_batch(batch, step, expected)
            step, begun = step + 1, time.perf_counter()
    except BucketlineError as error:
        return step, error, time.perf_counter() - begun
    pytest.fail(f"{step} batches came from a store that stalls")


def test_an_error_in_the_middle_names_the_line(small: Served, folder: Path, tmp_path: Path) -> None:
    """The sidecars are there, and only the shards' files stall."""
    config = in_lines(batch_size=4, seed=6)
    schedule = Schedule([Fault.STALL_BODY] * 1000, concerns=lambda path: path.endswith(".lmdb"))
    with RangeServer(folder / "served", schedule=schedule) as server:
        url = f"{server.url}/{small.name}"
        with Loader(url, reaching(config, RemoteOptions(cache=tmp_path / "cache", deadline_s=2.0))) as loader:
            _, error, _ = until_error(loader, small.digests(config))
    assert f"{url}/shards/" in str(error)
    assert ".lmdb, line 0 (bytes 0 to" in str(error)


def test_a_slow_line_is_not_a_store_that_stalls(large: Served, folder: Path, tmp_path: Path) -> None:
    """More is requested at a time than the line sends within a request's time limit."""
    config = in_lines(batch_size=16, seed=7)
    with ServerProcess(folder / "served") as server:
        server.set_bandwidth(25e6)
        options = RemoteOptions(cache=tmp_path / "cache", deadline_s=8.0)
        done = one_pass(f"{server.url}/{large.name}", large.digests(config), config, options)
        sent = server.reset()
    assert not done.errors
    assert sent.num_bytes < 1.2 * sum(path.stat().st_size for path in (large.local / "shards").glob("*.lmdb"))


def test_who_is_killed_while_reading_continues_with_the_right_bytes() -> None:
    ran = spawn([sys.executable, "-m", "tests.fault.remote_kills", "--kills", 6, "--seed", 4])
    assert ran.code == 0, ran.out + ran.err
    assert ran.out.count(": 2 kills, ") == 3


def test_a_full_disk_under_the_cache_is_said_or_lived_with_and_no_byte_is_wrong(
    large: Served, folder: Path, tmp_path: Path
) -> None:
    with ServerProcess(folder / "served") as server:
        url = f"{server.url}/{large.name}"
        ran = spawn([sys.executable, "-m", "tests.fault.full_cache", url, large.local, tmp_path])
    assert ran.code == 0, ran.out + ran.err
    kind, *lines = ran.out.splitlines()
    said = [line.split("\t")[4] for line in lines]
    assert kind == "disk", "nobody may mount here"
    assert any(said)
    assert all("room" in one or "No space left" in one for one in said if one)
    assert all(str(tmp_path) in one for one in said if one)
    assert not any(said[3:]), "the larger ones have room for what is read at a time, also if others fill the disk meanwhile"
