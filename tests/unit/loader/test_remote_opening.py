"""A store in object storage is opened with few round trips: what is needed next is requested at once, and only once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from bucketline.bench.fixtures.range_server import Fault, RangeServer, Schedule
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.collate.batch_builder import BatchBuilder
from bucketline.loader.collate.buffers import FilledBuffer
from bucketline.loader.collate.window import CopyPlan, PendingBatch
from bucketline.store import Store
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import RemoteOptions
from bucketline.store.sync.push_pull import push
from tests.kit import make_store, samples_of

ROWS = {"train/64x64": 12}


def served(tmp_path: Path) -> tuple[Path, Store]:
    store = make_store(tmp_path / "a.store", samples_of(ROWS, "a/"), samples_of(ROWS, "b/"))
    (tmp_path / "served" / "a").mkdir(parents=True)
    push(store.path, ObjectFolder.open(f"file://{tmp_path / 'served' / 'a'}"))
    return tmp_path / "served", store


def extents_of(counts: dict[str, int]) -> list[int]:
    return [count for name, count in counts.items() if name.endswith(".meta")]


def arrived(path: Path) -> bool:
    end = time.monotonic() + 20
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.005)
    return path.exists()


def test_extents_are_requested_while_newer_generations_are_looked_for(tmp_path: Path) -> None:
    folder, _ = served(tmp_path)
    with RangeServer(folder) as server:
        store = Store.open(f"{server.url}/a", remote=RemoteOptions(cache=tmp_path / "cache"), reads_rows=True)
        assert all(arrived(shard.paths.meta) for shard in store.shards)
        with Loader(store, LoaderConfig(batch_size=4, epochs=1)) as loader:
            assert sum(len(batch.ids) for batch in loader) == 24
        assert extents_of(server.reset().gets) == [1, 1]  # and not again by the loader


def test_extents_of_many_bytes_are_requested_by_who_needs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = served(tmp_path)
    monkeypatch.setattr("bucketline.store.remote.cache.remote_source.REQUESTED_BYTES", 1)
    with RangeServer(folder) as server:
        store = Store.open(f"{server.url}/a", remote=RemoteOptions(cache=tmp_path / "cache"), reads_rows=True)
        store.buckets()[0].locate(np.arange(4))  # of the first shard
        assert extents_of(server.reset().gets) == [1]


def test_whoever_reads_only_the_manifest_requests_no_extents(tmp_path: Path) -> None:
    folder, _ = served(tmp_path)
    with RangeServer(folder) as server:
        Store.open(f"{server.url}/a", remote=RemoteOptions(cache=tmp_path / "cache"))
        assert extents_of(server.reset().gets) == []


def test_what_failed_when_it_was_requested_early_is_requested_again(tmp_path: Path) -> None:
    folder, local = served(tmp_path)
    wrong = Schedule([Fault.WRONG_BYTE, Fault.CUT, Fault.MISSING], concerns=lambda path: path.endswith(".meta"))
    with RangeServer(folder, schedule=wrong) as server:
        config = LoaderConfig(batch_size=4, epochs=1, cache=str(tmp_path / "cache"))
        with Loader(f"{server.url}/a", config) as remote, Loader(local, LoaderConfig(batch_size=4, epochs=1)) as plain:
            assert [batch.ids.tolist() for batch in remote] == [batch.ids.tolist() for batch in plain]
    assert wrong.given == 3


def test_the_first_batch_waits_for_no_lines_but_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches after it are located once it is on its way."""
    located: list[int] = []
    before_filling: list[int] = []
    locate, fill = BatchBuilder.locate, BatchBuilder.fill

    def counting_locate(own: BatchBuilder, steps: Sequence[tuple[int, int]]) -> list[PendingBatch]:
        located.append(len(steps))
        return locate(own, steps)

    def counting_fill(own: BatchBuilder, buffer: Tensor, copy_plan: CopyPlan) -> FilledBuffer:
        before_filling.append(sum(located))
        return fill(own, buffer, copy_plan)

    monkeypatch.setattr(BatchBuilder, "locate", counting_locate)
    monkeypatch.setattr(BatchBuilder, "fill", counting_fill)
    folder, _ = served(tmp_path)
    with RangeServer(folder) as server:
        config = LoaderConfig(batch_size=4, threads=1, cache=str(tmp_path / "cache"))
        with Loader(f"{server.url}/a", config) as loader:
            next(loader.forever())
    assert before_filling[0] == 1
