"""Whatever arrives at a service's sockets, it continues, and a client is told what was wrong."""

from __future__ import annotations

import ctypes
import logging
import os
import random
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bucketline.errors import BucketlineError, DeliveryError, StoreError
from bucketline.loader import Loader, LoaderConfig, ServiceAddress
from bucketline.loader.plan.plan import plan_of
from bucketline.loader.service import client, ring, wire
from bucketline.loader.service.ring import CONTROL_BYTES, ControlPage, Word, map_shared
from bucketline.loader.service.sockets import Security, connected
from bucketline.loader.service.tcp import FrameClient
from bucketline.loader.service.wire import MAX_MESSAGE_BYTES, PROTOCOL, Answer, FullError, LostError, ask, receive, send
from bucketline.store import Store
from bucketline.store.folder import MissingObjectError
from bucketline.typed_json import encode
from tests.contract.test_backends import values
from tests.serving import Served, serving_here

TOKEN = b"the token of these tests"
CONFIG: Any = encode(LoaderConfig(batch_size=1, prefetch_bytes=1))
STORE = {"store_id": "x", "generation": 1, "digest": "d", "path": "p", "repeats": 1}


@pytest.fixture(scope="module")
def served(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_here(tmp_path_factory.mktemp("s"), store.path, security=Security(token=TOKEN)) as found:
        yield found


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("token") / "token"
    path.touch(0o600)
    path.write_bytes(TOKEN)
    return path


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


GARBAGE = {
    "nothing": b"",
    "half a length": b"\0\0",
    "a length without a message": struct.pack(">I", 100),
    "half a message": b"\0\0\0\x10{",
    "a length of gigabytes": struct.pack(">I", 0xFFFFFFFF),
    "a length just too large": struct.pack(">I", MAX_MESSAGE_BYTES + 1) + b"x" * 100,
    "no JSON": frame(b"\x80\x04\x95 pickled"),
    "no text": frame(b"\xff\xfe\xfd"),
    "JSON that is not an object": frame(b"[1, 2]"),
    "JSON nested beyond reason": frame(b"[" * 100_000),
    "an empty object": frame(b"{}"),
    "a number beyond reason": frame(b'{"protocol": ' + b"9" * 5000 + b"}"),
    "a proof that is a number": frame(b'{"proof": 1}'),
    "a proof that is not text": frame(b'{"proof": "\\ud800"}'),
    "the token": frame(b'{"proof": "' + TOKEN + b'"}'),
    "a request in HTTP": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
}


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_is_answered_with_an_error_and_the_service_continues(
    what: str, kind: str, served: Served, token: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with connected(served.socket) if kind == "unix" else socket.create_connection(("127.0.0.1", served.port)) as sock:
        hello = receive(sock, 30.0)
        assert TOKEN.decode() not in str(hello)
        with suppress(OSError, LostError):  # it left with bytes unread
            sock.sendall(GARBAGE[what])
            sock.shutdown(socket.SHUT_WR)
            answer = receive(sock, 30.0)
            assert answer.keys() == {"error", "message"}
            assert answer["error"] == "DeliveryError"
    address = ServiceAddress(served.tcp, token) if kind == "tcp" else served.socket
    with Loader(None, LoaderConfig(batch_size=1), service=address) as loader:
        assert next(loader.forever()).step == 0
    assert capfd.readouterr().err == ""


def test_random_bytes_and_clients_that_leave_or_say_nothing_never_end_the_service(
    served: Served, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(5)
    for _ in range(200):
        with connected(served.socket) as sock:
            sock.sendall(generator.randbytes(generator.randrange(200)))
    with monkeypatch.context() as patch, connected(served.socket) as sock:
        patch.setattr(wire, "REQUEST_S", 0.1)
        receive(sock, 30.0)
        assert "the connection is lost: timed out" in receive(sock, 30.0)["message"]
    with Loader(store, LoaderConfig(batch_size=1), service=served.socket) as loader:
        assert next(loader.forever()).step == 0


def asked(store: Store, **changes: object) -> dict[str, Any]:
    manifest = store.manifest
    own = {"store_id": manifest.store_id, "generation": manifest.generation, "digest": manifest.digest}
    message = {
        "ask": "batches",
        "stores": [{**own, "path": "here", "repeats": 1}],
        "config": CONFIG,
        "rank": 0,
        "world_size": 1,
        "plan": plan_of(store, LoaderConfig(batch_size=1, prefetch_bytes=1), 1).digest,
        "cursor": {"step": 0, "micro_step": 0, "num_steps": None},
    }
    return {**message, **changes}


BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"ask": "more"}, "requests 'more', expected one of batches, stores, names"),
    ({"rank": 5}, "rank is 5 of 1 ranks"),
    ({"rank": "0"}, "rank is '0', expected int"),
    ({"cursor": {"step": -1, "micro_step": 0, "num_steps": None}}, "step is -1, expected 0 to"),
    ({"stores": []}, "0 stores"),
    ({"stores": [STORE]}, "p is not among the stores that the service reads"),
    ({"config": {}}, "message.config lacks the field '"),
    ({"config": {**CONFIG, "batch_size": 0}}, "batch_size is 0, expected 1 or more"),
    ({"config": {**CONFIG, "threads": 10**6}}, "threads is 1000000, expected at most 256"),
    ({"config": {**CONFIG, "surprise": 1}}, "unknown field 'surprise'"),
    ({"plan": "another"}, "the client's plan has the digest another"),
    ({"world_size": 0}, "rank is 0 of 0 ranks"),
]
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"ask": "stores", "store_id": "x", "generation": None}, "the store x is not among the stores"),
    ({"ask": "stores", "store_id": "x"}, "lacks the field 'generation'"),
    ({"ask": "names", "stores": [], "digests": []}, "0 stores were requested"),
    ({"ask": "names", "stores": [STORE], "digests": []}, "p is not among the stores"),
]


