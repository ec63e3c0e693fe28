"""Batches over a network: those of a loader next to the store, whatever happens on the way."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING

import pytest
import torch

from bucketline.errors import BucketlineError, DeliveryError, PlanError, StateError, UsageError
from bucketline.loader import Batch, Loader, LoaderConfig, RemoteLoader
from bucketline.loader.network import listener as listener_module
from bucketline.loader.network import remote_loader as client_module
from bucketline.loader.network.listener import Security, listening
from bucketline.loader.network.tokens import proof_of
from bucketline.loader.network.wire import NETWORK_PROTOCOL, allowed
from bucketline.loader.service.protocol import receive, send
from bucketline.typed_json import encode
from tests.commands import spawn
from tests.conditioned import Form, conditioned_store
from tests.kit import make_store, samples_of
from tests.leftovers import wait_until
from tests.network_faults import Faults, faulty_proxy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bucketline.loader.network.listener import Listener
    from bucketline.store import Store

TOKEN = b"a token of the tests"


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_bytes(TOKEN + b"\n")
    path.chmod(0o600)
    return path


@contextmanager
def served(store: Store, **options: Path | None) -> Iterator[Listener]:
    before = len(of_servers())
    with listening("0", [store.path], Security(token=TOKEN, **options)) as found:
        yield found
    assert wait_until(lambda: len(of_servers()) <= before)


def of_servers() -> list[threading.Thread]:
    """Return the threads of servers in this process."""
    return [one for one in threading.enumerate() if one.name.startswith("bucketline-server")]


def remote(found: Listener | int, config: LoaderConfig, token: Path, **options: object) -> RemoteLoader:
    port = found if isinstance(found, int) else found.port
    return RemoteLoader(f"127.0.0.1:{port}", config, token=token, **options)  # type: ignore[arg-type]


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


CONFIGS = [
    LoaderConfig(batch_size=2, epochs=2, accumulation=2, seed=3),
    LoaderConfig(batch_size=3, epochs=1, caption_dropout=0.5, flip=0.5, remainder="partial", pad_multiple=2),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_batches_and_states_are_those_of_a_loader_next_to_the_store(tmp_path: Path, token: Path, config: LoaderConfig) -> None:
    store, _ = conditioned_store(tmp_path / "s", Form(dtype="BF16"))
    with ExitStack() as using:
        local = using.enter_context(Loader(store, config, rank=1, world_size=2))
        found = using.enter_context(served(store))
        with remote(found, config, token, rank=1, world_size=2) as far:
            assert len(far) == len(local)
            expected = list(local.forever())
            assert seen(list(far.forever())) == seen(expected)
            assert far.state_dict() == local.state_dict()
            for loader in (local, far):
                loader.set_epoch(0)
                batches = loader.forever()
                next(batches)
                next(batches)
                del batches
            assert far.state_dict() == local.state_dict()
            state = far.state_dict()
            rest = seen(list(local.forever()))
            local.load_state_dict(state)
            assert seen(list(far.forever())) == seen(list(local.forever())) == rest
            stats = far.stats()
            assert stats.samples == sum(stats.by_bucket.values()) > 0


def test_a_state_is_resumed_and_one_of_another_plan_is_refused_by_name(store: Store, token: Path) -> None:
    config = LoaderConfig(batch_size=2, seed=1)
    with Loader(store, config) as local, served(store) as found:
        batches = local.forever()
        for _ in range(7):
            next(batches)
        state = local.state_dict()
        expected = [next(batches).ids.tolist() for _ in range(5)]
        with remote(found, config, token) as far:
            far.load_state_dict(state)
            assert far.state_dict()["step"] == 7
            assert [batch.ids.tolist() for batch, _ in zip(far.forever(), range(5), strict=False)] == expected
            for loader in (local, far):
                loader.set_epoch(3)
            assert len(far) == len(local) > 0
        with remote(found, LoaderConfig(batch_size=2, seed=2), token) as far, pytest.raises(StateError, match="seed was 1"):
            far.load_state_dict(state)
        with pytest.raises(PlanError):
            remote(found, LoaderConfig(batch_size=2, split="nothing"), token)
        with pytest.raises(UsageError, match="rank is 2 of 2"):
            remote(found, config, token, rank=2, world_size=2)


def test_only_who_has_the_token_is_told_anything(store: Store, token: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_bytes(b"another token of the tests")
    wrong.chmod(0o600)
    config = LoaderConfig(batch_size=2)
    with served(store) as found:
        for given in (wrong, None):
            with pytest.raises(DeliveryError, match="the token is not the server's; use the same token file on both sides"):
                RemoteLoader(str(found.port), config, token=given)
        with socket.create_connection(("127.0.0.1", found.port)) as sock:
            hello, _ = receive(sock, 10)
            assert TOKEN.decode() not in str(hello)
            send(sock, {"proof": TOKEN.decode(), "protocol": 1})
            assert receive(sock, 10)[0].keys() == {"error", "message"}
    token.chmod(0o644)
    with pytest.raises(UsageError, match="has mode 644, so others may read it; chmod 600"):
        RemoteLoader("1", config, token=token)
    token.chmod(0o600)
    token.write_bytes(b"short")
    with pytest.raises(UsageError, match="has 5 bytes, expected 16 or more"):
        RemoteLoader("1", config, token=token)
    for address, words in (("0.0.0.0:0", "can be reached from other machines; give --token-file"), ("x", "is not an address")):
        with pytest.raises(UsageError, match=words), listening(address, [store.path], Security()):
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
    monkeypatch.setattr(listener_module, "REQUEST_S", 0.3)
    with served(store) as found:
        with socket.create_connection(("127.0.0.1", found.port)) as sock:
            receive(sock, 10)
            sock.sendall(STRANGERS[said])
            sock.settimeout(10)
            answer = b""
            with suppress(ConnectionResetError):  # it left with bytes unread
                while part := sock.recv(1 << 16):
                    answer += part
            assert b"plan" not in answer
        with remote(found, LoaderConfig(batch_size=2), token) as far:
            assert next(far.forever()).step == 0
    assert capfd.readouterr().err == ""


def test_stalled_clients_hold_up_the_end_of_a_server_once_and_not_one_by_one(
    tmp_path: Path, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "END_S", 0.2, raising=False)
    large = make_store(tmp_path / "large.store", samples_of({"train/512x512": 64}))
    request = {
        "protocol": NETWORK_PROTOCOL,
        "config": encode(LoaderConfig(batch_size=64)),
        "rank": 0,
        "world_size": 1,
        "state": None,
        "is_streamed": True,
    }
    with served(large) as found, ExitStack() as using:
        for _ in range(6):
            sock = using.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            sock.connect(("127.0.0.1", found.port))
            nonce = str(receive(sock, 10)[0]["nonce"])
            send(sock, {**request, "proof": proof_of(TOKEN, nonce)})
            receive(sock, 10)
        seen_at: dict[str, float] = {}

        def is_full() -> bool:
            """Return True if nothing more was sent for a while."""
            clients = found.clients.as_json()["clients"]
            now = time.monotonic()
            since = seen_at.setdefault(str([(one["address"], one["batches"]) for one in clients]), now)
            return len(clients) == 6 and now - since > 0.2

        assert wait_until(is_full)
        begun = time.monotonic()
        found.stop()
        assert time.monotonic() - begun < 3


def test_random_bytes_never_end_the_server(store: Store, token: Path) -> None:
    numbers = random.Random(3)
    with served(store) as found:
        for _ in range(30):
            with socket.create_connection(("127.0.0.1", found.port)) as sock:
                sock.sendall(numbers.randbytes(numbers.randrange(1, 300)))
        with remote(found, LoaderConfig(batch_size=2), token) as far:
            assert next(far.forever()).step == 0


def test_what_a_client_requests_has_limits(store: Store, token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "MAX_BATCH_BYTES", 1000)
    with served(store) as found, pytest.raises(DeliveryError, match="bytes, the server allows 1000; use smaller batches"):
        remote(found, LoaderConfig(batch_size=1000), token)
    monkeypatch.setattr(listener_module, "MAX_CLIENTS", 0)
    with served(store) as found, pytest.raises(DeliveryError, match=r"no server of batches can be reached at .* within 0.5 s"):
        remote(found, LoaderConfig(batch_size=1), token, deadline_s=0.5)
    sent = allowed(LoaderConfig(batch_size=1, store_option=("region=x",), cache="/c", threads=99))
    assert (sent.store_option, sent.cache, sent.threads) == ((), None, 4)


def test_no_server_is_an_error_within_the_deadline_that_says_how_to_start_one(token: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    begun = time.monotonic()
    with pytest.raises(DeliveryError, match=rf"no server .* at 127.0.0.1:{port} within 1 s; .*refused.* --listen"):
        remote(port, LoaderConfig(batch_size=1), token, deadline_s=1)
    assert time.monotonic() - begun < 3
    with pytest.raises(UsageError, match="no server is given"):
        RemoteLoader([], LoaderConfig(batch_size=1))
    with pytest.raises(UsageError, match="deadline_s is 0"):
        remote(port, LoaderConfig(batch_size=1), token, deadline_s=0)


def test_a_server_that_stops_is_an_error_at_the_next_batch_and_the_iteration_continues_at_another(
    store: Store, token: Path
) -> None:
    config = LoaderConfig(batch_size=1, prefetch_bytes=1)
    with Loader(store, config) as local, served(store) as first, served(store) as second:
        servers = [f"127.0.0.1:{first.port}", f"127.0.0.1:{second.port}"]
        with RemoteLoader(servers, config, token=token, deadline_s=1) as far:
            batches = far.forever()
            found = [next(batches).ids.tolist() for _ in range(4)]
            first.stop()
            found += [next(batches).ids.tolist() for _ in range(6)]
            second.stop()
            with pytest.raises(DeliveryError, match="no server of batches can be reached"):
                found.extend(batch.ids.tolist() for batch in batches)
            assert found == [batch.ids.tolist() for batch, _ in zip(local.forever(), found, strict=False)]
            assert far.state_dict()["step"] == len(found)


def test_a_bad_row_is_named_and_another_server_that_can_read_it_is_used(
    tmp_path: Path, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "s.store", samples_of({"train/64x64": 8}))
    real, failing = Loader.stream, list[object]()

    def stream(loader: Loader) -> object:
        found = real(loader)
        if len(failing) < how_many:
            failing.append(found)

            def fail() -> None:
                raise BucketlineError("bucket train/64x64: the disk is on fire")

            monkeypatch.setattr(found, "next", fail)
        return found

    monkeypatch.setattr(Loader, "stream", stream)
    config = LoaderConfig(batch_size=2, epochs=1)
    with served(store) as one, served(store) as other:
        servers = [f"127.0.0.1:{one.port}", f"127.0.0.1:{other.port}"]
        for how_many in (1, 3):
            failing.clear()
            with RemoteLoader(servers, config, token=token, deadline_s=5) as far:
                if how_many == 1:
                    assert len(list(far.forever())) == 4
                else:
                    with pytest.raises(BucketlineError, match="the disk is on fire"):
                        list(far.forever())


def test_a_client_that_leaves_ends_its_threads_on_the_server(
    store: Store, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "ALIVE_EVERY_S", 0.05)
    with served(store) as found:
        before = len(of_servers())
        for _ in range(3):
            with remote(found, LoaderConfig(batch_size=1), token) as far:
                next(far.forever())
        assert wait_until(lambda: len(of_servers()) <= before)


def test_a_forked_process_is_refused(store: Store, token: Path) -> None:
    with served(store) as found, remote(found, LoaderConfig(batch_size=1), token) as far:
        far._owner.pid = -1
        with pytest.raises(UsageError, match="cannot be used in a forked process"):
            next(far.forever())


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


def test_tls_encrypts_and_a_certificate_that_is_not_trusted_is_refused(store: Store, token: Path, tmp_path: Path) -> None:
    certificate, key = certificate_of(tmp_path, "127.0.0.1")
    (tmp_path / "other").mkdir()
    other, _ = certificate_of(tmp_path / "other", "127.0.0.2")
    config = LoaderConfig(batch_size=2, epochs=1)
    with Loader(store, config) as local, served(store, certificate=certificate, key=key) as found:
        with remote(found, config, token, certificate=certificate) as far:
            assert seen(list(far.forever())) == seen(list(local.forever()))
        with pytest.raises(DeliveryError, match=r"the certificate of 127\.0\.0\.1 is not trusted: self-signed"):
            remote(found, config, token, certificate=other)
        with pytest.raises(DeliveryError, match="no server of batches can be reached"):
            remote(found, config, token, deadline_s=0.3)
    with pytest.raises(UsageError, match="cannot be used"), served(store, certificate=token):
        pass


@pytest.mark.parametrize("faults", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_cuts_and_stalls_lose_and_change_nothing(
    store: Store, token: Path, monkeypatch: pytest.MonkeyPatch, faults: int
) -> None:
    monkeypatch.setattr(client_module, "SILENCE_S", 0.2)
    monkeypatch.setattr(listener_module, "ALIVE_EVERY_S", 0.05)
    config = LoaderConfig(batch_size=2)
    with ExitStack() as using:
        servers = [using.enter_context(served(store)) for _ in range(2)]
        shared = Faults(faults, most_bytes=60_000, seed=faults)
        proxies = [using.enter_context(faulty_proxy(one.port, shared)) for one in servers]
        addresses = [f"127.0.0.1:{one.port}" for one in proxies]
        far = using.enter_context(RemoteLoader(addresses, config, token=token, deadline_s=30))
        batches, found = far.forever(), []
        while shared.left:
            found.append(next(batches))
        found += [next(batches) for _ in range(3)]
        local = using.enter_context(Loader(store, config))
        assert seen(found) == seen([batch for batch, _ in zip(local.forever(), found, strict=False)])
        assert far.state_dict()["step"] == len(found)


@pytest.mark.slow
def test_killed_servers_are_replaced_and_nothing_is_lost(store: Store, token: Path, tmp_path: Path) -> None:
    config = LoaderConfig(batch_size=1, epochs=30, prefetch_bytes=1)
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])

    def start(number: int) -> subprocess.Popen[str]:
        serve = [sys.executable, "-m", "bucketline.loader.cli", "serve", str(store.path), "--every", "1e6"]
        where = ["--socket", str(tmp_path / str(number)), "--listen", str(ports[number]), "--token-file", str(token)]
        process = subprocess.Popen([*serve, *where], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        assert process.stderr.readline().startswith("serving ")
        assert process.stderr.readline().startswith("batches for other machines at port ")
        return process

    with Loader(store, config) as local:
        expected = [batch.ids.tolist() for batch in local.forever()]
    running = [start(0), start(1)]
    try:
        with RemoteLoader([f"127.0.0.1:{port}" for port in ports], config, token=token) as far:
            found = []
            for number, batch in enumerate(far.forever()):
                found.append(batch.ids.tolist())
                if number % (len(expected) // 6) == 10:
                    victim = (number // 10) % 2
                    running[victim].send_signal(signal.SIGKILL)
                    running[victim].communicate()
                    running[victim] = start(victim)
        assert found == expected
    finally:
        for process in running:
            process.terminate()
            process.communicate(timeout=30)


@pytest.mark.slow
def test_serve_says_what_is_wrong_with_its_options(store: Store, token: Path, tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "bucketline.loader.cli", "serve", store.path, "--socket", tmp_path / "s", "--listen"]
    for options, words in (
        (["0.0.0.0:0"], "can be reached from other machines; give --token-file FILE"),
        (["0", "--token-file", tmp_path / "none"], "cannot read the token file"),
        (["0", "--certificate", token], "cannot be used"),
    ):
        ran = spawn([*serve, *options])
        assert ran.code == 2
        assert words in ran.err
    assert not os.path.exists(tmp_path / "s")  # noqa: PTH110
