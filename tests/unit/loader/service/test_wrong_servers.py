"""Answers of servers that are broken, lie, or are something else: an error with a name, soon, and few requests."""

from __future__ import annotations

import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bucketline.errors import BucketlineError, CorruptError, DeliveryError
from bucketline.loader import Loader, LoaderConfig, ServiceAddress
from bucketline.loader.service.client import served_names
from bucketline.loader.service.control_page import ControlPage
from bucketline.loader.service.layouts import HEAD, FrameKind
from bucketline.loader.service.links import link_to
from bucketline.loader.service.shared_memory import SharedMemory
from bucketline.loader.service.wire import ALIVE, PROTOCOL, receive, send
from bucketline.store import Store
from bucketline.store.format.manifest import dump_manifest
from tests.serving import serving_here

CONFIG = LoaderConfig(batch_size=2)
END = HEAD.pack(FrameKind.END, 0, 0, 0, 0, 0)
HELLO = {"bucketline": PROTOCOL, "nonce": "n"}


GRANTED: dict[str, Any] = {"buffer_bytes": 1 << 20, "depth": 2}


def reader(store: Store | None, server: Server, config: LoaderConfig = CONFIG, deadline_s: float = 0.3) -> Loader:
    return Loader(store, config, service=ServiceAddress(f"tcp://127.0.0.1:{server.port}", deadline_s=deadline_s))


class Server:
    """Answers each client with the same message, and then with the same bytes."""

    def __init__(self, answer: dict[str, Any], frames: bytes, hello: dict[str, Any] = HELLO) -> None:
        self._answer, self._frames, self._hello, self.num_asked = answer, frames, hello, 0
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._sock.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                return
            with sock, suppress(OSError, BucketlineError):
                self.num_asked += 1
                send(sock, self._hello)
                receive(sock, 10)
                send(sock, self._answer)
                sock.sendall(self._frames)

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join()


@contextmanager
def server(answer: dict[str, Any], frames: bytes = b"", hello: dict[str, Any] = HELLO) -> Iterator[Server]:
    found = Server(answer, frames, hello)
    try:
        yield found
    finally:
        found.close()


def failure(kind: str) -> bytes:
    message = json.dumps({"error": kind, "message": "the disk is on fire"}).encode()
    return HEAD.pack(FrameKind.END, 0, 0, 0, len(message), 0) + message


def layout_of(*values: object, num_bytes: int = 0) -> bytes:
    text = json.dumps(values).encode()
    return HEAD.pack(FrameKind.BATCH, 0, 0, 0, len(text), num_bytes) + text + bytes(num_bytes)


@pytest.mark.parametrize("epochs", [None, 2])
def test_an_end_before_the_last_step_is_an_error(store: Store, epochs: int | None) -> None:
    config = LoaderConfig(batch_size=2, epochs=epochs)
    with (
        server(GRANTED, END) as found,
        reader(store, found, config, 1) as far,
        pytest.raises(DeliveryError, match="before step 0"),
    ):
        next(far.forever())


@pytest.mark.parametrize("frames", [failure("DeliveryError"), b""], ids=["fails", "ends"])
def test_a_server_that_fails_at_once_is_asked_a_few_times_until_the_deadline(store: Store, frames: bytes) -> None:
    with server(GRANTED, frames) as found, reader(store, found, deadline_s=0.7) as far:
        with pytest.raises(DeliveryError, match=r"the disk is on fire|ended without a message|no server of batches"):
            next(far.forever())
        assert 2 <= found.num_asked < 12


WRONG: dict[str, dict[str, Any]] = {
    "no bytes": {"buffer_bytes": 0},
    "less than none": {"buffer_bytes": -1},
    "bytes beyond reason": {"buffer_bytes": 1 << 62},
    "no depth": {"depth": 0},
    "a missing field": {"depth": None},
    "a field too many": {"surprise": 1},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_an_error_that_names_the_server(store: Store, name: str) -> None:
    with (
        server({**GRANTED, **WRONG[name]}) as found,
        reader(store, found) as far,
        pytest.raises(DeliveryError, match=rf"127.0.0.1:{found.port}"),
    ):
        next(far.forever())


def test_an_answer_longer_than_batches_need_is_refused_by_its_announcement(store: Store) -> None:
    """One that came a piece at a time would last for minutes, beyond the deadline, and so would closing the loader."""
    with (
        server(ALIVE, struct.pack(">I", 12 << 20) + b'{"x": [') as found,
        reader(store, found) as far,
        pytest.raises(DeliveryError, match="a message of 12582912 bytes was announced, expected at most 1048576"),
    ):
        next(far.forever())


def told(place: object = "s", repeats: object = 1, manifest: object = "{}{}") -> dict[str, Any]:
    return {"stores": [{"place": place, "repeats": repeats, "manifest": manifest}]}


STORES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "no store": {"stores": []},
    "a place that is none": told(place=1),
    "repeats that are none": told(repeats="x"),
    "repeats of 0": told(repeats=0),
    "no bytes": told(manifest=""),
    "no manifest": told(manifest=None),
    "half a manifest": told(manifest='{"format_version":'),
    "a manifest that is none": told(),
    "a manifest that is not text": told(manifest="\ud800"),
    "a manifest that is deep": told(manifest="[" * 100_000),
}