@pytest.mark.parametrize(("message", "words"), BATCHES + OTHERS)
def test_a_request_that_makes_no_sense_is_refused_by_name(
    message: dict[str, Any], words: str, served: Served, store: Store
) -> None:
    is_whole = (message, words) in OTHERS
    with connected(served.socket) as sock, pytest.raises(BucketlineError, match=re.escape(words)):
        ask(sock, "it", message if is_whole else asked(store, **message))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": 99}, f"protocol version 99, the service version {PROTOCOL}"),
        ({"proof": "x"}, "the token is not the server's"),
        ({"proof": None}, "the token is not the server's"),
    ],
)
def test_another_version_or_a_wrong_proof_is_refused_by_name(
    changes: dict[str, object], words: str, served: Served, store: Store
) -> None:
    with connected(served.socket) as sock:
        receive(sock, 30.0)
        send(sock, {**asked(store), "protocol": PROTOCOL, "proof": "", **changes})
        answer = receive(sock, 30.0)
    assert words in answer["message"]


def test_a_client_that_writes_nonsense_into_its_memory_harms_nobody_else(served: Served, store: Store) -> None:
    with connected(served.socket) as sock:
        (fd,) = ask(sock, "it", asked(store)).fds
        page = map_shared(fd, 0, CONTROL_BYTES)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)  # the service would die of it
        os.close(fd)
        page[:] = 255
        sock.sendall(b"\0" * 100)
        page[:] = 0
        sock.sendall(b"\0" * 100)
        with Loader(store, LoaderConfig(batch_size=1), service=served.socket) as loader:
            assert next(loader.forever()).step == 0


def test_strangers_keep_no_client_out_and_none_of_another_host(
    store: Store, token: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "REQUEST_S", 600.0)
    monkeypatch.setattr(FrameClient, "max_clients", 4)
    monkeypatch.setattr(FrameClient, "max_strangers", 4)
    with serving_here(tmp_path, store.path, security=Security(token=TOKEN)) as found, ExitStack() as using:
        address = ServiceAddress(found.tcp, token)

        def stranger(host: str = "127.0.0.1") -> socket.socket:
            sock = using.enter_context(socket.create_connection(("127.0.0.1", found.port), source_address=(host, 0)))
            sock.settimeout(60)
            return sock

        early = using.enter_context(Loader(None, LoaderConfig(batch_size=2), service=address))
        assert next(early.forever()).step == 0
        slow = stranger("127.0.0.2")
        nonce = str(receive(slow, 60)["nonce"])
        strangers = [stranger() for _ in range(12)]
        for sock in strangers:
            with suppress(BucketlineError):  # it was the oldest already
                receive(sock, 60)
        for _ in range(2):
            with Loader(None, LoaderConfig(batch_size=2), service=address) as late:
                assert next(late.forever()).step == 0
        assert not any(sock.recv(1) for sock in strangers[:8])  # which were ended
        request = wire.message_of(wire.StoresRequest())
        send(slow, {**request, "proof": wire.proof_of(TOKEN, nonce), "protocol": PROTOCOL})
        assert "answer" in receive(slow, 60)
        assert len([*early]) > 1
        monkeypatch.setattr(FrameClient, "max_clients", 0)
        with pytest.raises(DeliveryError, match="the service has 0 clients, its maximum"):
            Loader(None, LoaderConfig(batch_size=2), service=replace(address, deadline_s=0.5))


