"""Whatever arrives at the socket, the service continues; and it listens only where it should."""

from __future__ import annotations

import fcntl
import os
import random
import re
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from bucketline.errors import BucketlineError, DeliveryError, StoreError, UsageError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.plan.make_plan import plan_of
from bucketline.loader.service import sockets as listening_module
from bucketline.loader.service.control_page import CONTROL_BYTES, ControlPage, Word
from bucketline.loader.service.server import Service
from bucketline.loader.service.shared_memory import map_shared
from bucketline.loader.service.sockets import connected, listen
from bucketline.loader.service.wire import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    LostError,
    ask,
    failure_as_json,
    failure_of,
    receive,
    send,
)
from bucketline.store import Store
from bucketline.store.folder import MissingObjectError
from bucketline.typed_json import encode
from tests.commands import call
from tests.leftovers import wait_until

STORE = {"store_id": "x", "generation": 1, "digest": "d", "path": "p", "repeats": 1}
CONFIG: Any = encode(LoaderConfig(batch_size=1, prefetch_bytes=1))


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def asked(store: Store, **changes: object) -> dict[str, Any]:
    """Return a request as a client makes it, with some values changed."""
    manifest = store.manifest
    ours = {
        "store_id": manifest.store_id,
        "generation": manifest.generation,
        "digest": manifest.digest,
        "path": "here",
        "repeats": 1,
    }
    message = {
        "ask": "batches",
        "stores": [ours],
        "config": CONFIG,
        "rank": 0,
        "world_size": 1,
        "plan": plan_of(store, LoaderConfig(batch_size=1, prefetch_bytes=1), 1).digest,
        "cursor": {"step": 0, "micro_step": 0, "num_steps": None},
        "is_pinned": False,
    }
    return {**message, **changes}


GARBAGE = {
    "nothing": b"",
    "half a length": b"\0\0",
    "a length without a message": struct.pack(">I", 100),
    "a length of gigabytes": struct.pack(">I", 0xFFFFFFFF),
    "a length just too large": struct.pack(">I", MAX_MESSAGE_BYTES + 1) + b"x" * 100,
    "no JSON": frame(b"\x80\x04\x95 pickled"),
    "no text": frame(b"\xff\xfe\xfd"),
    "JSON that is not an object": frame(b"[1, 2]"),
    "JSON nested beyond reason": frame(b"[" * 100_000),
    "an empty object": frame(b"{}"),
    "a number beyond reason": frame(b'{"protocol": ' + b"9" * 5000 + b"}"),
    "a request in HTTP": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_is_answered_with_an_error_or_the_end_and_the_service_goes_on(
    what: str, socket_path: Path, store: Store
) -> None:
    with connected(socket_path) as sock:
        receive(sock, 30.0)
        sock.sendall(GARBAGE[what])
        sock.shutdown(socket.SHUT_WR)
        answer = receive(sock, 30.0)
    assert answer["error"] == "DeliveryError"
    with Loader(store, LoaderConfig(batch_size=1), service=socket_path) as loader:
        assert next(loader.forever()).step == 0


def test_random_bytes_never_end_the_service(socket_path: Path, store: Store) -> None:
    generator = random.Random(5)
    for _ in range(200):
        with connected(socket_path) as sock:
            sock.sendall(generator.randbytes(generator.randrange(200)))
    with Loader(store, LoaderConfig(batch_size=1), service=socket_path) as loader:
        assert next(loader.forever()).step == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ask": "more"}, "requests 'more', expected one of batches, stores, names, stats"),
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
    ],
)
def test_a_request_that_makes_no_sense_is_refused_by_name(
    changes: dict[str, object], words: str, socket_path: Path, store: Store
) -> None:
    with connected(socket_path) as sock, pytest.raises(BucketlineError, match=re.escape(words)):
        ask(sock, "it", asked(store, **changes), silence_s=30.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": 99}, f"protocol version 99, the service version {PROTOCOL}"),
        ({"proof": "x"}, "the token is not the server's"),
        ({"proof": None}, "the token is not the server's"),
    ],
)
def test_another_version_or_a_wrong_proof_is_refused_by_name(
    changes: dict[str, object], words: str, socket_path: Path, store: Store
) -> None:
    with connected(socket_path) as sock:
        receive(sock, 30.0)
        send(sock, {**asked(store), "protocol": PROTOCOL, "proof": "", **changes})
        answer = receive(sock, 30.0)
    assert words in answer["message"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"ask": "stores", "wanted": [{"store_id": "x", "generation": None}]}, "the store x is not among the stores"),
        ({"ask": "stores", "wanted": [{"store_id": "x"}]}, "wanted[0] lacks the field 'generation'"),
        ({"ask": "stores"}, "lacks the field 'wanted'"),
        ({"ask": "names", "stores": [], "digests": []}, "0 stores were requested"),
        ({"ask": "names", "stores": [STORE], "digests": []}, "p is not among the stores"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_by_name(message: dict[str, Any], words: str, socket_path: Path) -> None:
    with connected(socket_path) as sock, pytest.raises(BucketlineError, match=re.escape(words)):
        ask(sock, "it", message, silence_s=30.0)


def test_a_client_that_writes_nonsense_into_its_memory_harms_nobody_else(socket_path: Path, store: Store) -> None:
    with connected(socket_path) as sock:
        (fd,) = ask(sock, "it", asked(store), silence_s=30.0).fds
        page = map_shared(fd, 0, CONTROL_BYTES)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)  # the service would die of it
        os.close(fd)
        page[:] = 255
        sock.sendall(b"\0" * 100)
        page[:] = 0
        sock.sendall(b"\0" * 100)
        with Loader(store, LoaderConfig(batch_size=1), service=socket_path) as loader:
            assert next(loader.forever()).step == 0