@pytest.mark.parametrize("name", STORES)
def test_wrong_stores_are_an_error(name: str) -> None:
    with server(STORES[name]) as found, pytest.raises(BucketlineError):
        reader(None, found)


@pytest.mark.parametrize("said", [b"\xff\xff\xff\xff", b"\0\0\0\x64{}", b"\0\0\x40\0" + b"[" * 0x4000, b"\0\0\0\x02[]", b""])
def test_an_answer_that_is_not_a_message_is_an_error_of_delivery(said: bytes) -> None:
    with answering(partial(greet_and_say, said)) as port:
        address = ServiceAddress(f"tcp://{port}", deadline_s=0.15)
        with pytest.raises(DeliveryError, match=rf"127.0.0.1:{port}: "):
            Loader(None, CONFIG, service=address)


def test_a_manifest_that_was_changed_on_the_way_is_an_error(store: Store) -> None:
    data = dump_manifest(store.manifest).decode()
    changed = data.replace('"generation":2', '"generation":3')
    assert changed != data
    with server(told(manifest=changed)) as found, pytest.raises(CorruptError, match=r"the manifest of s from 127\.0\.0\.1:"):
        reader(None, found)
    with server(told(manifest=data)) as found, reader(None, found) as far:
        assert far.shares[0].store.manifest == store.manifest
        with pytest.raises(DeliveryError, match="it has other stores than were requested"):
            far.shares[0].store.reopened(1)


@pytest.mark.parametrize("names", [None, [1], ["a", "b"], {}, []])
def test_wrong_names_are_an_error(names: object) -> None:
    with server({"names": names}) as found, pytest.raises(DeliveryError, match=r"the answer of .* is invalid"):
        served_names(link_to(ServiceAddress(f"tcp://{found.port}")), [], [bytes(16)])


