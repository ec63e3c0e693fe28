"""Ranges read over plain HTTP are those that the client reads, whatever the server does."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from bucketline.bench.fixtures.range_server import Fault, RangeServer, Schedule
from bucketline.errors import StoreError
from bucketline.store.remote.objects import ObjectFolder, RemoteOptions
from bucketline.store.remote.plain_http import MAX_OTHER
from tests.leftovers import wait_until
from tests.object_storage import CREDENTIALS, S3Bucket

NUM_BYTES = (3 << 20) + 17
DEADLINE_S = 8.0


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    data = os.urandom(NUM_BYTES)
    (tmp_path / "a.store" / "shards").mkdir(parents=True)
    (tmp_path / "a.store" / "shards" / "a.lmdb").write_bytes(data)
    return data


def pieces(folder: ObjectFolder, begin: int, end: int) -> bytes:
    return b"".join(bytes(piece) for piece in folder.pieces("a.lmdb", begin, end))


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


def folder_on(server: RangeServer, deadline_s: float = DEADLINE_S) -> ObjectFolder:
    """Return the folder as a bucket, whose ranges are requested over plain HTTP."""
    return ObjectFolder.open("s3://a.store/shards", RemoteOptions(endpoint=server.url, deadline_s=deadline_s))


def failing(tmp_path: Path, *faults: Fault) -> Iterator[ObjectFolder]:
    with RangeServer(tmp_path, schedule=Schedule(faults)) as server:
        yield folder_on(server)


@pytest.mark.parametrize(
    ("begin", "end"), [(0, 1), (0, NUM_BYTES), (5, 1 << 20), (1 << 20, 2 << 20), (NUM_BYTES - 3, NUM_BYTES)]
)
def test_pieces_are_the_range(begin: int, end: int, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in failing(tmp_path):
        monkeypatch.setattr(ObjectFolder, "_range", None)  # the client is not asked
        assert pieces(folder, begin, end) == data[begin:end]
        assert pieces(folder, begin, end) == data[begin:end]


def test_a_request_to_s3_is_signed(s3: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    data, folder = os.urandom(NUM_BYTES), s3.folder("some where/a.store")
    folder.write("a.lmdb", data)
    monkeypatch.setattr(ObjectFolder, "_range", None)
    assert pieces(folder, 7, NUM_BYTES) == data[7:]


@pytest.mark.parametrize(
    "fault", [Fault.UNAVAILABLE, Fault.CLOSED, Fault.SHORT_LENGTH, Fault.WHOLE, Fault.OTHER_RANGE, Fault.REDIRECT]
)
def test_another_answer_is_left_to_the_client(fault: Fault, data: bytes, tmp_path: Path) -> None:
    for folder in failing(tmp_path, fault):
        assert pieces(folder, 9, 1 << 20) == data[9 : 1 << 20]


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.RESET, Fault.STALL_BODY, Fault.STALL_HEADER])
def test_an_answer_that_breaks_off_is_an_error_in_time_and_the_next_is_right(fault: Fault, data: bytes, tmp_path: Path) -> None:
    for folder in failing(tmp_path, fault):
        begun = time.monotonic()
        with pytest.raises(StoreError, match=r"a\.lmdb"):
            pieces(folder, 0, NUM_BYTES)
        assert time.monotonic() - begun < DEADLINE_S
        assert pieces(folder, 0, NUM_BYTES) == data


def test_a_server_that_always_redirects_is_left_to_the_client_for_good(data: bytes, tmp_path: Path) -> None:
    with RangeServer(tmp_path, schedule=Schedule([Fault.REDIRECT] * 100)) as server:
        folder = folder_on(server, 60.0)
        for _ in range(MAX_OTHER + 2):
            assert pieces(folder, 0, 100) == data[:100]
        assert server.statistics.faults[Fault.REDIRECT] == 2 * MAX_OTHER + 2


def test_an_interpreter_may_end_while_a_thread_reads(data: bytes, tmp_path: Path) -> None:
    script = (
        "import sys, threading; from bucketline.store.remote.objects import ObjectFolder\n"
        "from bucketline.store.remote.urls import RemoteOptions\n"
        "folder = ObjectFolder.open('s3://a.store/shards', RemoteOptions(endpoint=sys.argv[1]))\n"
        "threading.Thread(target=lambda: list(folder.pieces('a.lmdb', 0, 3 << 20)), daemon=True).start()\n"
        "sys.stdin.read()"
    )
    with RangeServer(tmp_path, schedule=Schedule([Fault.STALL_BODY])) as server:
        command = [sys.executable, "-c", script, server.url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert wait_until(lambda: server.statistics.faults[Fault.STALL_BODY] == 1)
            _, err = process.communicate()
    assert process.returncode == 0, err


def test_a_connection_is_closed_as_soon_as_its_folder_is_gone(data: bytes, tmp_path: Path) -> None:
    """A garbage collection may come to a socket before its owner, and warn that nobody has closed it."""
    gc.disable()
    try:
        with RangeServer(tmp_path) as server:
            folder = folder_on(server)
            assert pieces(folder, 0, 100) == data[:100]
            assert folder._plain_http is not None
            plain_http = weakref.ref(folder._plain_http)
            del folder
            assert plain_http() is None
    finally:
        gc.enable()


def test_a_proxy_is_respected(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("http.client.HTTPConnection", None)  # nothing is requested without the client
    monkeypatch.setenv("http_proxy", "http://proxy.example.com:3128")
    monkeypatch.setattr(ObjectFolder, "_range", lambda *_: [data])
    for folder in failing(tmp_path):
        assert pieces(folder, 0, NUM_BYTES) == data
