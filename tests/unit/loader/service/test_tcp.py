"""Batches over TCP: whatever happens on the way, those of a loader next to the store; and nobody else gets any."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from bucketline.errors import DeliveryError, UsageError
from bucketline.loader import Loader, LoaderConfig, ServiceAddress
from bucketline.loader.service import server, sockets, tcp, wire
from bucketline.loader.service.server import Service
from bucketline.loader.service.sockets import Security, connected, host_port, listen, server_context, shut
from bucketline.loader.service.wire import receive, send, sent
from bucketline.store import Store
from tests.commands import call, kept_port
from tests.contract.test_backends import values
from tests.kit import make_store, samples_of
from tests.leftovers import wait_until
from tests.network_faults import Faults, faulty_proxy
from tests.serving import Served, serving_here

TOKEN = b"a token of the tests"


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_bytes(TOKEN + b"\n")
    return path


@contextmanager
def served(store: Store, context: ssl.SSLContext | None = None) -> Iterator[Served]:
    with tempfile.TemporaryDirectory() as folder:
        with serving_here(Path(folder), store.path, security=Security(token=TOKEN, context=context)) as found:
            yield found
        assert wait_until(lambda: not of_service())


def of_service() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "bucketline-client"]


def far_loader(port: int, config: LoaderConfig, token: Path | None, **options: object) -> Loader:
    return Loader(None, config, service=ServiceAddress(f"tcp://{port}", token=token, **options))  # type: ignore[arg-type]


def test_only_who_has_the_token_is_told_anything(store: Store, token: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.touch(0o600)
    wrong.write_bytes(b"another token of the tests")
    config = LoaderConfig(batch_size=2)
    with served(store) as found:
        for given in (wrong, None):
            with pytest.raises(DeliveryError, match="the token is not the server's; use the same token file on both sides"):
                far_loader(found.port, config, given)
        assert found.service.stats()["refused"] == 2
    token.chmod(0o644)
    with pytest.raises(UsageError, match="has mode 644, so others may read it; chmod 600"):
        far_loader(1, config, token)


def test_stalled_clients_hold_up_the_end_of_a_server_once_and_not_one_by_one(
    tmp_path: Path, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "END_S", 2.0)
    large = make_store(tmp_path / "large.store", samples_of({"train/512x512": 64}))
    with Loader(large, LoaderConfig(batch_size=64)) as loader:
        request = {**wire.message_of(loader._request()), "protocol": wire.PROTOCOL}
    with served(large) as found, ExitStack() as using:
        for _ in range(6):
            sock = using.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            sock.connect(("127.0.0.1", found.port))
            nonce = str(receive(sock, 10)["nonce"])
            send(sock, {**request, "proof": wire.proof_of(TOKEN, nonce)})
            receive(sock, 10)
        seen_at: dict[int, float] = {}

        def is_full() -> bool:
            stats, now = found.service.stats(), time.monotonic()
            return stats["clients"] == 6 and now - seen_at.setdefault(stats["batches"], now) > 0.2

        assert wait_until(is_full)
        begun = time.monotonic()
        found.service.stop()
        assert time.monotonic() - begun < 6 * server.END_S


def test_what_a_client_requests_has_limits(store: Store, token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "MAX_BATCH_BYTES", 1000)
    with served(store) as found, pytest.raises(DeliveryError, match="bytes, the server allows 1000; use smaller batches"):
        next(far_loader(found.port, LoaderConfig(batch_size=1000), token).forever())
    given = LoaderConfig(batch_size=1, store_option=("region=x",), cache="/c", threads=99, prefetch_bytes=1 << 40)
    with socket.socket() as sock:
        config = tcp.FrameClient(sock, "", Security()).permitted(sent(given))
    assert (config.store_option, config.cache, config.threads, config.prefetch_bytes) == ((), None, 4, 1 << 28)


def test_no_server_is_an_error_within_the_deadline_that_says_how_to_start_one(token: Path) -> None:
    begun = time.monotonic()
    words = r"no server .* at 127.0.0.1:\d+ within 1 s; .*refused.* --at tcp://"
    with kept_port() as port, pytest.raises(DeliveryError, match=words):  # at which nobody listens
        far_loader(port, LoaderConfig(batch_size=1), token, deadline_s=1)
    assert time.monotonic() - begun < 30


def test_a_server_that_stops_is_an_error_after_the_deadline_at_the_batch_that_did_not_come(store: Store, token: Path) -> None:
    config = LoaderConfig(batch_size=1, prefetch_bytes=1)
    with Loader(store, config) as local, served(store) as found, far_loader(found.port, config, token, deadline_s=1) as far:
        batches = far.forever()
        ids = [next(batches).ids.tolist() for _ in range(4)]
        found.service.stop()
        with pytest.raises(DeliveryError, match="no server of batches can be reached"):
            ids.extend(batch.ids.tolist() for batch in batches)
        assert ids == [batch.ids.tolist() for batch, _ in zip(local.forever(), ids, strict=False)]
        assert far.state_dict()["step"] == len(ids)


def test_a_client_that_leaves_ends_its_threads_on_the_server(store: Store, token: Path) -> None:
    with served(store) as found:
        for _ in range(3):
            with far_loader(found.port, LoaderConfig(batch_size=1), token) as far:
                next(far.forever())
        assert wait_until(lambda: not of_service())


def certificate_of(folder: Path, host: str) -> tuple[Path, Path]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(host))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    return {host: certificate_of(tmp_path_factory.mktemp("certificate"), host) for host in ("127.0.0.1", "127.0.0.2")}


def test_tls_encrypts_and_a_certificate_that_is_not_trusted_is_refused(
    store: Store, token: Path, certificates: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = certificates["127.0.0.1"]
    config = LoaderConfig(batch_size=2, epochs=1)
    with Loader(store, config) as local, served(store, server_context(certificate, key)) as found:
        with far_loader(found.port, config, token, certificate=certificate) as far:
            assert [values(one) for one in far.forever()] == [values(one) for one in local.forever()]
        with pytest.raises(DeliveryError, match=r"the certificate of 127\.0\.0\.1 is not trusted: self-signed"):
            far_loader(found.port, config, token, certificate=certificates["127.0.0.2"][0])
        monkeypatch.setattr(wire, "GREETING_S", 0.3)
        with pytest.raises(DeliveryError, match=r"connection is lost: .*; if the server has --certificate, name its file"):
            far_loader(found.port, config, token, deadline_s=0.3)
    with (
        served(store) as found,
        pytest.raises(DeliveryError, match=r"TLS fails: WRONG_VERSION_NUMBER; does the server have --certificate\?"),
    ):
        far_loader(found.port, config, token, deadline_s=5, certificate=certificate)


def test_a_connection_that_the_system_does_not_set_up_is_not_blamed_on_tls(
    certificates: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: socket.socket) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(sockets, "end_when_peer_is_lost", refuse)
    asked = {"deadline_s": 0.3, "certificate": certificates["127.0.0.1"][0]}
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        pytest.raises(DeliveryError, match="the last failure: Invalid argument"),
    ):
        far_loader(listening.getsockname()[1], LoaderConfig(batch_size=2), None, **asked)


def test_a_handshake_that_never_ends_holds_up_no_end_of_a_server(
    store: Store, certificates: dict[str, tuple[Path, Path]]
) -> None:
    with (
        served(store, server_context(*certificates["127.0.0.1"])) as found,
        socket.create_connection(("127.0.0.1", found.port)) as sock,
    ):
        sock.sendall(b"\x16\x03\x01")
        assert wait_until(lambda: bool(of_service()))
        begun = time.monotonic()
        found.service.stop()
        assert time.monotonic() - begun < wire.REQUEST_S - 1


def test_a_connection_by_tls_that_is_ended_sends_nothing_in_the_clear(certificates: dict[str, tuple[Path, Path]]) -> None:
    certificate, key = certificates["127.0.0.1"]
    ours, theirs = socket.socketpair()
    with ExitStack() as using:
        found: list[ssl.SSLSocket] = []
        context = server_context(certificate, key)
        thread = threading.Thread(target=lambda: found.append(context.wrap_socket(ours, server_side=True)))
        thread.start()
        client = ssl.create_default_context(cafile=certificate)
        using.enter_context(client.wrap_socket(theirs, server_hostname="127.0.0.1"))
        thread.join()
        sock = using.enter_context(found[0])
        shut(sock)
        assert sock.version() is not None  # it is None, and `send` in the clear, after the socket's own shutdown
        with pytest.raises(OSError, match=r"EOF|roken|rotocol"):
            sock.sendall(b"x")


@pytest.mark.parametrize("faults", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_cuts_and_stalls_lose_and_change_nothing(
    store: Store, token: Path, monkeypatch: pytest.MonkeyPatch, faults: int
) -> None:
    limit = sockets.limit_silence
    monkeypatch.setattr(sockets, "limit_silence", lambda sock, _: limit(sock, 0.2))
    monkeypatch.setattr(wire, "GREETING_S", 0.2)
    monkeypatch.setattr(wire, "ANSWER_S", 0.5)
    config = LoaderConfig(batch_size=2)
    with ExitStack() as using:
        shared = Faults(faults, most_bytes=60_000, seed=faults)
        proxy = using.enter_context(faulty_proxy(using.enter_context(served(store)).port, shared))
        far = using.enter_context(far_loader(proxy.port, config, token, deadline_s=300))
        batches, found = far.forever(), []
        while shared.left:
            found.append(values(next(batches)))
        found += [values(next(batches)) for _ in range(3)]
        local = using.enter_context(Loader(store, config))
        assert found == [values(batch) for batch, _ in zip(local.forever(), found, strict=False)]
        assert far.state_dict()["step"] == len(found)


# Addresses of services; and a unix socket is created and used only where no other user can interfere.


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
        ran = call("loader", "serve", *arguments).fails(words, code=2)
        assert ran.out == ""
    assert call("loader", "serve", tmp_path / "no.store", *at).code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
