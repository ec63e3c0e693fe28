"""Batches over TCP: whatever happens on the way, those of a loader next to the store; and nobody else gets any."""

from __future__ import annotations

import os
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from bucketline.errors import BucketlineError, DeliveryError, StoreError, UsageError
from bucketline.loader import Batch, Loader, LoaderConfig, ServiceAddress
from bucketline.loader.prefetch.threads import ThreadStream
from bucketline.loader.service import client_connection, frame_client, links, server, wire
from bucketline.loader.service.frame_client import FrameClient
from bucketline.loader.service.frames import FrameReader, FrameWriter
from bucketline.loader.service.layouts import FrameKind
from bucketline.loader.service.server import Service
from bucketline.loader.service.sockets import Security, shut
from bucketline.loader.service.tokens import proof_of
from bucketline.loader.service.wire import allowed, receive, send, sent
from bucketline.store import Store
from tests.commands import call, kept_port, spawn
from tests.kit import make_store, samples_of
from tests.leftovers import wait_until
from tests.network_faults import Faults, faulty_proxy
from tests.serving import Served, serving_here

TOKEN = b"a token of the tests"


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_bytes(TOKEN + b"\n")
    path.chmod(0o600)
    return path


@contextmanager
def served(store: Store, **options: Path | None) -> Iterator[Served]:
    with tempfile.TemporaryDirectory() as folder:
        with serving_here(Path(folder), store.path, security=Security(token=TOKEN, **options)) as found:
            yield found
        assert wait_until(lambda: not of_service())


def of_service() -> list[threading.Thread]:
    """Return the threads for clients of services in this process."""
    return [one for one in threading.enumerate() if one.name == "bucketline-client"]


def far_loader(found: Served | str, config: LoaderConfig, token: Path | None, **options: object) -> Loader:
    """Return a loader without stores."""
    where = found if isinstance(found, str) else found.tcp
    return Loader(None, config, service=ServiceAddress(where, token=token, **options))  # type: ignore[arg-type]


def seen(batches: list[Batch]) -> list[object]:
    return [
        (
            *(one.step, one.micro_step, one.epoch, one.bucket, one.latent_kind),
            *((name, tensor.dtype, tensor.shape, tensor.view(torch.uint8).tolist()) for name, tensor in by_name(one)),
        )
        for one in batches
    ]


def by_name(batch: Batch) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in batch.by_name().items():
        yield name, tensor.contiguous().reshape(-1) if tensor.dim() == 0 else tensor.contiguous()


