"""Answers of servers that are broken, lie, or are something else: an error with a name, soon, and few requests."""

from __future__ import annotations

import itertools
import json
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bucketline.errors import BucketlineError, CorruptError, DeliveryError
from bucketline.loader import Loader, LoaderConfig, ServiceAddress
from bucketline.loader.service.client import link_to, served_names
from bucketline.loader.service.ring import ControlPage, SharedMemory
from bucketline.loader.service.wire import BATCH, END, HEAD, PROTOCOL, receive, send
from bucketline.store import Store
from bucketline.store.format.manifest import dump_manifest

CONFIG = LoaderConfig(batch_size=2)
HELLO = {"bucketline": PROTOCOL, "nonce": "n"}
RESPONSE: dict[str, Any] = {"buffer_bytes": 1 << 20, "depth": 2}
Behaviour = Callable[[socket.socket], None]


class Server:
    """Listens at a port or a path: the first behaviour answers the first client, and so on; the last answers the rest."""

    def __init__(self, *behaviours: Behaviour, path: Path | None = None) -> None:
        self._behaviours, self.num_asked = behaviours, 0
        if path is None:
            self._sock = socket.create_server(("127.0.0.1", 0))
            self.port: int = self._sock.getsockname()[1]
        else:
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._sock.bind(str(path))
            self._sock.listen()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join()

    def _run(self) -> None:
        for number in itertools.count():
            try:
                sock, _ = self._sock.accept()
            except OSError:
                return
            self.num_asked += 1
            with sock, suppress(OSError, BucketlineError):
                self._behaviours[min(number, len(self._behaviours) - 1)](sock)

    def address(self, deadline_s: float = 0.15, token: Path | None = None) -> ServiceAddress:
        return ServiceAddress(f"tcp://127.0.0.1:{self.port}", token, deadline_s=deadline_s)


def saying(said: bytes, hello: dict[str, Any] = HELLO) -> Behaviour:
    """Greet, and say the same bytes to each request."""

    def behave(sock: socket.socket) -> None:
        send(sock, hello)
        receive(sock, 10)
        sock.sendall(said)

    return behave


def message(value: object) -> bytes:
    body = json.dumps(value).encode()
    return struct.pack(">I", len(body)) + body


def answer(value: object, frames: bytes = b"") -> Behaviour:
    return saying(message({"answer": value}) + frames)


def ended(**failure: str) -> bytes:
    text = json.dumps(failure).encode() if failure else b""
    return HEAD.pack(END, 0, 0, 0, len(text), 0) + text


def layout_of(*values: object, num_bytes: int = 0, step: int = 0) -> bytes:
    text = json.dumps(values).encode()
    return HEAD.pack(BATCH, step, 0, 0, len(text), num_bytes) + text + bytes(num_bytes)


def batch_of(*fields: object) -> bytes:
    return layout_of("b", 8, list(fields), num_bytes=8)