BATCHES = {
    "no JSON": HEAD.pack(FrameKind.BATCH, 0, 0, 0, 2, 0) + b"\xff{",
    "nothing": layout_of(),
    "a bucket that is a number": layout_of(1, 0, []),
    "fields that are numbers": layout_of("b", 0, [1]),
    "no fields": layout_of("b", 0, []),
    "a field of text": layout_of("b", 8, [["latents", "uint8", "xy", 0, 8]], num_bytes=8),
    "a shape of text": layout_of("b", 8, [["latents", "uint8", ["x"], 0, 8]], num_bytes=8),
    "a shape that is larger": layout_of("b", 8, [["latents", "uint8", [9], 0, 8]], num_bytes=8),
    "a negative shape": layout_of("b", 8, [["latents", "uint8", [-8], 0, 8]], num_bytes=8),
    "a negative begin": layout_of("b", 8, [["latents", "uint8", [8], -8, 8]], num_bytes=8),
    "a begin of text": layout_of("b", 8, [["latents", "uint8", [8], "0", 8]], num_bytes=8),
    "a fraction": layout_of("b", 8, [["latents", "uint8", [8], 0.5, 4]], num_bytes=8),
    "an unknown dtype": layout_of("b", 8, [["latents", "nn", [8], 0, 8]], num_bytes=8),
    "an odd begin": layout_of("b", 8, [["latents", "float32", [1], 1, 4]], num_bytes=8),
    "a field twice": layout_of("b", 8, [["latents", "uint8", [8], 0, 8]] * 2, num_bytes=8),
    "fields that a batch lacks": layout_of("b", 8, [["x", "uint8", [8], 0, 8]], num_bytes=8),
    "deep": HEAD.pack(FrameKind.BATCH, 0, 0, 0, 100_000, 0) + b"[" * 100_000,
    "another step": HEAD.pack(FrameKind.BATCH, 7, 0, 0, len(json.dumps(["b", 0, []])), 0) + json.dumps(["b", 0, []]).encode(),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_wrong_batch_is_an_error_of_delivery(store: Store, name: str) -> None:
    with (
        server(GRANTED, BATCHES[name]) as found,
        reader(store, found, deadline_s=0.15) as far,
        pytest.raises(DeliveryError),
    ):
        next(far.forever())


@pytest.mark.parametrize("has_token", [False, True])
@pytest.mark.parametrize("hello", [{}, {"nonce": 1}, {"nonce": "\ud800"}, {"nonce": ["n"] * 1000}])
def test_a_wrong_greeting_is_an_error_of_delivery(hello: dict[str, Any], tmp_path: Path, *, has_token: bool) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_bytes(b"a token of the tests")
    with server({}, b"", hello) as found:
        address = ServiceAddress(f"tcp://{found.port}", token=token if has_token else None, deadline_s=0.3)
        with pytest.raises(DeliveryError, match=rf"127.0.0.1:{found.port}"):
            Loader(None, CONFIG, service=address)


@contextmanager
def answering(*answers: Callable[[socket.socket], None]) -> Iterator[int]:
    """Listen at a port: the first client is answered by the first function, and so on; the last one answers all that follow."""
    with socket.create_server(("127.0.0.1", 0)) as sock:

        def run() -> None:
            for number in itertools.count():
                try:
                    client, _ = sock.accept()
                except OSError:
                    return
                with client, suppress(OSError, BucketlineError):
                    answers[min(number, len(answers) - 1)](client)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield sock.getsockname()[1]
        sock.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def greet_and_say(said: bytes, sock: socket.socket) -> None:
    send(sock, HELLO)
    receive(sock, 10)
    sock.sendall(said)


def begin_and_end(sock: socket.socket) -> None:
    """Grant batches, and send none."""
    send(sock, HELLO)
    receive(sock, 10)
    send(sock, GRANTED)


def test_a_server_that_never_answers_holds_up_no_loader_that_is_closed(store: Store) -> None:
    has_asked = threading.Event()

    def stay_alive(sock: socket.socket) -> None:
        send(sock, HELLO)
        receive(sock, 10)
        has_asked.set()
        while True:
            send(sock, ALIVE)
            time.sleep(0.05)

    with answering(begin_and_end, stay_alive) as port:
        loader = Loader(store, CONFIG, service=f"tcp://{port}")
        loader.start()
        assert has_asked.wait(10)
        closing = threading.Thread(target=loader.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()


def test_a_server_that_is_lost_before_its_first_batch_and_after_the_deadline_is_followed_by_the_next(
    store: Store, tmp_path: Path
) -> None:
    def live_for_a_while(sock: socket.socket) -> None:
        begin_and_end(sock)
        for _ in range(10):
            time.sleep(0.1)
            sock.sendall(HEAD.pack(FrameKind.ALIVE, 0, 0, 0, 0, 0))

    with answering(live_for_a_while) as port, serving_here(tmp_path, store.path) as found:
        address = ServiceAddress(f"tcp://127.0.0.1:{port},127.0.0.1:{found.port}", deadline_s=0.5)
        with Loader(store, CONFIG, service=address) as far:
            assert next(far.forever()).step == 0


LAYOUT = json.dumps(["b", 0, []]).encode()
FAR = json.dumps(["b", 1 << 20, [["latents", "uint8", [1 << 20], 0, 1 << 20]]]).encode()
OUTSIDE = json.dumps(["b", 8, [["latents", "uint8", [99], 0, 99]]]).encode()
HEADS = {
    "no JSON": (0, 2, b"x]"),
    "no layout": (0, 2, b"[]"),
    "a layout beyond the head": (0, 1 << 31, LAYOUT),
    "bytes beyond the buffer": (0, len(FAR), FAR),
    "a tensor beyond the bytes": (0, len(OUTSIDE), OUTSIDE),
    "another step": (7, len(LAYOUT), LAYOUT),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_wrong_batch_in_shared_memory_is_an_error_of_delivery(store: Store, tmp_path: Path, name: str) -> None:
    step, length, layout = HEADS[name]
    head = HEAD.pack(FrameKind.BATCH, step, 0, 0, length, 0) + layout
    memory = SharedMemory(4096)
    memory.add(0)[: len(head)] = np.frombuffer(head, dtype=np.uint8)
    ControlPage(memory.control).announce(0)
    is_done = threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(tmp_path / "sock"))
        sock.listen()

        def grant() -> None:
            client, _ = sock.accept()
            with client:
                send(client, HELLO)
                receive(client, 10)
                send(client, {"buffer_bytes": 4096, "depth": 2}, memory.fd)
                is_done.wait(10)

        thread = threading.Thread(target=grant)
        thread.start()
        with Loader(store, CONFIG, service=tmp_path / "sock") as loader:
            with pytest.raises(
                DeliveryError, match=r"sent a damaged batch|sent a batch of 1048576 bytes in 4096|step 7, .* came"
            ):
                next(loader.forever())
            assert loader.state_dict()["step"] == 0
        is_done.set()
        thread.join()


def test_a_service_that_ends_after_its_greeting_is_an_error_of_delivery(store: Store, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(tmp_path / "sock"))
        sock.listen()

        def greet_and_end() -> None:
            client, _ = sock.accept()
            client.shutdown(socket.SHUT_RD)  # what is sent from now on is an error at once, as after a kill
            send(client, HELLO)
            client.close()

        for stores in (store, None):
            thread = threading.Thread(target=greet_and_end)
            thread.start()
            with pytest.raises(DeliveryError, match=r"the service at .* has ended before it was asked"):
                Loader(stores, CONFIG, service=tmp_path / "sock").start()
            thread.join()
