"""Loaders that read a store from a server that stalls, and on a slow line.

Processes that fetch lines of one shard into one cache are killed at random moments: what is marked as present is right.
"""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bucketline.bench.fixtures.range_server import Fault, RangeServer, Schedule
from bucketline.bench.fixtures.server_process import ServerProcess, control
from bucketline.errors import BucketlineError
from bucketline.loader import Loader
from bucketline.store.format.block import LINE_BYTES, checksum
from bucketline.store.remote.cache import folder as cache_folder
from bucketline.store.remote.cache.cached_shard import ABSENT, PINNED, RING
from tests.fault.apart import Apart, How
from tests.fault.remote import IMAGES, LARGE, SLACK_S, Served, check_batch, in_lines, one_pass, served
from tests.unit.store.remote.cache.lines import NUM_LINES, open_shard, sums


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module")
def small(folder: Path) -> Served:
    return served(folder, IMAGES)


def until_error(loader: Loader, expected: list[str]) -> tuple[int, BucketlineError, float]:
    step, begun = 0, time.perf_counter()
    try:
        for batch in loader:
            check_batch(batch, step, expected)
            step, begun = step + 1, time.perf_counter()
    except BucketlineError as error:
        return step, error, time.perf_counter() - begun
    pytest.fail(f"{step} batches came from a store that stalls")


@pytest.mark.parametrize("outage", [Fault.STALL_HEADER, Fault.STALL_BODY, Fault.UNAVAILABLE, Fault.REDIRECT_LOOP])
def test_a_store_that_stalls_is_an_error_within_the_deadline_and_iterating_again_resumes(
    outage: Fault, small: Served, folder: Path, tmp_path: Path
) -> None:
    deadline_s = 3.0
    config = in_lines(batch_size=4, seed=5, cache=str(tmp_path / "cache"), deadline=deadline_s)
    expected = small.digests(config)
    with RangeServer(folder / "served") as server:
        url = f"{server.url}/{small.name}"
        with Loader(url, config) as loader:
            server.outage = outage
            step, error, seconds = until_error(loader, expected)
            assert seconds < deadline_s + SLACK_S
            assert url in str(error)
            server.outage = None
            for batch in loader:
                check_batch(batch, step, expected)
                step += 1
    assert step == len(expected)


def test_an_error_in_the_middle_names_the_line(small: Served, folder: Path, tmp_path: Path) -> None:
    """The sidecars are there, and only the shards' files stall."""
    config = in_lines(batch_size=4, seed=6, cache=str(tmp_path / "cache"), deadline=2.0)
    expected = small.digests(config)
    schedule = Schedule([Fault.STALL_BODY] * 1000, concerns=lambda path: path.endswith(".lmdb"))
    with RangeServer(folder / "served", schedule=schedule) as server:
        url = f"{server.url}/{small.name}"
        with Loader(url, config) as loader:
            _, error, _ = until_error(loader, expected)
    assert f"{url}/shards/" in str(error)
    assert ".lmdb, line 0 (bytes 0 to" in str(error)


def test_a_slow_line_is_not_a_store_that_stalls(folder: Path, tmp_path: Path) -> None:
    """More is requested at a time than the line sends within a request's time limit."""
    config, large = in_lines(batch_size=16, seed=7, cache=str(tmp_path / "cache"), deadline=8.0), served(folder, LARGE)
    with ServerProcess(folder / "served") as server:
        control(server.url, "bytes_per_s=25e6")
        done = one_pass(f"{server.url}/{large.name}", large.digests(config), config)
        sent = server.reset()
    assert not done
    assert sent.num_bytes < 1.2 * sum(path.stat().st_size for path in (large.local / "shards").glob("*.lmdb"))


KILLS = 60
LIMIT = 3 * LINE_BYTES + (1 << 16)  # one line is pinned, two pass through the ring


def fetch_for_ever(path: Path, seed: int) -> None:
    draw, opened = random.Random(seed), open_shard(path, limit=LIMIT)
    while True:
        number = draw.randrange(NUM_LINES)
        held = opened.fetcher.hold([(opened.shard, number)], 0)
        opened.fetcher.wait(held)
        assert checksum(memoryview(opened.shard.read(number))) == sums()[number]
        opened.fetcher.release(held)


def test_lines_that_are_marked_are_right_whenever_processes_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "LEAST_BYTES", LINE_BYTES)
    monkeypatch.setattr(cache_folder.CacheFolder, "ring_bytes", property(lambda own: own.limit - LINE_BYTES))
    sums()
    draw, seed = random.Random(0), 4
    children = [Apart(partial(fetch_for_ever, tmp_path / "cache", number)) for number in range(4)]
    for _ in range(KILLS):
        time.sleep(draw.uniform(0.0, 0.15))
        victim = children.pop(draw.randrange(len(children)))
        victim.kill()
        assert victim.ended().how is How.DIED  # it had not ended by itself
        children.append(Apart(partial(fetch_for_ever, tmp_path / "cache", seed)))
        seed += 1
    for child in children:
        child.kill()
        child.ended()
    opened = open_shard(tmp_path / "cache", limit=LIMIT)
    states = opened.shard.present
    assert set(states.tolist()) <= {ABSENT, PINNED, RING}
    for number in np.flatnonzero(states).tolist():
        assert checksum(memoryview(opened.shard.read(number))) == sums()[number]
    held = int(np.count_nonzero(states)) * LINE_BYTES
    assert opened.cache.room.used() <= LIMIT
    assert opened.shard.path.stat().st_blocks * 512 <= held + (4 << 20)
    opened.read(NUM_LINES - 1)
