"""The service gives the batches that a loader in the caller's own process gives, to any number of clients, and ends cleanly."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from bucketline.errors import DeliveryError, PlanError, StoreError, UsageError
from bucketline.loader import Batch, Loader, LoaderConfig
from bucketline.store import Store
from tests.commands import call
from tests.kit import make_store, samples_of
from tests.leftovers import held, left_since, wait_until
from tests.serving import serving, serving_here


def assert_same(one: Batch, other: Batch) -> None:
    for field in fields(Batch):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, dict):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(value, theirs[name]) for name, value in mine.items()), field.name
        else:
            assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs, field.name


def test_a_loop_that_holds_one_batch_at_a_time_uses_a_few_buffers_and_one_that_let_go_gives_memory_back(
    store: Store, socket_path: Path
) -> None:
    with Loader(store, LoaderConfig(batch_size=4, prefetch_bytes=1), service=socket_path) as loader:
        batches = loader.forever()
        kept = [next(batches) for _ in range(40)]
        assert loader.stats().buffers >= 40
        kept.clear()
        for _ in range(20):
            next(batches)
        assert loader.stats().buffers <= 8


def test_a_store_that_is_not_served_is_refused_by_name(socket_path: Path, tmp_path: Path) -> None:
    make_store(tmp_path / "other", samples_of({"train/64x64": 10}))
    with (
        Loader(tmp_path / "other", LoaderConfig(batch_size=1), service=socket_path) as loader,
        pytest.raises(StoreError, match=r"other is not among the stores that the service reads \(.*small.store\)"),
    ):
        next(loader.forever())


@contextmanager
def many_descriptors() -> Iterator[None]:
    """Keep all descriptors up to 1,100 open: one that is opened then has a number that `select.select` does not take."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit[0], 2048), max(limit[1], 2048)))
    null, held = os.open(os.devnull, os.O_RDONLY), list[int]()
    try:
        while not held or held[-1] < 1100:
            held.append(os.dup(null))
        yield
    finally:
        for fd in (null, *held):
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


@pytest.mark.parametrize("kind", ["auto", "unix", "tcp"])
def test_a_service_of_a_process_with_over_1024_descriptors_delivers(store: Store, tmp_path: Path, kind: str) -> None:
    config = LoaderConfig(batch_size=4, epochs=1)
    with Loader(store, config) as loader:
        expected = [batch.ids.tolist() for batch in loader]
    with many_descriptors(), serving_here(tmp_path, store.path) as served:
        service = {"auto": "auto", "unix": f"unix:{served.socket}", "tcp": served.tcp}[kind]
        with Loader(store, config, service=service) as loader:
            assert [batch.ids.tolist() for batch in loader] == expected


def test_a_private_service_whose_store_went_is_an_error(tmp_path: Path) -> None:
    import shutil

    make_store(tmp_path / "s", samples_of({"train/64x64": 10}))
    loader = Loader(tmp_path / "s", LoaderConfig(batch_size=1), service="auto")
    shutil.rmtree(tmp_path / "s")
    with pytest.raises(StoreError, match="is not a store"):
        next(loader.forever())
    with pytest.raises(PlanError):
        Loader(make_store(tmp_path / "t", samples_of({"val/64x64": 1})), LoaderConfig(batch_size=1), service="auto")


def test_no_service_at_a_path_is_an_error_that_says_how_to_start_one(store: Store, tmp_path: Path) -> None:
    loader = Loader(store, LoaderConfig(batch_size=1), service=tmp_path / "nobody")
    with pytest.raises(DeliveryError, match=r"no service can be reached at .*nobody: .*; start one: loader serve"):
        next(loader.forever())
    with pytest.raises(UsageError, match="the system takes 107"):
        Loader(store, LoaderConfig(batch_size=1), service=tmp_path / ("x" * 108))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_service_that_is_stopped_says_so_to_its_clients_and_removes_its_socket(
    store: Store, tmp_path: Path, number: signal.Signals
) -> None:
    before = held()
    with serving(tmp_path / "s", store.path, options=("--json",)) as process:
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
        with Loader(store, LoaderConfig(batch_size=1, prefetch_bytes=1), service=tmp_path / "s") as loader:
            batches = loader.forever()
            assert next(batches).step == 0
            process.send_signal(number)
            out, err = process.communicate(timeout=120)
            assert (process.returncode, err) == (0, "")
            with pytest.raises(DeliveryError, match="the service was stopped; restart it"):
                list(batches)
            del batches
        assert not (tmp_path / "s").exists()
        last = json.loads(out.splitlines()[-1])
        assert (last["clients_so_far"], last["clients"]) == (1, [])
        assert last["samples"] >= 1
    del process
    assert left_since(before) == {}


def test_statistics_say_who_was_given_what(store: Store, socket_path: Path) -> None:
    assert wait_until(lambda: not call_stats(socket_path)["clients"])  # those of earlier tests have left
    config = LoaderConfig(batch_size=2, prefetch_bytes=1)
    with Loader(store, config, rank=1, world_size=2, service=socket_path) as loader:
        batches = loader.forever()
        for _ in range(5):
            next(batches)
        stats = call("loader", "stats", socket_path, "--json").json
        (client,) = [one for one in stats["clients"] if one["pid"] == os.getpid()]
        assert (client["rank"], client["world_size"], client["stores"]) == (1, 2, [str(store.path)])
        assert client["batches"] >= 5
        assert client["samples"] == sum(client["by_bucket"].values()) == 2 * client["batches"]
        assert client["ready"] <= client["depth"] == 2
        assert stats["samples"] >= client["samples"]
        assert "rank 1 of 2" in call("loader", "stats", f"unix:{socket_path}").out
    assert wait_until(lambda: all(c["pid"] != os.getpid() for c in call_stats(socket_path)["clients"]))


def call_stats(path: Path) -> dict[str, list[dict[str, object]]]:
    return call("loader", "stats", path, "--json").json


def test_a_signal_makes_the_service_print_its_statistics_as_an_object(store: Store, tmp_path: Path) -> None:
    with serving(tmp_path / "s", store.path, options=("--json", "--every", "1000")) as process:
        process.send_signal(signal.SIGUSR1)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["stores"] == [str(store.path)]


@pytest.mark.slow
def test_a_signal_makes_the_service_print_its_statistics_as_a_sentence(store: Store, tmp_path: Path) -> None:
    with serving(tmp_path / "s", store.path) as process:
        process.send_signal(signal.SIGUSR1)
        assert process.stderr is not None
        assert "no client now, 0 since the start; 0 samples" in process.stderr.readline()


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_service_whose_log_has_no_reader_continues(options: tuple[str, ...], store: Store, tmp_path: Path) -> None:
    with serving(tmp_path / "s", store.path, options=("--every", "0.001", *options)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        for _ in range(3):  # it prints after each
            call("loader", "stats", tmp_path / "s").done()
        with Loader(store, LoaderConfig(batch_size=4), service=tmp_path / "s") as loader:
            assert [*loader]
        assert process.poll() is None


@pytest.mark.slow
def test_a_service_prints_readable_statistics_every_so_often_and_at_its_end(store: Store, tmp_path: Path) -> None:
    with serving(tmp_path / "s", store.path, options=("--every", "0.05")) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for _ in range(2):
            assert f"{store.path}: no client now, 0 since the start; 0 samples and 0 B in " in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "")
        assert "no client now" in err.splitlines()[-1]
