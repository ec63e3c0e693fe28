"""A folder on a web server: its bytes whatever the server does, and no request to another one."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bucketline.bench.fixtures.range_server import Fault, RangeServer, Schedule
from bucketline.errors import StoreError
from bucketline.store.folder import DeniedError, MissingObjectError, NoRangesError
from bucketline.store.remote.objects import ObjectFolder, RemoteOptions
from tests.leftovers import wait_until
from tests.unit.loader.service.test_tcp import certificate_of

NUM_BYTES = (3 << 20) + 17
NAME = "shards/a b.lmdb"
DEADLINE_S = 8.0


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    data = os.urandom(NUM_BYTES)
    (tmp_path / "a.store" / "shards").mkdir(parents=True)
    (tmp_path / "a.store" / NAME).write_bytes(data)
    return data


@contextmanager
def served(
    handler: Callable[..., SimpleHTTPRequestHandler], context: ssl.SSLContext | None = None
) -> Iterator[ThreadingHTTPServer]:
    """Serve a folder, without ranges, by https if there is a context."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def folder_on(server: RangeServer) -> ObjectFolder:
    return ObjectFolder.open(f"{server.url}/a.store/", RemoteOptions(deadline_s=DEADLINE_S))


READS: tuple[tuple[Callable[[ObjectFolder], bytes], slice], ...] = (
    (lambda folder: folder.read(NAME), slice(None)),
    (lambda folder: folder.read_range(NAME, 9, 2 << 20), slice(9, 2 << 20)),
    (lambda folder: folder.read_range(NAME, NUM_BYTES - 5, NUM_BYTES + 5), slice(-5, None)),
    (lambda folder: b"".join(map(bytes, folder.pieces(NAME, 0, NUM_BYTES))), slice(None)),
    (lambda folder: folder.fetch(NAME)[0], slice(None)),
    (lambda folder: folder.fetch_range(NAME, 1, 5)[0], slice(1, 5)),
)


@pytest.mark.parametrize(("read", "part"), READS)
def test_files_and_ranges_are_read(read: Callable[[ObjectFolder], bytes], part: slice, data: bytes, tmp_path: Path) -> None:
    with RangeServer(tmp_path) as server:
        folder = folder_on(server)
        assert read(folder) == read(folder) == data[part]
        assert folder.size(NAME) == NUM_BYTES
        assert folder.size("shards/none") is None
        with pytest.raises(MissingObjectError, match="shards/none is missing"):
            folder.read("shards/none")


@pytest.mark.parametrize(
    "fault",
    [
        *(Fault.UNAVAILABLE, Fault.TOO_MANY, Fault.INTERNAL, Fault.CLOSED, Fault.CUT, Fault.RESET),
        *(Fault.STALL_BODY, Fault.STALL_HEADER, Fault.REDIRECT, Fault.DRIP, Fault.SHORT_HEAD),
    ],
)
@pytest.mark.parametrize(("read", "part"), READS[:2])
def test_what_fails_or_breaks_off_once_is_requested_again(
    fault: Fault, read: Callable[[ObjectFolder], bytes], part: slice, data: bytes, tmp_path: Path
) -> None:
    with RangeServer(tmp_path, schedule=Schedule([fault]), stall_s=DEADLINE_S, drip_s=0.1) as server:
        assert read(folder_on(server)) == data[part]
        assert server.statistics.faults[fault] == 1


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (Fault.WHOLE, NoRangesError, "is answered with all of it"),
        (Fault.OTHER_RANGE, StoreError, "Requested 9..99, got 8..98"),
        (Fault.SHORT_RANGE, StoreError, "Requested 9..99, got 9..54"),
        (Fault.FORBIDDEN, DeniedError, "access denied"),
        (Fault.MISSING, MissingObjectError, "is missing"),
        (Fault.UNAVAILABLE, StoreError, "503 Service Unavailable"),
        (Fault.REDIRECT_LOOP, StoreError, "TooManyRedirects"),
    ],
)
def test_another_answer_is_named(fault: Fault, kind: type[StoreError], message: str, data: bytes, tmp_path: Path) -> None:
    with RangeServer(tmp_path) as server:
        server.outage = fault
        folder = ObjectFolder.open(f"{server.url}/a.store", RemoteOptions(deadline_s=4.0))
        with pytest.raises(kind, match=message):
            folder.read_range(NAME, 9, 99)
        server.outage = None
        assert folder.read_range(NAME, 9, 99) == data[9:99]


def test_a_user_and_password_are_sent_and_not_to_another_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(request: SimpleHTTPRequestHandler) -> None:
        asked.append(request.headers["Authorization"])
        SimpleHTTPRequestHandler.do_GET(request)

    (tmp_path / "manifest.json").write_bytes(b"1")
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    handler = partial(type("Noting", (SimpleHTTPRequestHandler,), {"do_GET": answer}), directory=str(tmp_path))
    with served(handler) as other, RangeServer(tmp_path, elsewhere=f"http://127.0.0.1:{other.server_port}") as server:
        server.outage = Fault.ELSEWHERE
        for port in (other.server_port, server.port):
            assert ObjectFolder.open(f"http://me:p%40ss@127.0.0.1:{port}").read("manifest.json") == b"1"
            assert ObjectFolder.open(f"http://me@127.0.0.1:{port}").read("manifest.json") == b"1"  # without a password
    assert asked == ["Basic bWU6cEBzcw==", "Basic bWU6", None, None]


def test_what_is_gone_for_good_is_missing(tmp_path: Path) -> None:
    handler = type(
        "Gone", (SimpleHTTPRequestHandler,), {"do_GET": lambda request: request.send_error(410), "log_message": print}
    )
    with served(handler) as server, pytest.raises(MissingObjectError, match=r"manifest\.json is missing"):
        ObjectFolder.open(f"http://127.0.0.1:{server.server_port}").read("manifest.json")


def test_an_interpreter_may_end_while_a_thread_reads(data: bytes, tmp_path: Path) -> None:
    script = (
        "import sys, threading; from bucketline.store.remote.objects import ObjectFolder\n"
        "folder = ObjectFolder.open(sys.argv[1])\n"
        "threading.Thread(target=lambda: folder.read('shards/a b.lmdb'), daemon=True).start()\n"
        "sys.stdin.read()"
    )
    with RangeServer(tmp_path, schedule=Schedule([Fault.STALL_BODY])) as server:
        command = [sys.executable, "-c", script, f"{server.url}/a.store"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert wait_until(lambda: server.statistics.faults[Fault.STALL_BODY] == 1)
            _, err = process.communicate()
    assert process.returncode == 0, err


def test_a_certificate_that_nobody_trusts_is_refused(data: bytes, tmp_path: Path) -> None:
    certificate, key = certificate_of(tmp_path, "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with served(partial(SimpleHTTPRequestHandler, directory=str(tmp_path)), context) as server:
        url = f"https://127.0.0.1:{server.server_port}/a.store"
        with pytest.raises(StoreError, match=f"cannot read {url}.*CaUsedAsEndEntity"):
            ObjectFolder.open(url, RemoteOptions(deadline_s=2.0)).read(NAME)
