"""Two runs that fill one small cache at once: both finish with the right batches, and the cache stays within its limit."""

from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bucketline.loader import Batch, Loader, LoaderConfig
from bucketline.loader.plan.plan import CacheNeeds
from bucketline.store import Store
from bucketline.store.remote.cache import folder as folder_module
from bucketline.store.remote.cache import remote_source
from bucketline.store.remote.cache.room import Room
from tests.commands import ROOT
from tests.kit import make_store, samples_of
from tests.unit.loader.test_remote import LINE_BYTES, WITH_LINES, pushed

pytestmark = pytest.mark.slow

ROWS = {"train/64x64": 40, "train/96x64": 15}
DEADLINE_S = 60.0  # of a run that gets no room
LONGEST_S = 240.0


def small_lines(patch: Any = setattr) -> None:
    for name in WITH_LINES:
        patch(importlib.import_module(f"bucketline.{name}"), "LINE_BYTES", LINE_BYTES)
    patch(folder_module, "LEAST_BYTES", 4 * LINE_BYTES)


def digest(batch: Batch) -> str:
    found = hashlib.blake2b()
    for tensor in (batch.latents, batch.tokens, batch.ids):
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def read(url: str, options: dict[str, Any], answer: str) -> None:
    small_lines()
    with Loader(url, LoaderConfig(**options, deadline=DEADLINE_S)) as loader:
        digests = [digest(batch) for batch in loader]
    Path(answer).write_text(json.dumps(digests), encoding="ascii")


def used(cache: Path) -> int:
    """Return the bytes that all processes hold or have reserved."""
    words = np.fromfile(cache / "room", dtype="<i8") if (cache / "room").exists() else np.zeros(8, dtype="<i8")
    return int(words[:3].sum() + words[8:].sum())


@pytest.mark.parametrize(("names", "parts", "window"), [("aa", "123", 16), ("ab", "1", 0)], ids=str)
def test_two_runs_on_a_cache_for_one_finish_with_the_right_batches(
    names: str, parts: str, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_lines(monkeypatch.setattr)
    stores: dict[str, Store] = {}
    for name in dict.fromkeys(names):
        (tmp_path / name).mkdir()
        samples = (samples_of(ROWS, f"{name}/{part}/") for part in parts)
        stores[name] = make_store(tmp_path / name / f"{name}.store", *samples)
    urls = {name: pushed(store) for name, store in stores.items()}
    asked: list[dict[str, Any]] = []
    expected, ring, sidecars, store_bytes = [], 0, {}, 0
    for seed, name in enumerate(names):
        asked.append({"batch_size": 4, "epochs": 1, "window": window, "seed": seed})
        with Loader(stores[name], LoaderConfig(**asked[-1])) as loader:
            needs = CacheNeeds(loader.rows, loader.plan, 1)
            ring, sidecars[name], store_bytes = max(ring, needs.ring_bytes), needs.kept_bytes, needs.num_bytes
            expected.append([digest(batch) for batch in loader])
    limit = ring + sum(sidecars.values())
    assert limit < store_bytes
    cache = tmp_path / "cache"
    answers = [tmp_path / f"{number}.json" for number in range(2)]
    runs = []
    for name, options, answer in zip(names, asked, answers, strict=True):
        given = json.dumps([urls[name], {**options, "cache": str(cache), "cache_bytes": str(limit)}, str(answer)])
        runs.append(subprocess.Popen([sys.executable, "-m", __name__, given], cwd=ROOT, stdin=subprocess.DEVNULL))
    end, most = time.monotonic() + LONGEST_S, 0
    try:
        while any(run.poll() is None for run in runs) and time.monotonic() < end:
            most = max(most, used(cache))
            time.sleep(0.002)
        assert [run.returncode for run in runs] == [0, 0]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    assert [json.loads(answer.read_bytes()) for answer in answers] == expected
    assert 0 < most <= limit
    assert used(cache) <= limit
    shards = list(cache.rglob("*.lmdb"))
    assert sum(path.stat().st_blocks * 512 - 4096 for path in shards) <= limit  # a block of the file system's own for each


def test_files_that_are_fetched_whole_take_the_place_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is full of one store's lines stays within its limit while another store's sidecars arrive.

    The other store has no room until the first one's loader, which nothing refers to any more, is collected.
    """
    small_lines(monkeypatch.setattr)
    monkeypatch.setattr(folder_module, "_LOOK_AGAIN_S", 0.1)
    stores = {}
    for name in "ab":
        (tmp_path / name).mkdir()
        parts = (samples_of(ROWS, f"{name}/{part}/") for part in "1234")
        stores[name] = make_store(tmp_path / name / f"{name}.store", *parts)
    options: dict[str, Any] = {"batch_size": 4, "epochs": 1, "window": 0}
    with Loader(stores["a"], LoaderConfig(**options)) as loader:
        needs = CacheNeeds(loader.rows, loader.plan, 1)
        sidecars, limit = needs.kept_bytes, needs.ring_bytes + 2 * needs.kept_bytes
    assert sidecars > LINE_BYTES
    cache = tmp_path / "cache"
    most, reserve = 0, Room.reserve

    def noted(room: Room, num_bytes: int, limit: int) -> bool:
        nonlocal most
        with room.locked():  # or other threads could free and reserve while this one adds up
            most = max(most, room.used())
        return reserve(room, num_bytes, limit)

    monkeypatch.setattr(Room, "reserve", noted)
    for name in "aba":
        with Loader(pushed(stores[name]), LoaderConfig(**options, cache=str(cache), cache_bytes=str(limit))) as loader:
            assert sum(1 for _ in loader) == sum(ROWS.values())
            most = max(most, used(cache))
    assert limit - LINE_BYTES < most <= limit
    files = [path for path in cache.glob("*/*/*") if path.suffix in {".meta", ".lines"}]
    assert int(np.fromfile(cache / "room", dtype="<i8")[2]) == sum(path.stat().st_size for path in files)


def test_pinned_lines_leave_room_for_sidecars_that_come_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of more shards than are asked for at once is read through the smallest cache that is not refused."""
    small_lines(monkeypatch.setattr)
    monkeypatch.setattr(remote_source, "AT_ONCE", 1)
    store = make_store(tmp_path / "a.store", *(samples_of(ROWS, f"{part}/") for part in range(8)))
    options: dict[str, Any] = {"batch_size": 4, "epochs": 1, "window": 0}
    with Loader(store, LoaderConfig(**options)) as loader:
        needs = CacheNeeds(loader.rows, loader.plan, 1)
        expected = [digest(batch) for batch in loader]
    limit = needs.ring_bytes + needs.kept_bytes
    assert needs.ring_bytes < needs.kept_bytes < needs.num_bytes - limit  # the sidecars would fill the ring
    cache: dict[str, Any] = {"cache": str(tmp_path / "cache"), "cache_bytes": str(limit)}
    with Loader(pushed(store), LoaderConfig(**options, **cache, deadline=5.0)) as loader:
        assert [digest(batch) for batch in loader] == expected
    assert used(tmp_path / "cache") <= limit


if __name__ == "__main__":
    read(*json.loads(sys.argv[1]))