def test_another_user_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service([store.path])
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours:
        service.take_in(theirs)
        answer = receive(ours, 30.0)
    service.stop()
    assert f"the service belongs to user {os.getuid() + 1}, you are user {os.getuid()}" in answer["message"]


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    with listen(path) as sock:

        def accept() -> None:
            sock.accept()[0].close()

        accepted = threading.Thread(target=accept)
        accepted.start()
        with pytest.raises(UsageError, match="a service already listens at"), listen(path):
            pass
        accepted.join(timeout=30)
        assert path.exists()
    assert not path.exists()


def test_somebody_elses_lock_on_the_folder_keeps_no_service_from_starting(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # anybody may who can list it
        found: list[str] = []

        def serve() -> None:
            with listen(tmp_path / "s"):
                found.extend(path.name for path in tmp_path.iterdir())

        begun = threading.Thread(target=serve, daemon=True)
        begun.start()
        begun.join(timeout=20)
        assert found == ["s"]  # its own lock is gone again
    finally:
        os.close(folder)


def test_services_that_start_at_the_same_path_at_once_are_one(tmp_path: Path) -> None:
    outcomes: list[str] = []
    is_over = threading.Event()

    def begin() -> None:
        try:
            with listen(tmp_path / "s"):
                outcomes.append("listens")
                is_over.wait(60)
        except UsageError as error:
            outcomes.append("refused" if "already listens" in str(error) else str(error))

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert wait_until(lambda: len(outcomes) == 8)
    is_over.set()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["listens"] + ["refused"] * 7
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("owner", ["folder", "lock"])
def test_a_folder_or_a_lock_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str) -> None:
    (tmp_path / "s.lock").touch()
    trusted = [(os.getuid() + 1, os.getuid() + 1)]
    if owner == "lock":
        trusted.insert(0, (os.getuid(), os.getuid()))
    monkeypatch.setattr(listening_module, "_trusted", lambda: trusted.pop(0))
    with pytest.raises(UsageError, match=rf"belongs to user {os.getuid()}; "), listen(tmp_path / "s"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["s.lock"]


def test_a_lock_that_is_a_link_is_not_followed_and_a_folder_for_everybody_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious", encoding="ascii")
    (tmp_path / "s.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(UsageError, match=r"cannot open .*s.lock, the lock of the socket"), listen(tmp_path / "s"):
        pass
    assert (tmp_path / "precious").read_text(encoding="ascii") == "precious"
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UsageError, match="is writable by everybody"), listen(tmp_path / "open" / "s"):
        pass


def test_a_client_trusts_no_service_of_another_user(socket_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening_module, "_trusted", lambda: (os.getuid() + 1, os.getuid() + 2))
    with (
        Loader(store, LoaderConfig(batch_size=1), service=socket_path) as loader,
        pytest.raises(DeliveryError, match=rf"the service at .* belongs to user {os.getuid()}, you are user"),
    ):
        next(loader.forever())


def test_a_socket_that_another_service_made_meanwhile_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listen(path):
        path.unlink()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            other.bind(str(path))
    assert path.exists()


def test_a_path_that_cannot_be_a_socket_is_a_usage_error(tmp_path: Path, store: Store) -> None:
    (tmp_path / "file").write_text("precious", encoding="ascii")
    for path, words in (
        (tmp_path / "file", "exists and is not a socket"),
        (tmp_path / ("long" * 30), "the system takes 107"),
        (tmp_path / "no" / "s", "the folder of the socket: No such file"),
    ):
        ran = call("loader", "serve", store.path, "--at", path)
        assert (ran.code, ran.out) == (2, "")
        assert words in ran.err
    assert (tmp_path / "file").read_text(encoding="ascii") == "precious"
    assert call("loader", "serve", "--at", tmp_path / "s").code == 2
    assert call("loader", "serve", tmp_path / "no.store", "--at", tmp_path / "s").code == 1
    ran = call("loader", "stats", tmp_path / "nobody")
    assert (ran.code, "no service can be reached" in ran.err) == (1, True)


def test_a_failure_is_read_as_it_was_told_and_only_the_first_counts() -> None:
    import numpy as np

    control = ControlPage(np.zeros(CONTROL_BYTES, dtype=np.uint8))
    control.announce(3)
    control.end(StoreError("sample 'ä'" + "x" * (1 << 20)))
    control.end(None)
    assert control.words[Word.HAS_ENDED]
    assert control.announced(0) == 3
    found = control.failure()
    assert type(found) is StoreError
    assert str(found).startswith("sample 'ä'xxx")


def test_a_failure_keeps_the_nearest_class_that_a_client_knows() -> None:
    for error, kind in ((MissingObjectError("x"), StoreError), (LostError("x"), DeliveryError), (KeyError("x"), DeliveryError)):
        assert type(failure_of(failure_as_json(error))) is kind


def test_a_message_too_long_is_not_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(DeliveryError, match="bytes, expected at most 1048576"):
        send(ours, {"x": "y" * MAX_MESSAGE_BYTES})
