"""A service reads the right stores at the right generations for any number of clients, says what it does, and ends cleanly."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import stat
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bucketline.errors import BucketlineError, DeliveryError, PlanError, StoreError, UsageError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.commands.serve import summary
from bucketline.loader.service.child import ChildLink
from bucketline.loader.service.client import ServiceBackend
from bucketline.loader.service.metrics import metrics_served
from bucketline.loader.service.server import Service
from bucketline.store import Store
from bucketline.store.change.commit import drop
from bucketline.store.change.compact import compact
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import RemoteOptions
from bucketline.store.sync.push_pull import push
from tests.kit import make_store, samples_of
from tests.leftovers import held, left_since, wait_until
from tests.serving import serving, serving_here

CONFIG = LoaderConfig(batch_size=2, prefetch_bytes=1)
LINE = re.compile(r"^(bucketline_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_store(tmp_path / "s.store", samples_of({"train/64x64": 24}, "a/"), samples_of({"train/64x64": 24}, "b/")).path


def epoch_of(loader: Loader) -> list[list[object]]:
    return [batch.ids.tolist() for batch in loader]


@contextmanager
def many_descriptors() -> Iterator[None]:
    """Keep all descriptors up to 1,100 open: one that is opened then has a number that `select.select` does not take."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit[0], 2048), max(limit[1], 2048)))
    null, opened = os.open(os.devnull, os.O_RDONLY), list[int]()
    try:
        while not opened or opened[-1] < 1100:
            opened.append(os.dup(null))
        yield
    finally:
        for fd in (null, *opened):
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


@pytest.mark.parametrize("kind", ["auto", "unix", "tcp"])
def test_a_service_of_a_process_with_over_1024_descriptors_delivers(store: Store, tmp_path: Path, kind: str) -> None:
    config = LoaderConfig(batch_size=4, epochs=1)
    with Loader(store, config) as loader:
        expected = epoch_of(loader)
    with many_descriptors(), serving_here(tmp_path, store.path) as served:
        service = {"auto": "auto", "unix": f"unix:{served.socket}", "tcp": served.tcp}[kind]
        with Loader(store, config, service=service) as loader:
            assert epoch_of(loader) == expected


def test_a_store_that_is_not_served_or_has_gone_and_a_path_without_a_service_are_refused_by_name(
    path: Path, socket_path: Path, tmp_path: Path
) -> None:
    for service, kind, words in (
        (socket_path, StoreError, r"s.store is not among the stores that the service reads \(.*small.store\)"),
        (tmp_path / "nobody", DeliveryError, r"no service can be reached at .*nobody: .*; start one: loader serve"),
    ):
        with Loader(path, CONFIG, service=service) as loader, pytest.raises(kind, match=words):
            next(loader.forever())
    loader = Loader(path, CONFIG, service="auto")
    shutil.rmtree(path)
    with pytest.raises(StoreError, match="is not a store"):
        next(loader.forever())
    with pytest.raises(PlanError):
        Loader(make_store(tmp_path / "t", samples_of({"val/64x64": 1})), CONFIG, service="auto")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_service_that_is_stopped_says_so_to_its_clients_removes_its_socket_and_reports(
    store: Store, tmp_path: Path, number: signal.Signals
) -> None:
    before = held()
    with serving(tmp_path / "s", store.path, options=("--every", "0.05")) as process:
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
        assert process.stderr is not None
        assert f"{store.path}: no client now, 0 since the start; 0 samples and 0 B" in process.stderr.readline()
        with Loader(store, LoaderConfig(batch_size=1, prefetch_bytes=1), service=tmp_path / "s") as loader:
            batches = loader.forever()
            assert next(batches).step == 0
            process.send_signal(number)
            out, err = process.communicate(timeout=120)
            assert (process.returncode, out) == (0, "")
            with pytest.raises(DeliveryError, match="the service was stopped; restart it"):
                list(batches)
            del batches
        assert not (tmp_path / "s").exists()
        assert "no client now, 1 since the start" in err.splitlines()[-1]
    del process
    assert left_since(before) == {}


@pytest.mark.slow
def test_a_service_whose_log_has_no_reader_continues(store: Store, tmp_path: Path) -> None:
    with serving(tmp_path / "s", store.path, options=("--every", "0.001")) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        for _ in range(3):  # it prints after each
            with Loader(store, LoaderConfig(batch_size=4, epochs=1), service=tmp_path / "s") as loader:
                assert [*loader]
        assert process.poll() is None


