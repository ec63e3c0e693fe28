"""The metrics of a service for Prometheus, and its statistics as text."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import threading
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from bucketline.errors import BucketlineError, UsageError
from bucketline.loader import Loader, LoaderConfig, ServiceAddress
from bucketline.loader.commands.stats import stats_of, summary
from bucketline.loader.service import links
from bucketline.loader.service import metrics as metrics_module
from bucketline.loader.service.address import address_of
from bucketline.loader.service.metrics import metrics_served
from bucketline.loader.service.server import Service
from bucketline.loader.service.sockets import Security
from bucketline.store import Store
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import RemoteOptions
from bucketline.store.sync.push_pull import push
from tests.commands import spawn
from tests.kit import make_store, samples_of
from tests.leftovers import wait_until
from tests.serving import serving, serving_here

LINE = re.compile(r"^(bucketline_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def metrics_at(port: int) -> dict[str, dict[str, float]]:
    """Return the values that Prometheus would be told, by name and labels."""
    found: dict[str, dict[str, float]] = {}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        for name, labels, value in LINE.findall(answer.read().decode()):
            found.setdefault(name, {})[labels] = float(value)
    return found


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9400", ("127.0.0.1", 9400)),
        (":9400", ("127.0.0.1", 9400)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:9400", ("::1", 9400)),
        ("gpu7.local:65535", ("gpu7.local", 65535)),
    ],
)
def test_an_address_without_a_host_is_of_this_machine(text: str, address: tuple[str, int]) -> None:
    assert address_of(text) == address


@pytest.mark.parametrize("text", ["", "localhost", "localhost:", "localhost:x", ":-1", ":65536", "::²"])
def test_what_is_not_an_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not an address, expected HOST:PORT"):
        address_of(text)


def test_metrics_count_what_each_client_was_given_and_stay_when_it_has_left(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service([store.path])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    monkeypatch.setattr(links, "connected", lambda _: ours)
    stores = f'stores="{store.path}"'
    with metrics_served("127.0.0.1:0", service.stats) as port:
        assert metrics_at(port)["bucketline_requests_refused_total"] == {"": 0}
        with Loader(store, LoaderConfig(batch_size=2, epochs=1), rank=1, world_size=2, service="/unused") as loader:
            service.take_in(theirs)
            batches = loader.forever()
            first = next(batches)
            now = metrics_at(port)
            samples = first.ids.shape[0] + sum(batch.ids.shape[0] for batch in batches)
            said = loader.stats()
            del batches, first
        assert wait_until(lambda: not service.stats()["clients"])
        then = metrics_at(port)
        with pytest.raises(UsageError, match=r"cannot listen at 127.0.0.1:\d+ for --metrics: "):
            metrics_served(f"127.0.0.1:{port}", service.stats).__enter__()
    service.stop()
    labels = f'pid="{os.getpid()}",rank="1",{stores}'
    assert now["bucketline_client_depth"][labels] >= now["bucketline_client_ready"][labels] >= 0
    assert 2 <= sum(now["bucketline_client_samples"].values()) <= samples
    assert "bucketline_client_ready" not in then
    assert then["bucketline_samples_total"] == {stores: samples}
    for found in now, then:
        assert found["bucketline_clients_total"] == {stores: 1}
        assert found["bucketline_errors_total"] == {stores: 0}
    assert then["bucketline_client_waits_total"] == {stores: said.waits}  # 0 if all batches were ready in time
    assert said.waits > 0 or then["bucketline_client_waited_seconds_total"] == {stores: 0}
    assert then["bucketline_client_waited_seconds_total"][stores] < 60
    with pytest.raises(OSError, match="refused"):
        metrics_at(port)


def test_metrics_stay_within_their_connections_and_time(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics_module, "MAX_CONNECTIONS", 3)
    answer_s = metrics_module.ANSWER_S
    monkeypatch.setattr(metrics_module, "ANSWER_S", 0.5)
    stats: dict[str, Any] = {"by_stores": [], "clients": [], "fetched": {}, "network": None, "refused": 7}
    with metrics_served("127.0.0.1:0", lambda: stats) as port, ExitStack() as using:
        before = set(threading.enumerate())
        stalled = [using.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)) for _ in range(12)]
        stalled[0].sendall(b"GET /met")
        for one in stalled:  # each is ended by the server: at once, or when its time is over
            with suppress(ConnectionResetError):
                assert one.recv(1) == b""
        assert wait_until(lambda: set(threading.enumerate()) <= before)
        monkeypatch.setattr(metrics_module, "ANSWER_S", answer_s)  # an answer may take longer on a busy machine
        assert metrics_at(port)["bucketline_requests_refused_total"] == {"": 7}
    assert capfd.readouterr().err == ""


def test_a_client_of_the_metrics_that_sends_a_byte_now_and_then_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_s = metrics_module.ANSWER_S
    monkeypatch.setattr(metrics_module, "ANSWER_S", 0.3)
    stats: dict[str, Any] = {"by_stores": [], "clients": [], "fetched": {}, "network": None, "refused": 0}
    with metrics_served("127.0.0.1:0", lambda: stats) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=0.05) as sock:

            def is_ended() -> bool:
                try:
                    sock.sendall(b"x")
                    return sock.recv(1) == b""
                except TimeoutError:
                    return False
                except OSError:
                    return True

            assert wait_until(is_ended)
        monkeypatch.setattr(metrics_module, "ANSWER_S", answer_s)  # an answer may take longer on a busy machine
        assert metrics_at(port)


def test_fetching_is_counted_by_store_with_its_latencies(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}/pushed.store"
    push(shutil.copytree(store.path, tmp_path / "own.store"), ObjectFolder.open(url))
    service = Service([url], RemoteOptions(cache=tmp_path / "cache", cache_bytes=1 << 30))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    monkeypatch.setattr(links, "connected", lambda _: ours)
    config = LoaderConfig(batch_size=2, epochs=1, cache=str(tmp_path / "cache"), cache_bytes="1GiB")
    with metrics_served("0", service.stats) as port, Loader(url, config, service="/unused") as loader:
        service.take_in(theirs)
        for _ in loader:
            pass
        found = metrics_at(port)
    service.stop()
    label = f'url="{url}"'
    assert found["bucketline_fetched_bytes_total"][label] > 0
    lines = found["bucketline_fetch_seconds_count"][label]
    assert lines == found["bucketline_fetch_requests_total"][label] > 0
    assert found["bucketline_fetch_seconds_bucket"][f'le="+Inf",{label}'] == lines
    assert 0 < found["bucketline_fetch_seconds_sum"][label] < 60


def test_an_iteration_that_fails_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_store(tmp_path / "s.store", samples_of({"train/64x64": 4}))
    service = Service([made.path])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    monkeypatch.setattr(links, "connected", lambda _: ours)
    monkeypatch.setattr("bucketline.loader.collate.batch_builder.BatchBuilder.fill", _fail)
    with Loader(made, LoaderConfig(batch_size=2, epochs=1), service="/unused") as loader:
        service.take_in(theirs)
        with pytest.raises(BucketlineError, match="the disk is on fire"):
            next(loader.forever())
    assert wait_until(lambda: not service.stats()["clients"])
    assert service.stats()["errors"] == service.stats()["by_stores"][0]["errors"] == 1
    service.stop()


def _fail(*_: object, **__: object) -> None:
    raise BucketlineError("the disk is on fire")


def test_the_text_says_who_waits_and_for_which_buckets(store: Store, socket_path: Path) -> None:
    assert wait_until(lambda: not stats_of(socket_path)["clients"])  # those of earlier tests have left
    with Loader(store, LoaderConfig(batch_size=2), service=socket_path) as loader:
        batches = loader.forever()
        for _ in range(5):
            next(batches)
        now = stats_of(socket_path)
    (one,) = (one for one in now["clients"] if one["pid"] == os.getpid())
    many = {f"train/{n}x{n}": n for n in range(5)}
    said = summary({**now, "clients": [{**one, "is_waiting": True, "by_bucket": many}]})
    assert f"process {os.getpid()}, rank 0 of 1" in said
    assert str(store.path) in said
    assert ", waits now; of train/4x4, train/3x3, train/2x2 and 2 more" in said
    assert "waits now" not in summary({**now, "clients": [{**one, "is_waiting": False}]})
    assert "0 ended with an error, 7 refused" in summary({**now, "errors": 0, "refused": 7})


def test_clients_on_other_machines_are_counted_while_connected_and_stay_in_the_totals(store: Store, tmp_path: Path) -> None:
    assert Service([store.path]).stats()["network"] is None
    for name, token in (("token", b"the token of this test"), ("other", b"not the token of this test")):
        (tmp_path / name).write_bytes(token)
        (tmp_path / name).chmod(0o600)
    with (
        serving_here(tmp_path, store.path, security=Security(token=b"the token of this test")) as found,
        metrics_served("127.0.0.1:0", found.service.stats) as port,
    ):
        service, own = found.service, ServiceAddress(found.tcp, token=tmp_path / "token")
        with Loader(None, LoaderConfig(batch_size=2), service=own, rank=1, world_size=2, generation=2) as far:
            batches = far.forever()
            next(batches)
            assert wait_until(lambda: service.stats()["network"]["samples"] >= 2)
            now, said = metrics_at(port), summary(service.stats())
            del batches
        assert wait_until(lambda: not service.stats()["network"]["clients"])
        before = service.stats()["network"]
        with Loader(None, LoaderConfig(batch_size=2, epochs=1), service=own) as far:
            samples = sum(batch.ids.shape[0] for batch in far.forever())
        with pytest.raises(BucketlineError, match="the token is not the server's"):
            Loader(None, LoaderConfig(batch_size=2), service=ServiceAddress(found.tcp, token=tmp_path / "other"))
        assert wait_until(lambda: service.stats()["network"]["samples"] == before["samples"] + samples)
        then = service.stats()
        assert metrics_at(port)["bucketline_network_samples_total"] == {"": then["network"]["samples"]}
    assert now["bucketline_network_clients_total"] == {"": 1}
    (labels,) = now["bucketline_network_client_samples"]
    assert re.fullmatch(r'address="127\.0\.0\.1:\d+",rank="1"', labels)
    assert "other machines: 1 client now, 1 since the start" in said
    assert "waited" in said.partition("rank 1 of 2: ")[2]
    assert now["bucketline_network_client_buffers"][labels] >= 1
    assert then["network"]["by_stores"][0]["samples"] == then["network"]["samples"]
    assert (then["network"]["clients_so_far"], then["network"]["refused"], then["network"]["errors"]) == (2, 1, 0)
    assert (then["samples"], then["clients_so_far"]) == (0, 0)  # those of this machine


@pytest.mark.slow
def test_a_service_answers_prometheus(tmp_path: Path) -> None:
    made = make_store(tmp_path / "s.store", samples_of({"train/64x64": 40}))
    path = tmp_path / "socket"
    with serving(path, made.path, options=("--metrics", "127.0.0.1:0", "--at", "tcp://127.0.0.1:0")) as process:
        assert process.stderr is not None
        listens, port = (int(process.stderr.readline().split()[-1]) for _ in range(2))
        with Loader(None, LoaderConfig(batch_size=2, epochs=1), service=f"tcp://{listens}") as far:
            assert sum(batch.ids.shape[0] for batch in far.forever()) == 40
        assert wait_until(lambda: stats_of(path)["network"]["samples"] == 40)
        with Loader(made, LoaderConfig(batch_size=2), service=path) as loader:
            batches = loader.forever()  # kept: a client whose iterator is gone has left
            next(batches)
            assert metrics_at(port)["bucketline_client_depth"]
    refused = spawn([sys.executable, "-m", "bucketline.loader.cli", "serve", made.path, "--at", path, "--metrics", "nowhere"])
    assert refused.code == 2
    assert "nowhere is not an address" in refused.err
