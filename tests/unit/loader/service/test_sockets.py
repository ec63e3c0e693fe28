"""Addresses of services; and a unix socket is created and used only where no other user can interfere."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bucketline.errors import DeliveryError, UsageError
from bucketline.loader import Loader, LoaderConfig, ServiceAddress
from bucketline.loader.service import sockets
from bucketline.loader.service.server import Service
from bucketline.loader.service.sockets import connected, host_port, listen
from bucketline.loader.service.wire import receive
from bucketline.store import Store
from tests.commands import call
from tests.leftovers import wait_until

OTHER = os.getuid() + 1


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("9400", ("127.0.0.1", 9400)),
        (":9400", ("127.0.0.1", 9400)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:9400", ("::1", 9400)),
        ("gpu7.local:65535", ("gpu7.local", 65535)),
    ],
)
def test_an_address_without_a_host_is_of_this_machine(text: str, place: tuple[str, int]) -> None:
    assert host_port(text) == place


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        *(
            (f"tcp://{text}", {}, "is not an address")
            for text in ("", "x", "x:", "x:y", ":-1", "::²", "a..b:1", "::1:1", "a b:1")
        ),
        *((f"tcp://{text}", {}, "is not an address") for text in (":65536", f"a:{'9' * 5000}", "a:1,b:2", "x/y:2")),
        ("tcp://me:secret@x", {}, "^x is not an address"),
        ("tcp://me:secret@x:1", {}, "^x:1 is not an address"),
        *((text, {}, re.escape(f"service is {text!r}, exp")) for text in ("tcp:a:1", "TCP://a:1", "http://a:1", "unix:")),
        ("http://me:secret@x", {}, "service is 'http://x', expected"),
        ("tcp://a:0", {}, "service is tcp://a:0, expected a `loader serve`"),
        ("tcp://1", {"deadline_s": 0}, "deadline_s is 0, expected seconds above 0"),
        ("unix:s", {"token": "t"}, "with a token or a certificate, which only tcp"),
        ("x" * 108, {}, "the system takes 107"),
        (True, {}, "service is True of type bool, expected a `loader serve`"),
        ("auto", {}, "stores is None with service auto"),
        (None, {}, "stores is None without a service"),
    ],
)
def test_what_is_no_address_or_lacks_stores_is_refused_by_name(given: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Loader(None, LoaderConfig(batch_size=1), service=ServiceAddress(given, **options) if given else None)


@pytest.mark.parametrize("given", ["unix:/run/s", "/run/s", Path("/run/s"), "unix:///run/s", Path("unix:/run/s")])
def test_a_socket_is_a_path_or_has_unix_before_it(given: Path | str) -> None:
    assert str(ServiceAddress(given).place).replace("//", "/") == "/run/s"


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    with listen(path), pytest.raises(UsageError, match="a service already listens at"), listen(path):
        pass
    assert not path.exists()
    with listen(path):
        path.unlink()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            other.bind(str(path))
    assert path.exists(), "another process made it meanwhile"


def test_services_that_start_at_the_same_path_at_once_are_one_and_leave_no_lock(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)  # anybody may who can list it: it keeps no service from starting
    outcomes, is_over = list[str](), threading.Event()

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
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    is_over.set()
    for thread in threads:
        thread.join()
    os.close(folder)
    assert sorted(outcomes) == ["listens"] + ["refused"] * 7
    assert list(tmp_path.iterdir()) == []


def of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_trusted", lambda: (OTHER, OTHER))


def with_a_lock_of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trusted = [(OTHER, OTHER), (os.getuid(), os.getuid())]
    monkeypatch.setattr(sockets, "_trusted", trusted.pop)
    (folder / "s.lock").touch()


def with_a_lock_that_is_a_link(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "s.lock").symlink_to(folder / "precious")


def for_everybody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o777)


def with_a_file_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "s").write_text("precious", encoding="ascii")


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (of_another_user, f"the folder of the socket, belongs to user {os.getuid()}"),
        (with_a_lock_of_another_user, f"the lock of the socket, belongs to user {os.getuid()}"),
        (with_a_lock_that_is_a_link, "cannot open .*s.lock, the lock of the socket"),
        (for_everybody, "is writable by everybody"),
        (with_a_file_there, "s exists and is not a socket"),
    ],
)
def test_a_place_that_is_not_safe_is_refused_and_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Path, pytest.MonkeyPatch], None], words: str
) -> None:
    (tmp_path / "precious").write_text("precious", encoding="ascii")
    prepare(tmp_path, monkeypatch)
    before = {path: path.lstat().st_size for path in tmp_path.iterdir()}
    with pytest.raises(UsageError, match=words), listen(tmp_path / "s"):
        pass
    assert {path: path.lstat().st_size for path in tmp_path.iterdir()} == before


def test_a_service_and_a_client_of_another_user_are_refused(
    socket_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sockets, "_trusted", lambda: (OTHER, OTHER))
        with pytest.raises(DeliveryError, match=rf"the service at .* belongs to user {os.getuid()}, you are user"):
            connected(socket_path)
    service = Service([store.path])
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours:
        service.take_in(theirs)
        answer = receive(ours, 30.0)
    service.stop()
    assert f"the service belongs to user {OTHER}, you are user {os.getuid()}" in answer["message"]


def test_serve_says_what_is_wrong_with_its_options(store: Store, tmp_path: Path) -> None:
    token, at = tmp_path / "token", ("--at", tmp_path / "s")
    token.touch(0o600)
    for arguments, words in (
        ((store.path,), "needs --at ADDRESS"),
        (at, "loader serve"),
        ((store.path, *at, "--every", "0"), "--every is 0.0, expected seconds above 0"),
        ((store.path, "--at", tmp_path / ("long" * 30)), "the system takes 107"),
        ((store.path, "--at", tmp_path / "no" / "s"), "the folder of the socket: No such file"),
        ((store.path, "--at", "unix:"), "--at is 'unix:', expected unix:PATH or tcp://HOST:PORT"),
        ((store.path, "--at", "tcp:a:1"), "--at is 'tcp:a:1', expected unix:PATH or tcp://HOST:PORT"),
        ((store.path, "--at", "tcp://a:b"), "a:b is not an address"),
        ((store.path, "--at", "tcp://0", "--at", "tcp://1"), "--at is tcp://0 and tcp://1, expected one"),
        ((store.path, "--at", "tcp://0.0.0.0:0"), "can be reached from other machines; give --token-file FILE"),
        ((store.path, *at, "--token-file", token), f"--token-file is {token} without --at tcp://"),
        ((store.path, *at, "--certificate", token), f"--certificate is {token} without --at tcp://"),
        ((store.path, "--at", "tcp://0", "--token-file", tmp_path / "none"), "cannot read the token file"),
        ((store.path, "--at", "tcp://0", "--token-file", token), "has 0 bytes, expected 16 or more"),
        ((store.path, "--at", "tcp://0", "--certificate", token), "cannot be used"),
        ((store.path, "--at", "tcp://0", "--certificate", token, token, token), "--certificate has 3 files"),
        ((store.path, *at, "--metrics", "nowhere"), "nowhere is not an address"),
    ):
        ran = call("loader", "serve", *arguments)
        assert (ran.code, ran.out) == (2, "")
        assert words in ran.err
    assert call("loader", "serve", tmp_path / "no.store", *at).code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