FRAMES = {
    "an end before the last step": (ended(), "before step 0"),
    "a failure": (ended(error="DeliveryError", message="on fire"), r"on fire"),
    "a failure that is no object": (HEAD.pack(END, 0, 0, 0, 1, 0) + b"1", "the server failed without a message"),
    "nothing": (b"", "ended without a message"),
    "a frame of another kind": (HEAD.pack(7, 0, 0, 0, 0, 0), "a frame of kind 7"),
    "a layout beyond reason": (HEAD.pack(BATCH, 0, 0, 0, 1 << 30, 0), "a frame of kind 1 with 1073741824"),
    "bytes beyond the buffer": (HEAD.pack(BATCH, 0, 0, 0, 0, 1 << 40), "a frame of kind 1 with 0 and 1099511627776"),
    "no JSON": (HEAD.pack(BATCH, 0, 0, 0, 2, 0) + b"\xff{", "layout is damaged"),
    "deep JSON": (HEAD.pack(BATCH, 0, 0, 0, 100_000, 0) + b"[" * 100_000, "layout is damaged"),
    "an empty layout": (layout_of(), "layout is damaged"),
    "fields that are numbers": (layout_of("b", 0, [1]), "layout is damaged"),
    "other bytes than its layout": (layout_of("b", 16, [], num_bytes=8), "layout is damaged|has 8 bytes"),
    "a shape of text": (batch_of(["latents", "uint8", ["x"], 0, 8]), "layout is damaged"),
    "a shape that is larger": (batch_of(["latents", "uint8", [9], 0, 8]), "layout is damaged"),
    "a negative shape": (batch_of(["latents", "uint8", [-8], 0, 8]), "layout is damaged"),
    "a negative begin": (batch_of(["latents", "uint8", [8], -8, 8]), "layout is damaged"),
    "a begin of text": (batch_of(["latents", "uint8", [8], "0", 8]), "layout is damaged"),
    "a fraction": (batch_of(["latents", "uint8", [8], 0.5, 4]), "layout is damaged"),
    "a tensor beyond the bytes": (batch_of(["latents", "uint8", [99], 0, 99]), "beyond its 8 bytes"),
    "an unknown dtype": (batch_of(["latents", "nn", [8], 0, 8]), "nn is not a dtype"),
    "an odd begin": (batch_of(["latents", "float32", [1], 1, 4]), "layout is damaged"),
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_wrong_batch_over_tcp_is_an_error_of_delivery(store: Store, name: str) -> None:
    frames, words = FRAMES[name]
    with Server(answer(RESPONSE, frames)) as found, Loader(store, CONFIG, service=found.address()) as far:
        with pytest.raises(DeliveryError, match=words):
            next(far.forever())
        assert 1 <= found.num_asked < 12


@pytest.mark.parametrize(
    ("step", "names", "words"),
    [
        (7, {}, "step 7, micro-batch 0 came, expected step 0"),
        (0, {"token_mask": "mask"}, r"at 127.0.0.1:.*layout is damaged: .*unexpected keyword argument 'mask'"),
        (0, {"latents": "other.latents"}, "layout is damaged: 'other'"),
    ],
)
def test_another_step_or_other_columns_than_requested_are_an_error_of_delivery(
    store: Store, step: int, names: dict[str, str], words: str
) -> None:
    with Loader(store, CONFIG) as own:
        filled = own.start().next()
    assert filled is not None
    fields = [
        [names.get(f.name, f.name), str(f.dtype).removeprefix("torch."), f.shape, f.begin, f.num_bytes]
        for f in filled[0].fields
    ]
    frames = layout_of(filled[0].bucket, filled[0].num_bytes, fields, num_bytes=filled[0].num_bytes, step=step)
    with (
        Server(answer(RESPONSE, frames)) as found,
        Loader(store, CONFIG, service=found.address()) as far,
        pytest.raises(DeliveryError, match=words),
    ):
        next(far.forever())


WRONG: dict[str, object] = {
    "no bytes": {**RESPONSE, "buffer_bytes": 0},
    "less than none": {**RESPONSE, "buffer_bytes": -1},
    "bytes beyond reason": {**RESPONSE, "buffer_bytes": 1 << 62},
    "no depth": {**RESPONSE, "depth": 0},
    "a depth that is none": {**RESPONSE, "depth": None},
    "a field too many": {**RESPONSE, "surprise": 1},
    "a list": [],
    "nothing": None,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_response_is_an_error_that_names_the_server(store: Store, name: str) -> None:
    with (
        Server(answer(WRONG[name])) as found,
        Loader(store, CONFIG, service=found.address()) as far,
        pytest.raises(DeliveryError, match=rf"the answer of 127.0.0.1:{found.port} is invalid"),
    ):
        next(far.forever())


def test_an_answer_longer_than_batches_need_is_refused_by_its_announcement(store: Store) -> None:
    """One that came a piece at a time would last for minutes, beyond the deadline, and so would closing the loader."""
    with (
        Server(saying(struct.pack(">I", 12 << 20) + b'{"x": [')) as found,
        Loader(store, CONFIG, service=found.address()) as far,
        pytest.raises(DeliveryError, match="a message of 12582912 bytes was announced, expected at most 1048576"),
    ):
        next(far.forever())


STORES: dict[str, object] = {
    "nothing": None,
    "no store": [],
    "a store that is none": ["s"],
    "a place that is none": [[1, 1, "{}{}"]],
    "repeats that are none": [["s", "x", "{}{}"]],
    "repeats of 0": [["s", 0, "{}{}"]],
    "no bytes": [["s", 1, ""]],
    "no manifest": [["s", 1, None]],
    "half a manifest": [["s", 1, '{"format_version":']],
    "a manifest that is none": [["s", 1, "{}{}"]],
    "a manifest that is not text": [["s", 1, "\ud800"]],
    "a manifest that is deep": [["s", 1, "[" * 100_000]],
}


@pytest.mark.parametrize("name", STORES)
def test_wrong_stores_are_an_error(name: str) -> None:
    with Server(answer(STORES[name])) as found, pytest.raises(BucketlineError):
        Loader(None, CONFIG, service=found.address())


@pytest.mark.parametrize("said", [b"\xff\xff\xff\xff", b"\0\0\0\x64{}", b"\0\0\x40\0" + b"[" * 0x4000, b"\0\0\0\x02[]", b""])
def test_an_answer_that_is_not_a_message_is_an_error_of_delivery(said: bytes) -> None:
    with Server(saying(said)) as found, pytest.raises(DeliveryError, match=rf"127.0.0.1:{found.port} within 0.15 s"):
        Loader(None, CONFIG, service=found.address())


@pytest.mark.parametrize("has_token", [False, True])
@pytest.mark.parametrize("hello", [{}, {"nonce": 1}, {"nonce": "\ud800"}, {"nonce": ["n"] * 1000}])
def test_a_wrong_greeting_is_an_error_of_delivery(hello: dict[str, Any], tmp_path: Path, *, has_token: bool) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_bytes(b"a token of the tests")
    with Server(saying(b"", hello)) as found, pytest.raises(DeliveryError, match=rf"127.0.0.1:{found.port}"):
        Loader(None, CONFIG, service=found.address(token=token if has_token else None))


def test_a_manifest_that_was_changed_on_the_way_and_another_store_are_errors(store: Store) -> None:
    data = dump_manifest(store.manifest).decode()
    changed = data.replace('"generation":2', '"generation":3')
    assert changed != data
    words = r"the manifest of s from 127\.0\.0\.1:"
    with Server(answer([["s", 1, changed]])) as found, pytest.raises(CorruptError, match=words):
        Loader(None, CONFIG, service=found.address())
    with Server(answer([["s", 1, data]])) as found, Loader(None, CONFIG, service=found.address()) as far:
        assert far.stores[0].store.manifest == store.manifest
        with pytest.raises(DeliveryError, match="it has other stores than were requested"):
            far.stores[0].store.reopened(1)


@pytest.mark.parametrize("names", [None, [1], ["a", "b"], {}, []])
def test_wrong_names_are_an_error(names: object) -> None:
    with Server(answer(names)) as found, pytest.raises(DeliveryError, match=r"the answer of .* is invalid"):
        served_names(link_to(found.address()), [], [bytes(16)])


def test_a_server_that_never_answers_holds_up_no_loader_that_is_closed(store: Store) -> None:
    has_asked, is_over = threading.Event(), threading.Event()

    def stay_silent(sock: socket.socket) -> None:
        send(sock, HELLO)
        receive(sock, 10)
        has_asked.set()
        is_over.wait(60)

    with Server(answer(RESPONSE), stay_silent) as found:
        loader = Loader(store, CONFIG, service=found.address(60.0))
        loader.start()
        assert has_asked.wait(10)
        closing = threading.Thread(target=loader.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
        is_over.set()


def test_a_server_that_sends_nothing_any_more_is_lost_after_twice_the_deadline(store: Store) -> None:
    is_over = threading.Event()

    def send_nothing(sock: socket.socket) -> None:
        answer(RESPONSE)(sock)
        is_over.wait(60)

    with Server(send_nothing) as found, Loader(store, CONFIG, service=found.address()) as far:
        with pytest.raises(DeliveryError, match="the server sent nothing for too long"):
            next(far.forever())
        is_over.set()


LAYOUT = json.dumps(["b", 0, []]).encode()
FAR = json.dumps(["b", 1 << 20, [["latents", "uint8", [1 << 20], 0, 1 << 20]]]).encode()
HEADS = {
    "no JSON": (0, 2, b"x]", "sent a damaged batch"),
    "no layout": (0, 2, b"[]", "sent a damaged batch"),
    "a layout beyond the head": (0, 1 << 31, LAYOUT, "sent a damaged batch"),
    "bytes beyond the buffer": (0, len(FAR), FAR, "sent a batch of 1048576 bytes in 4096"),
    "another step": (7, len(LAYOUT), LAYOUT, "step 7, .* came"),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_wrong_batch_in_shared_memory_is_an_error_of_delivery(store: Store, tmp_path: Path, name: str) -> None:
    step, length, layout, words = HEADS[name]
    head = HEAD.pack(BATCH, step, 0, 0, length, 0) + layout
    memory, is_done = SharedMemory(4096), threading.Event()
    memory.add(0)[: len(head)] = np.frombuffer(head, dtype=np.uint8)
    ControlPage(memory.control).announce(0)

    def respond(sock: socket.socket) -> None:
        send(sock, HELLO)
        receive(sock, 10)
        send(sock, {"answer": {"buffer_bytes": 4096, "depth": 2}}, memory.fd)
        is_done.wait(10)

    with Server(respond, path=tmp_path / "sock"), Loader(store, CONFIG, service=tmp_path / "sock") as loader:
        with pytest.raises(DeliveryError, match=words):
            next(loader.forever())
        assert loader.state_dict()["step"] == 0
        is_done.set()


def test_a_service_that_ends_after_its_greeting_or_sends_no_memory_is_an_error(store: Store, tmp_path: Path) -> None:
    def greet_and_end(sock: socket.socket) -> None:
        sock.shutdown(socket.SHUT_RD)  # what is sent from now on is an error at once, as after a kill
        send(sock, HELLO)

    with Server(greet_and_end, greet_and_end, answer(RESPONSE), path=tmp_path / "sock"):
        for stores, words in ((store, "has ended before it was asked"), (None, "has ended before"), (store, ".*0 descriptors")):
            with pytest.raises(DeliveryError, match=rf"the service at .* {words}"):
                Loader(stores, CONFIG, service=tmp_path / "sock").start()