def metrics_at(port: int) -> dict[str, float]:
    """Return the values that Prometheus would be told, by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return {name + labels: float(value) for name, labels, value in LINE.findall(answer.read().decode())}


def test_metrics_count_what_all_clients_were_given_while_they_read_and_when_they_have_left(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LoaderConfig(batch_size=2, epochs=1)
    with serving_here(tmp_path, store.path) as found, metrics_served("127.0.0.1:0", found.service.stats) as port:
        assert metrics_at(port)["bucketline_requests_refused_total"] == 0

        def has(name: str, value: float) -> bool:
            return wait_until(lambda: metrics_at(port)[f"bucketline_{name}"] == value)

        for service in (found.socket, found.tcp):
            with Loader(None, CONFIG, service=service, rank=1, world_size=2, generation=2) as loader:
                batches = loader.forever()
                next(batches)
                assert has("connected_clients", 1)
                assert metrics_at(port)["bucketline_samples_total"] >= 2
                assert "1 client now" in summary(found.service.stats())
                del batches
            assert has("connected_clients", 0)
            before = metrics_at(port)["bucketline_samples_total"]
            with Loader(None, config, service=service) as loader:
                samples = sum(len(batch.ids) for batch in loader)
            assert has("samples_total", before + samples)
        monkeypatch.setattr("bucketline.loader.collate.batch_builder.BatchBuilder.fill", _fail)
        with Loader(store, config, service=found.socket) as loader, pytest.raises(BucketlineError, match="on fire"):
            next(loader.forever())
        assert wait_until(lambda: metrics_at(port)["bucketline_connected_clients"] == 0)
        with pytest.raises(StoreError):
            Loader(make_store(tmp_path / "o", samples_of({"train/64x64": 4})), CONFIG, service=found.socket).start()
        then = metrics_at(port)
        with pytest.raises(UsageError, match=r"cannot listen at 127.0.0.1:\d+ for --metrics: "):
            metrics_served(f"127.0.0.1:{port}", found.service.stats).__enter__()
    names = ("clients", "errors", "requests_refused")
    assert [then[f"bucketline_{name}_total"] for name in names] == [5, 1, 1]
    assert then["bucketline_client_waits_total"] > 0
    assert 0 < then["bucketline_client_waited_seconds_total"] < 60
    with pytest.raises(OSError, match="refused"):
        metrics_at(port)


def _fail(*_: object, **__: object) -> None:
    raise BucketlineError("the disk is on fire")


def test_fetching_is_counted_by_store_with_its_latencies_and_a_new_client_gets_the_newest_generation(
    path: Path, tmp_path: Path
) -> None:
    url, remote = f"file://{tmp_path}/pushed.store", RemoteOptions(cache=tmp_path / "cache", cache_bytes=1 << 30)
    push(path, ObjectFolder.open(url))
    with serving_here(tmp_path, url, remote=remote) as found, metrics_served("0", found.service.stats) as port:
        with Loader(None, replace(CONFIG, epochs=1), service=found.tcp) as far:
            before = len(epoch_of(far))
        metrics, said = metrics_at(port), summary(found.service.stats())
        drop_half(path)
        push(path, ObjectFolder.open(url))
        with Loader(None, CONFIG, service=found.tcp) as far, Loader(path, CONFIG) as local:
            assert len(far) == len(local) < before
    label = f'url="{url}"'
    assert metrics[f"bucketline_fetched_bytes_total{label}"] > 0
    lines = metrics[f"bucketline_fetch_seconds_count{label}"]
    assert lines == metrics[f"bucketline_fetch_requests_total{label}"] > 0
    assert metrics[f'bucketline_fetch_seconds_bucketle="+Inf",{label}'] == lines
    assert 0 < metrics[f"bucketline_fetch_seconds_sum{label}"] < 60
    assert f"{url}: fetched " in said


@pytest.mark.slow
def test_the_command_answers_prometheus(path: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "s", path, options=("--metrics", "127.0.0.1:0", "--at", "tcp://127.0.0.1:0")) as process:
        assert process.stderr is not None
        listens, port = (int(process.stderr.readline().split()[-1]) for _ in range(2))
        with Loader(None, LoaderConfig(batch_size=2, epochs=1), service=f"tcp://{listens}") as far:
            assert sum(len(batch.ids) for batch in far.forever()) == 48
        assert wait_until(lambda: metrics_at(port)["bucketline_samples_total"] == 48)


def drop_half(path: Path) -> None:
    bucket = Store.open(path).bucket("train/64x64")
    drop(path, bucket.sample_ids(np.arange(bucket.num_rows // 2)))


def supersede(path: Path) -> None:
    """Publish new generations, and remove the files that only the one before needs."""
    drop_half(path)
    compact(path, shard_bytes=1 << 20, gc_older_than_s=0.0)


def mapped(pid: int, path: Path, *, deleted: bool) -> int:
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    return sum(str(path) in line and line.endswith("(deleted)") == deleted for line in lines)


@pytest.mark.parametrize("how", ["loader serve", "a private service"])
@pytest.mark.slow
def test_what_was_collected_is_unmapped_once_its_last_client_has_gone(path: Path, tmp_path: Path, how: str) -> None:
    config = replace(CONFIG, epochs=3)
    with serving(tmp_path / "sock", path) as process:
        service = tmp_path / "sock" if how == "loader serve" else "auto"
        with Loader(path, config, service=service) as loader, Loader(path, config, service=tmp_path / "sock") as other:
            iterators = [iter(one) for one in (loader, other)]  # held: one that is dropped is ended
            assert [next(batches).step for batches in iterators] == [0, 0]
            backend = loader._backend
            assert isinstance(backend, ServiceBackend)
            pid = backend.link._process.pid if isinstance(backend.link, ChildLink) else process.pid
            supersede(path)
            assert mapped(pid, path, deleted=True) > 0
            loader._end_stream()
            other.close()
            assert wait_until(lambda: mapped(pid, path, deleted=True) == 0)
        with Loader(path, config, service=tmp_path / "sock") as fresh:
            assert next(fresh.forever()).step == 0
        assert wait_until(lambda: mapped(process.pid, path, deleted=False) > 0), "the newest is kept"
        supersede(path)  # while nobody reads it
        assert wait_until(lambda: mapped(process.pid, path, deleted=True) == mapped(process.pid, path, deleted=False) == 0)


def test_a_client_keeps_its_generation_and_a_state_gets_its_own_as_long_as_its_files_exist(path: Path, tmp_path: Path) -> None:
    with serving_here(tmp_path, path) as served, Loader(path, CONFIG) as local, Loader(None, CONFIG, service=served.tcp) as far:
        assert epoch_of(far) == epoch_of(local)
        drop_half(path)
        assert epoch_of(far) == epoch_of(local)
        state = far.state_dict()
        with Loader(None, CONFIG, service=served.tcp) as newer:
            assert len(newer) < len(far)
            newer.load_state_dict(state)
            assert epoch_of(newer) == epoch_of(local)
            batches, expected = far.forever(), epoch_of(local)
            found = [next(batches).ids.tolist()]
            compact(path, shard_bytes=1 << 20, gc_older_than_s=0.0)
            found += [next(batches).ids.tolist() for _ in expected[1:]]
        with Loader(None, CONFIG, service=served.tcp) as newest, Loader(path, CONFIG) as now:
            assert newest.state_dict() == now.state_dict()
            assert epoch_of(newest) == epoch_of(now) != []
            with pytest.raises(StoreError, match="has no generation 2 any more"):
                newest.load_state_dict(state)
    assert len(found) == len(expected)


@pytest.mark.parametrize("is_diverged", [False, True])
def test_two_copies_of_a_store_are_refused_by_name(path: Path, tmp_path: Path, *, is_diverged: bool) -> None:
    copy = shutil.copytree(path, tmp_path / "copy.store")
    if is_diverged:
        for place, number in ((path, 0), (copy, 1)):
            drop(place, Store.open(place).bucket("train/64x64").sample_ids(np.array([number])))
    with pytest.raises(UsageError, match=rf"{path} and {copy} are copies of one store \(.*\); start a service for each"):
        Service([path, copy])


def test_a_store_that_was_replaced_under_a_service_is_refused_with_what_to_do(path: Path, tmp_path: Path) -> None:
    with serving_here(tmp_path, path) as found, Loader(None, CONFIG, service=found.tcp) as before:
        batches = before.forever()
        first = next(batches)
        shutil.rmtree(path)
        make_store(path, samples_of({"train/64x64": 6}, "o/"))
        for where in (found.socket, found.tcp):
            with pytest.raises(StoreError, match="start it with that store, or again if the store at its path is another"):
                next(iter(Loader(path, CONFIG, service=where)))
            with pytest.raises(StoreError, match=rf"{path} was replaced by another store \(.*\); restart the service"):
                Loader(None, CONFIG, service=where)
        assert next(batches).step == first.step + 1


def test_a_store_that_is_given_twice_is_served_once(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.store"
    link.symlink_to(path)
    with serving_here(tmp_path, path, link, f"{path}:2") as found:
        assert found.service.stats()["stores"] == [str(path)]
        with Loader(path, replace(CONFIG, epochs=1), service=found.socket) as loader:
            assert sum(len(batch.ids) for batch in loader) == 48
