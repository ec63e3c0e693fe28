"""A folder on a web server: its bytes whatever the server does, and no request to another one."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import pytest

from bucketline.bench.fixtures.range_server import Fault, RangeServer, Schedule
from bucketline.errors import StoreError
from bucketline.store.folder import DeniedError, ExistsError, MissingObjectError, NoRangesError
from bucketline.store.remote.objects import ObjectFolder, RemoteOptions
from tests.leftovers import wait_until
from tests.serving import web_server
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
def test_a_fault_is_requested_again(
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
    with web_server(handler) as other, RangeServer(tmp_path, elsewhere=f"http://127.0.0.1:{other.server_port}") as server:
        server.outage = Fault.ELSEWHERE
        for port in (other.server_port, server.port):
            assert ObjectFolder.open(f"http://me:p%40ss@127.0.0.1:{port}").read("manifest.json") == b"1"
            assert ObjectFolder.open(f"http://me@127.0.0.1:{port}").read("manifest.json") == b"1"  # without a password
    assert asked == ["Basic bWU6cEBzcw==", "Basic bWU6", None, None]


def test_what_is_gone_for_good_is_missing(tmp_path: Path) -> None:
    handler = type(
        "Gone", (SimpleHTTPRequestHandler,), {"do_GET": lambda request: request.send_error(410), "log_message": print}
    )
    with web_server(handler) as server, pytest.raises(MissingObjectError, match=r"manifest\.json is missing"):
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
    with web_server(partial(SimpleHTTPRequestHandler, directory=str(tmp_path)), context) as server:
        url = f"https://127.0.0.1:{server.server_port}/a.store"
        with pytest.raises(StoreError, match=f"cannot read {url}.*CaUsedAsEndEntity"):
            ObjectFolder.open(url, RemoteOptions(deadline_s=2.0)).read(NAME)


class Noting(BaseHTTPRequestHandler):
    """Notes paths, and conditions of writes; there is an object of another writer at each."""

    noted: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self._answer(200, self.path)

    def do_CONNECT(self) -> None:
        self._answer(403, self.path)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        names = ("if-none-match", "x-goog-if-generation-match")
        self._answer(412, *(f"{name}: {self.headers[name]}" for name in names if name in self.headers))

    def _answer(self, status: int, *noted: str) -> None:
        self.noted.extend(noted)
        self.send_response(status)
        for name, value in {"Content-Length": "6", "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT", "ETag": '"1"'}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"theirs")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that notes what it is asked for, and an environment with credentials for it."""
    Noting.noted.clear()
    with web_server(Noting) as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        account = {"gcs_base_url": endpoint, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_ACCOUNT_NAME"):
            monkeypatch.setenv(name, "example")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "aGVsbG8=")
        yield endpoint


@pytest.mark.parametrize(
    ("url", "condition"),
    [
        ("s3://bucket/a.store", "if-none-match: *"),
        ("az://container/a.store", "if-none-match: *"),
        ("gs://bucket/a.store", "x-goog-if-generation-match: 0"),
    ],
)
def test_each_kind_of_storage_is_sent_its_condition(url: str, condition: str, noting: str) -> None:
    with pytest.raises(ExistsError):
        ObjectFolder.open(url, RemoteOptions(endpoint=noting, deadline_s=10)).create("generations/1.json", b"ours")
    assert condition in Noting.noted


@pytest.mark.parametrize(
    ("url", "endpoint", "asked"),
    [
        ("http://store.example.com/a.store", None, "http://store.example.com/a.store/manifest.json"),
        ("s3://bucket/a.store", "http://store.example.com", "http://store.example.com/bucket/a.store/manifest.json"),
        ("https://store.example.com/a.store", None, "store.example.com:443"),
    ],
)
def test_the_environments_proxy_is_used(
    url: str, endpoint: str | None, asked: str, noting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, noting)
    monkeypatch.delenv("no_proxy", raising=False)
    folder = ObjectFolder.open(url, RemoteOptions(endpoint=endpoint, deadline_s=2.0))
    if url.startswith("https"):
        with pytest.raises(StoreError, match=f"cannot read {url}"):
            folder.read("manifest.json")
    else:
        assert folder.read("manifest.json") == b"theirs"
    assert set(Noting.noted) == {asked}
