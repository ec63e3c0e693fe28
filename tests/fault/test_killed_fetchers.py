"""Processes that fetch lines of one shard into one cache are killed at random moments: what is marked as present is right."""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bucketline.store.format.hashing import LINE_BYTES, checksum
from bucketline.store.remote.cache import folder
from bucketline.store.remote.cache.cached_shard import ABSENT, PINNED, RING
from tests.fault.apart import Apart, How
from tests.unit.store.remote.cache.lines import NUM_LINES, open_shard, sums

SECONDS = 12.0
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
    monkeypatch.setattr(folder, "LEAST_BYTES", LINE_BYTES)
    monkeypatch.setattr(folder.CacheFolder, "ring_bytes", property(lambda own: own.limit - LINE_BYTES))
    sums()
    draw, seed = random.Random(0), 4
    children = [Apart(partial(fetch_for_ever, tmp_path / "cache", number)) for number in range(4)]
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
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