def test_a_client_for_whom_there_is_no_thread_is_refused_and_the_service_continues(
    served: Served, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, none_is_left = threading.Thread.start, threading.Event()

    def refuse(thread: threading.Thread) -> None:
        if none_is_left.is_set() and thread.name == "bucketline-client":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for where in (ServiceAddress(served.socket), ServiceAddress(served.tcp, token, deadline_s=0.5)):
        none_is_left.set()
        with pytest.raises(DeliveryError, match="the service has no thread for another client: can't start new thread"):
            Loader(None, LoaderConfig(batch_size=2), service=where)
        none_is_left.clear()
        with Loader(None, LoaderConfig(batch_size=2), service=where) as loader:
            assert next(iter(loader)).step == 0


def test_a_failure_is_read_as_it_was_told_and_only_the_first_counts() -> None:
    control = ControlPage(np.zeros(CONTROL_BYTES, dtype=np.uint8))
    control.announce(3)
    control.end(StoreError("sample 'ä'" + "x" * (1 << 20)))
    control.end(None)
    assert control.words[Word.HAS_ENDED]
    assert control.announced(0) == 3
    found = control.failure()
    assert type(found) is StoreError
    assert str(found).startswith("sample 'ä'xxx")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MissingObjectError("x"), StoreError),
        (LostError("x"), DeliveryError),
        (FullError("x"), FullError),
        (KeyError("x"), DeliveryError),
    ],
)
def test_a_failure_keeps_the_nearest_class_that_a_client_knows(error: Exception, kind: type[Exception]) -> None:
    assert type(wire.failure_of(wire.failure_as_json(error))) is kind


def test_a_message_too_long_is_not_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(DeliveryError, match="bytes, expected at most 1048576"):
        send(ours, {"x": "y" * MAX_MESSAGE_BYTES})


# A driver that registers no shared memory, as in some containers, costs a copy and a warning, not the training.


REFUSED = 801  # cudaErrorNotSupported


class HostCopier:
    """Copies as `CudaCopier` does, in host memory; lets go of a buffer two copies later."""

    def __init__(self) -> None:
        self._in_flight: list[Callable[[], None]] = []

    def copy(self, buffer: torch.Tensor, num_bytes: int, let_go: Callable[[], None]) -> tuple[torch.Tensor, None]:
        self._in_flight.append(let_go)
        if len(self._in_flight) > 2:
            self._in_flight.pop(0)()
        return buffer[:num_bytes].clone(), None

    def receive(self, flat: torch.Tensor, _event: None) -> torch.Tensor:
        return flat

    def finish(self) -> None:
        for let_go in self._in_flight:
            let_go()


class Runtime:
    """Stands in for libcudart: a failed call leaves an error, which the next launch that torch checks raises."""

    def __init__(self, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code, self.pending = code, 0
        self.registered, self.unregistered, self.num_bounced = list[int](), list[int](), 0
        cudart = SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self.unregistered.append)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        monkeypatch.setattr(ctypes, "CDLL", lambda _: self)

        def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
            assert not self.pending
            self.num_bounced += 1
            return tensor.clone()

        monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)

    def _register(self, address: int, *_: int) -> int:
        self.registered.append(address)
        self.pending = self.code
        return self.code

    def cudaGetLastError(self) -> int:  # noqa: N802 - as it is called there
        found, self.pending = self.pending, 0
        return found


@pytest.mark.parametrize("code", [0, REFUSED])
def test_batches_are_the_same_and_one_warning_says_why_they_are_copied_twice(
    store: Store, socket_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    def stream(answer: Answer, _: object) -> ring.RingStream:
        copier: Any = HostCopier()
        return ring.RingStream(answer, copier)

    runtime = Runtime(code, monkeypatch)
    monkeypatch.setattr(client, "RingStream", stream)
    config = LoaderConfig(batch_size=4, epochs=2)
    with Loader(store, config) as own, Loader(store, config, service=socket_path) as loader, caplog.at_level(logging.WARNING):
        expected = [values(batch) for batch in own.forever()]
        assert [values(batch) for batch in loader.forever()] == expected
    num_warned = sum("refuses to register" in record.message for record in caplog.records)
    if code:
        assert (len(runtime.registered), runtime.num_bounced, num_warned) == (1, len(expected), 1)
    else:
        assert sorted(runtime.registered) == sorted(runtime.unregistered) != []
        assert (runtime.num_bounced, num_warned) == (0, 0)


def test_a_refusal_leaves_no_error_in_the_runtime(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime(REFUSED, monkeypatch)
    assert not ring.register(np.zeros(8, np.uint8))
    assert not runtime.pending
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())  # a runtime that is linked statically
    assert not ring.register(np.zeros(8, np.uint8))
    assert "the next CUDA call may report error 801 once more" in caplog.text