def test_only_who_has_the_token_is_told_anything(store: Store, token: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_bytes(b"another token of the tests")
    wrong.chmod(0o600)
    config = LoaderConfig(batch_size=2)
    with served(store) as found:
        for given in (wrong, None):
            with pytest.raises(DeliveryError, match="the token is not the server's; use the same token file on both sides"):
                far_loader(found, config, given)
        with socket.create_connection(("127.0.0.1", found.port)) as sock:
            hello = receive(sock, 10)
            assert TOKEN.decode() not in str(hello)
            send(sock, {"proof": TOKEN.decode(), "protocol": 1})
            assert receive(sock, 10).keys() == {"error", "message"}
    token.chmod(0o644)
    with pytest.raises(UsageError, match="has mode 644, so others may read it; chmod 600"):
        far_loader("tcp://1", config, token)
    token.chmod(0o600)
    token.write_bytes(b"short")
    with pytest.raises(UsageError, match="has 5 bytes, expected 16 or more"):
        far_loader("tcp://1", config, token)
    for address, words in (("0.0.0.0:0", "can be reached from other machines; give --token-file"), ("x", "is not an address")):
        with pytest.raises(UsageError, match=words), Service([store.path]).listening(address, Security()):
            pass


STRANGERS = {
    "nothing": b"",
    "a web browser": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a long message": b"\xff\xff\xff\xff" + b"x" * 100,
    "no object": b"\0\0\0\x02[]",
    "deep": b"\0\0\x40\0" + b"[" * 0x4000,
    "half a message": b"\0\0\0\x10{",
    "a proof that is none": b'\0\0\0\x0c{"proof": 1}',
    "a proof that is not text": b'\0\0\0\x13{"proof": "\\ud800"}',
}


@pytest.mark.parametrize("said", STRANGERS)
def test_strangers_at_the_port_change_nothing(
    store: Store, token: Path, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with served(store) as found:
        with monkeypatch.context() as patch, ExitStack() as using:
            patch.setattr(client_connection, "REQUEST_S", 0.3)  # a client of ours may take longer on a busy machine
            sock = using.enter_context(socket.create_connection(("127.0.0.1", found.port)))
            receive(sock, 10)
            sock.sendall(STRANGERS[said])
            sock.settimeout(60)
            answer = b""
            with suppress(ConnectionResetError):  # it left with bytes unread
                while part := sock.recv(1 << 16):
                    answer += part
            assert b"plan" not in answer
        with far_loader(found, LoaderConfig(batch_size=2), token) as far:
            assert next(far.forever()).step == 0
    assert capfd.readouterr().err == ""


def test_strangers_keep_no_client_out_and_none_of_another_host(
    store: Store, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "REQUEST_S", 600.0)
    monkeypatch.setattr(FrameClient, "max_clients", 4)
    monkeypatch.setattr(FrameClient, "max_strangers", 4, raising=False)
    with served(store) as found, ExitStack() as using:

        def stranger(host: str = "127.0.0.1") -> socket.socket:
            sock = using.enter_context(socket.create_connection(("127.0.0.1", found.port), source_address=(host, 0)))
            sock.settimeout(60)
            return sock

        def nonce_for(sock: socket.socket) -> str:
            return str(receive(sock, 60)["nonce"])

        early = using.enter_context(far_loader(found, LoaderConfig(batch_size=2), token, deadline_s=60.0))
        assert next(early.forever()).step == 0
        slow = stranger("127.0.0.2")
        nonce = nonce_for(slow)
        strangers = [stranger() for _ in range(12)]
        for sock in strangers:
            with suppress(BucketlineError):  # it was the oldest already
                nonce_for(sock)
        for _ in range(2):
            with far_loader(found, LoaderConfig(batch_size=2), token, deadline_s=20.0) as late:
                assert next(late.forever()).step == 0
        assert not any(sock.recv(1) for sock in strangers[:8])  # which were ended
        send(slow, {**wire.message_of(wire.StatsRequest()), "proof": proof_of(TOKEN, nonce), "protocol": wire.PROTOCOL})
        assert "stats" in receive(slow, 60)
        assert len([*early]) > 1


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
            send(sock, {**request, "proof": proof_of(TOKEN, nonce)})
            receive(sock, 10)
        seen_at: dict[str, float] = {}

        def is_full() -> bool:
            """Return True if nothing more was sent for a while."""
            clients = found.service.stats()["network"]["clients"]
            now = time.monotonic()
            since = seen_at.setdefault(str([(one["address"], one["batches"]) for one in clients]), now)
            return len(clients) == 6 and now - since > 0.2

        assert wait_until(is_full)
        begun = time.monotonic()
        found.service.stop()
        assert time.monotonic() - begun < 6 * server.END_S


def test_a_client_that_reads_nothing_holds_up_no_sign_of_life_of_others() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        client = FrameClient(ours, "here", None, None)
        client._ends_at, client._show = None, partial(send, ours, wire.ALIVE)
        client.show_life()
        assert receive(theirs, 10) == wire.ALIVE
        ours.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                ours.send(b"x")
        ours.setblocking(True)
        thread = threading.Thread(target=client.show_life, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        ours.close()
        client.show_life()


def test_a_failure_to_read_is_told_also_if_the_service_stops_before_it_is_sent() -> None:
    ours, theirs = socket.socketpair()
    client = FrameClient(ours, "peer", None, None)
    failed = threading.Event()

    class Failing:
        def next(self) -> None:
            failed.set()
            raise StoreError("shard 3 is damaged")

        def release(self) -> None: ...

    client._stream, client._writer = cast("Any", Failing()), FrameWriter(ours)
    with client._sending:  # as while a sign of life is sent
        sender = threading.Thread(target=client.run)
        sender.start()
        assert failed.wait(60)
        assert wait_until(lambda: client._counts.errors == 1)
        client.stop(DeliveryError("the service was stopped"))
    sender.join()
    found = FrameReader(theirs, 100)
    assert found.next_kind() is FrameKind.END
    assert repr(found.failure()) == repr(StoreError("shard 3 is damaged"))
    ours.close()
    theirs.close()


def test_a_connection_by_tls_that_is_ended_sends_nothing_in_the_clear(tmp_path: Path) -> None:
    certificate, key = certificate_of(tmp_path, "127.0.0.1")
    theirs = ssl.create_default_context(cafile=certificate)
    ours_raw, theirs_raw = socket.socketpair()
    context = Security(certificate=certificate, key=key).context()
    assert context is not None
    with ExitStack() as using:
        found: list[ssl.SSLSocket] = []
        thread = threading.Thread(target=lambda: found.append(context.wrap_socket(ours_raw, server_side=True)))
        thread.start()
        using.enter_context(theirs.wrap_socket(theirs_raw, server_hostname="127.0.0.1"))
        thread.join()
        sock = using.enter_context(found[0])
        shut(sock)
        assert sock.version() is not None  # it is None, and `send` in the clear, after the socket's own shutdown
        with pytest.raises(OSError, match=r"EOF|roken|rotocol"):
            sock.sendall(b"x")


def test_a_client_for_whom_there_is_no_thread_is_refused_and_the_service_continues(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, none_is_left = threading.Thread.start, threading.Event()

    def refuse(thread: threading.Thread) -> None:
        if none_is_left.is_set() and thread.name == "bucketline-client":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with serving_here(tmp_path, store.path) as found:
        none_is_left.set()
        with pytest.raises(DeliveryError, match="the service has no thread for another client: can't start new thread"):
            Loader(None, LoaderConfig(batch_size=2), service=found.socket)
        none_is_left.clear()
        for where in (found.socket, found.tcp):
            with Loader(None, LoaderConfig(batch_size=2), service=where) as loader:
                assert next(iter(loader)).step == 0


def test_a_handshake_that_never_ends_holds_up_no_end_of_a_server(store: Store, tmp_path: Path) -> None:
    certificate, key = certificate_of(tmp_path, "127.0.0.1")
    with served(store, certificate=certificate, key=key) as found, socket.create_connection(("127.0.0.1", found.port)) as sock:
        sock.sendall(b"\x16\x03\x01")
        assert wait_until(lambda: bool(of_service()))
        begun = time.monotonic()
        found.service.stop()
        assert time.monotonic() - begun < client_connection.REQUEST_S - 1


def test_what_a_client_requests_has_limits(store: Store, token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_client, "MAX_BATCH_BYTES", 1000)
    with served(store) as found, pytest.raises(DeliveryError, match="bytes, the server allows 1000; use smaller batches"):
        next(far_loader(found, LoaderConfig(batch_size=1000), token).forever())
    monkeypatch.setattr(frame_client.FrameClient, "max_clients", 0)
    with served(store) as found, pytest.raises(DeliveryError, match=r"no server of batches can be reached at .* within 0.5 s"):
        far_loader(found, LoaderConfig(batch_size=1), token, deadline_s=0.5)
    config = allowed(sent(LoaderConfig(batch_size=1, store_option=("region=x",), cache="/c", threads=99)))
    assert (config.store_option, config.cache, config.threads) == ((), None, 4)


def test_no_server_is_an_error_within_the_deadline_that_says_how_to_start_one(token: Path) -> None:
    begun = time.monotonic()
    words = r"no server .* at 127.0.0.1:\d+ within 1 s; .*refused.* --at tcp://"
    with kept_port() as port, pytest.raises(DeliveryError, match=words):  # at which nobody listens
        far_loader(f"tcp://{port}", LoaderConfig(batch_size=1), token, deadline_s=1)
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ("tcp://", {}, "service is tcp://, expected a `loader serve`"),
        ("tcp://x", {}, "x is not an address, expected HOST:PORT"),
        ("tcp://me:secret@x", {}, "^x is not an address, expected HOST:PORT"),
        ("http://me:secret@x", {}, "service is 'http://x', expected"),
        ("tcp://1", {"deadline_s": 0}, "deadline_s is 0, expected seconds above 0"),
        ("tcp://a..b:1", {}, r"a\.\.b:1 is not an address, expected HOST:PORT"),
        ("tcp://::1", {}, "::1 is not an address, expected HOST:PORT"),
        ("tcp://a b:1", {}, "a b:1 is not an address"),
        ("tcp://a:1,x/y:2", {}, "x/y:2 is not an address"),
        (f"tcp://a:{'9' * 5000}", {}, "is not an address"),
        ("tcp://a:1,b:0", {}, "service is tcp://a:1,b:0, expected a `loader serve`"),
        ("tcp:a:1", {}, "service is 'tcp:a:1', expected a `loader serve`"),
        ("TCP://a:1", {}, "service is 'TCP://a:1', expected"),
        ("http://a:1", {}, "service is 'http://a:1', expected"),
        ("unix:", {}, "service is 'unix:', expected"),
        ("unix:s", {"token": "t"}, "with a token or a certificate, which only tcp"),
        ("auto", {}, "stores is None with service auto"),
        (None, {}, "stores is None without a service"),
        (True, {}, "service is True of type bool, expected a `loader serve`"),
    ],
)
def test_what_is_no_address_or_lacks_stores_is_refused_by_name(given: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Loader(None, LoaderConfig(batch_size=1), service=ServiceAddress(given, **options) if given else None)


@pytest.mark.parametrize(
    ("given", "servers"),
    [
        ("tcp://a:1, b:2", (("a", 1), ("b", 2))),
        ("tcp://a:1,tcp://b:2,", (("a", 1), ("b", 2))),
        ("tcp://[::1]:3,10.0.0.1:4", (("::1", 3), ("10.0.0.1", 4))),
        ("tcp://5", (("127.0.0.1", 5),)),
    ],
)
def test_several_servers_are_separated_by_commas(given: str, servers: tuple[tuple[str, int], ...]) -> None:
    assert ServiceAddress(given).servers == servers


@pytest.mark.parametrize("given", ["unix:/run/s", "/run/s", Path("/run/s"), "unix:///run/s", Path("unix:/run/s")])
def test_a_socket_is_a_path_or_has_unix_before_it(given: Path | str) -> None:
    address = ServiceAddress(given)
    assert (str(address.path).replace("//", "/"), address.servers) == ("/run/s", ())


def test_a_server_that_stops_is_an_error_at_the_next_batch_and_the_iteration_continues_at_another(
    store: Store, token: Path
) -> None:
    config = LoaderConfig(batch_size=1, prefetch_bytes=1)
    with Loader(store, config) as local, served(store) as first, served(store) as second:
        servers = f"tcp://127.0.0.1:{first.port},127.0.0.1:{second.port}"
        with far_loader(servers, config, token, deadline_s=1) as far:
            batches = far.forever()
            found = [next(batches).ids.tolist() for _ in range(4)]
            first.service.stop()
            found += [next(batches).ids.tolist() for _ in range(6)]
            second.service.stop()
            with pytest.raises(DeliveryError, match="no server of batches can be reached"):
                found.extend(batch.ids.tolist() for batch in batches)
            assert found == [batch.ids.tolist() for batch, _ in zip(local.forever(), found, strict=False)]
            assert far.state_dict()["step"] == len(found)


def test_a_bad_row_is_named_and_another_server_that_can_read_it_is_used(
    tmp_path: Path, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "s.store", samples_of({"train/64x64": 8}))
    real, failing = ThreadStream.next, set[ThreadStream]()

    def fail(stream: ThreadStream) -> object:
        if len(failing | {stream}) <= how_many:
            failing.add(stream)
            raise BucketlineError("bucket train/64x64: the disk is on fire")
        return real(stream)

    monkeypatch.setattr(ThreadStream, "next", fail)
    config = LoaderConfig(batch_size=2, epochs=1)
    with served(store) as one, served(store) as other:
        servers = f"tcp://127.0.0.1:{one.port},127.0.0.1:{other.port}"
        for how_many in (1, 3):
            failing.clear()
            with far_loader(servers, config, token, deadline_s=5) as far:
                if how_many == 1:
                    assert len(list(far.forever())) == 4
                else:
                    with pytest.raises(BucketlineError, match="the disk is on fire"):
                        list(far.forever())


def test_a_client_that_leaves_ends_its_threads_on_the_server(
    store: Store, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "ALIVE_EVERY_S", 0.05)
    with served(store) as found:
        for _ in range(3):
            with far_loader(found, LoaderConfig(batch_size=1), token) as far:
                next(far.forever())
        assert wait_until(lambda: not of_service())


def certificate_of(folder: Path, host: str) -> tuple[Path, Path]:
    """Make a certificate that signs itself, and its key."""
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


def test_tls_encrypts_and_a_certificate_that_is_not_trusted_is_refused(
    store: Store, token: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = certificate_of(tmp_path, "127.0.0.1")
    (tmp_path / "other").mkdir()
    other, _ = certificate_of(tmp_path / "other", "127.0.0.2")
    config = LoaderConfig(batch_size=2, epochs=1)
    with Loader(store, config) as local, served(store, certificate=certificate, key=key) as found:
        with far_loader(found, config, token, certificate=certificate) as far:
            assert seen(list(far.forever())) == seen(list(local.forever()))
        with pytest.raises(DeliveryError, match=r"the certificate of 127\.0\.0\.1 is not trusted: self-signed"):
            far_loader(found, config, token, certificate=other)
        monkeypatch.setattr(links, "SILENCE_S", 0.3)
        with pytest.raises(DeliveryError, match=r"connection is lost: .*; if the server has --certificate, name its file"):
            far_loader(found, config, token, deadline_s=0.3)
    monkeypatch.setattr(links, "SILENCE_S", 60.0)
    monkeypatch.setattr(links, "_FIRST_PAUSE_S", 100.0)  # beyond the deadline: one try, which may take as long as that
    with (
        served(store) as found,
        pytest.raises(DeliveryError, match=r"TLS fails: WRONG_VERSION_NUMBER; does the server have --certificate\?"),
    ):
        far_loader(found, config, token, deadline_s=60, certificate=certificate)
    with pytest.raises(UsageError, match="cannot be used"), served(store, certificate=token):
        pass


@pytest.mark.parametrize("faults", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_cuts_and_stalls_lose_and_change_nothing(
    store: Store, token: Path, monkeypatch: pytest.MonkeyPatch, faults: int
) -> None:
    monkeypatch.setattr(links, "SILENCE_S", 0.2)
    monkeypatch.setattr(wire, "ALIVE_EVERY_S", 0.05)
    config = LoaderConfig(batch_size=2)
    with ExitStack() as using:
        servers = [using.enter_context(served(store)) for _ in range(2)]
        shared = Faults(faults, most_bytes=60_000, seed=faults)
        proxies = [using.enter_context(faulty_proxy(one.port, shared)) for one in servers]
        addresses = "tcp://" + ",".join(f"127.0.0.1:{one.port}" for one in proxies)
        far = using.enter_context(far_loader(addresses, config, token, deadline_s=300))
        batches, found = far.forever(), []
        while shared.left:
            found.append(next(batches))
        found += [next(batches) for _ in range(3)]
        local = using.enter_context(Loader(store, config))
        assert seen(found) == seen([batch for batch, _ in zip(local.forever(), found, strict=False)])
        assert far.state_dict()["step"] == len(found)


@pytest.mark.slow
def test_serve_says_what_is_wrong_with_its_options(store: Store, token: Path, tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "bucketline.loader.cli", "serve", store.path, "--at", tmp_path / "s", "--at"]
    for options, words in (
        (["tcp://0.0.0.0:0"], "can be reached from other machines; give --token-file FILE"),
        (["tcp://0", "--token-file", tmp_path / "none"], "cannot read the token file"),
        (["tcp://0", "--certificate", token], "cannot be used"),
    ):
        ran = spawn([*serve, *options])
        assert ran.code == 2
        assert words in ran.err
    for more, words in (
        (("--at", tmp_path / "s", "--token-file", token), f"--token-file is {token} without --at tcp://"),
        (("--at", tmp_path / "s", "--certificate", token), f"--certificate is {token} without --at tcp://"),
        (("--at", "tcp://0", "--at", "tcp://1"), "--at is 0 and 1, expected one tcp://HOST:PORT at most"),
        (("--at", "tcp://0", "--certificate", token, token, token), "--certificate has 3 files"),
        (("--at", "unix:"), "--at is 'unix:', expected unix:PATH or tcp://HOST:PORT"),
        (("--at", "tcp:a:1"), "--at is 'tcp:a:1', expected unix:PATH or tcp://HOST:PORT"),
        (("--at", "tcp://a:b"), "a:b is not an address"),
        (("--socket", tmp_path / "s"), "there is no option --socket"),
    ):
        refused = call("loader", "serve", store.path, *more)
        assert refused.code == 2
        assert words in refused.err
    assert not os.path.exists(tmp_path / "s")  # noqa: PTH110
