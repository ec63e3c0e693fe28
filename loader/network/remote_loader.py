"""The client: batches from servers on other machines, received into the memory that they are used in."""

from __future__ import annotations

import random
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from bucketline.errors import BucketlineError, DeliveryError, StateError, UsageError
from bucketline.forks import OwnerProcess
from bucketline.loader.collate.buffer_pool import BufferPool
from bucketline.loader.config import Remainder
from bucketline.loader.device import device_of
from bucketline.loader.history import short
from bucketline.loader.iteration import CLOSED, EpochLoader, check_ranks
from bucketline.loader.network.addresses import address_of
from bucketline.loader.network.tokens import proof_of, read_token
from bucketline.loader.network.wire import (
    ALIVE,
    NETWORK_PROTOCOL,
    FrameKind,
    FrameReader,
    RemoteRequest,
    RemoteResponse,
    allowed,
    end_when_peer_is_lost,
    limit_silence,
)
from bucketline.loader.plan.epoch_steps import EpochSteps
from bucketline.loader.prefetch.cuda_copy import CudaCopier
from bucketline.loader.prefetch.reorder_buffer import ReorderBuffer
from bucketline.loader.prefetch.threads import FIRST_DEPTH, depth_of
from bucketline.loader.service.protocol import failure_of, receive, send
from bucketline.loader.state import LoaderState, parse_state, state_as_json
from bucketline.store.format.columns import LatentKind
from bucketline.typed_json import TypedJsonError, decode, encode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor

    from bucketline.loader.collate.buffer_pool import FilledBuffer
    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.plan.cursor import Cursor
    from bucketline.loader.stats import Stats
    from bucketline.typed_json import Json

SILENCE_S = 10.0  # a server that sends not even a sign of life for so long is lost
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0  # before all servers are tried again


class RemoteLoader(EpochLoader):
    """An iterable of one rank's micro-batches, from `loader serve --listen` on another machine.

    The batches are those of a `Loader` of the same stores and configuration, bit for bit, and so are its epochs and its state:
    one `for` is one epoch, and either resumes the other's state. This machine needs no store, no credentials and no disk.

    Several servers of the same stores stand in for one another: if one is lost, the iteration continues at the next one, at
    the same batch. It has one iterator at a time. It cannot be used in a forked process.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        config: LoaderConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str | int | None = None,
        token: Path | str | None = None,
        certificate: Path | str | None = None,
        deadline_s: float = 60.0,
    ) -> None:
        """Connect to the first of `servers` (HOST:PORT each) that answers, and request the plan.

        `token`: the file with the servers' token. `certificate`: with TLS, the file (PEM) with the certificates to trust. After
        `deadline_s` seconds without any server, an iteration ends with an error.

        Raises:
            UsageError: if an address, the rank, the device or a file is invalid.
            DeliveryError: if no server can be reached or all refuse.
            PlanError: if the plan has no step.
        """
        check_ranks(config, rank, world_size)
        if not 0 <= rank < world_size:
            raise UsageError(f"rank is {rank} of {world_size} ranks, expected 0 to {world_size - 1}")
        if not deadline_s > 0:
            raise UsageError(f"deadline_s is {deadline_s}, expected seconds above 0")
        self.device = device_of(device)
        self._servers = _Servers(
            [servers] if isinstance(servers, str) else list(servers),
            None if token is None else read_token(token),
            certificate,
            deadline_s,
        )
        self.config = config
        self._request = RemoteRequest(
            protocol=NETWORK_PROTOCOL,
            config=allowed(config),  # nothing of this machine's disks and object storage
            rank=rank,
            world_size=world_size,
            state=None,
            is_streamed=False,
        )
        self._owner = OwnerProcess()
        self._pool: BufferPool | None = None
        self._copier: CudaCopier | None = None
        found = self._described(None)
        self._begin_at_first_epoch()
        self._resume(found)

    def _described(self, state: Mapping[str, object] | None) -> LoaderState:
        """Request the plan, and have a state checked; return the state of a loader that begins there."""
        request = self._request if state is None else replace(self._request, state=_as_state(state))
        self._answer = self._servers.described(request)
        self._saved = parse_state(self._answer.state)
        self._latent_kind = LatentKind(self._answer.latent_kind)
        sizes = tuple((rows, global_batch) for rows, global_batch in self._answer.sizes)
        self._steps = EpochSteps(sizes=sizes, remainder=Remainder(self.config.remainder), epochs=self.config.num_epochs)
        return self._saved

    def _begin_stream(self) -> _Receiving:
        if not self._owner.is_current:
            raise UsageError("a RemoteLoader cannot be used in a forked process; make one there")
        if self._pool is None:
            on_cuda = self.device.type == "cuda"
            depth = depth_of(self.config, self._answer.buffer_bytes)
            self._pool = BufferPool(self._answer.buffer_bytes, depth + 2, pinned=on_cuda)
            self._copier = CudaCopier(self.device) if on_cuda else None
        wanted = replace(self._request, state=_as_state(self.state_dict()), is_streamed=True)
        depth = depth_of(self.config, self._answer.buffer_bytes)
        return _Receiving(self._servers, wanted, self._cursor, self._pool, self._copier, depth)

    def _before_batch(self) -> None: ...

    def _end_stream(self) -> None:
        if self._owner.is_current:
            super()._end_stream()

    def state_dict(self) -> dict[str, object]:
        """Return the state as JSON values; see `Loader.state_dict`."""
        return state_as_json(self._state())

    def _state(self) -> LoaderState:
        now = replace(
            self._saved,
            step=self._cursor.step,
            micro_step=self._cursor.micro_step,
            epoch=self._epoch_of_state(),
            since=self._since,
            history=(),
        )
        return replace(now, history=short(self._past, now)) if self._past else now

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Resume from a saved state, of this class or of `Loader`; see `Loader.load_state_dict`. A server checks it.

        Raises:
            StateError: if it belongs to another plan; the message names the field, its saved and its current value.
            DeliveryError: if no server can be reached.
        """
        self._end_iteration("load_state_dict() was called")
        parse_state(state)
        found = self._described(state)
        self._resume(found)
        self._pool = None

    def close(self) -> None:
        """End the current iteration. Batches still held stay valid."""
        self._end_iteration(CLOSED)

    def __enter__(self) -> RemoteLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if "_stream" in self.__dict__:
            self.close()


def _as_state(state: Mapping[str, object]) -> dict[str, Json]:
    encoded = encode(dict(state))
    assert isinstance(encoded, dict)
    return dict(encoded)


class _Servers:
    """Servers of the same stores: the first that answers is used until it fails."""

    def __init__(self, servers: Sequence[str], token: bytes | None, certificate: Path | str | None, deadline_s: float) -> None:
        if not servers:
            raise UsageError("no server is given, expected HOST:PORT of one or more")
        self._addresses = [address_of(one) for one in servers]
        self._token, self.deadline_s = token, deadline_s
        self._context: ssl.SSLContext | None = None
        if certificate is not None:
            try:
                self._context = ssl.create_default_context(cafile=certificate)
            except OSError as error:
                raise UsageError(f"the certificates {certificate} cannot be used: {error}") from error
        self._first, self.count = 0, len(self._addresses)
        self.names = ", ".join(servers)

    def described(self, request: RemoteRequest) -> RemoteResponse:
        """Return the answer of the first server that answers.

        Raises:
            BucketlineError: if none does before the deadline, or one refuses.
        """
        sock, answer = self.connected(request, time.monotonic() + self.deadline_s, threading.Event())
        sock.close()
        return answer

    def lost(self) -> None:
        """Begin with the next server, since the present one has failed."""
        self._first = (self._first + 1) % len(self._addresses)

    def connected(self, request: RemoteRequest, until: float, over: threading.Event) -> tuple[socket.socket, RemoteResponse]:
        """Connect to a server that grants a request; try each in turn, and all again after a pause.

        Raises:
            DeliveryError: if none can be reached before `until` (of the monotonic clock).
            BucketlineError: if a server refuses: the others would as well.
        """
        pause, failure = _FIRST_PAUSE_S, ""
        while True:
            for _ in self._addresses:
                address = self._addresses[self._first]
                try:
                    return self._ask(address, request, max(0.1, until - time.monotonic()))
                except (OSError, _UnreachableError) as error:
                    failure = f"{address[0]}:{address[1]}: {getattr(error, 'strerror', None) or error}"
                    self.lost()
            if over.is_set() or time.monotonic() + pause > until:
                raise DeliveryError(
                    f"no server of batches can be reached at {self.names} within {self.deadline_s:g} s; the last failure: "
                    f"{failure}; start one (loader serve --listen), and iterate again: it continues at the same batch"
                )
            pause = _paused(pause, over)

    def _ask(self, address: tuple[str, int], request: RemoteRequest, left: float) -> tuple[socket.socket, RemoteResponse]:
        sock = socket.create_connection(address, timeout=min(left, SILENCE_S))
        try:
            end_when_peer_is_lost(sock)
            if self._context is not None:
                try:
                    sock = self._context.wrap_socket(sock, server_hostname=address[0])
                except ssl.SSLCertVerificationError as error:
                    raise DeliveryError(
                        f"the certificate of {address[0]} is not trusted: {error.verify_message}; name the file that it is in"
                    ) from error
            hello = _received(sock, min(left, SILENCE_S))
            message = encode(request)
            assert isinstance(message, dict)
            send(sock, {**message, "proof": proof_of(self._token, str(hello.get("nonce")))})
            while (answer := _received(sock, SILENCE_S)) == ALIVE:
                pass
            if "error" in answer:
                raise failure_of(answer)
            try:
                granted = decode(RemoteResponse, answer)
                granted.check()
            except (TypedJsonError, ValueError, StateError) as error:
                raise DeliveryError(f"the answer of {address[0]}:{address[1]} is invalid: {error}") from error
            sock.settimeout(None)
            limit_silence(sock, SILENCE_S)
        except BaseException:
            sock.close()
            raise
        return sock, granted


def _paused(pause: float, over: threading.Event) -> float:
    """Wait, unless the iteration ends; return the next pause."""
    over.wait(pause * random.uniform(0.5, 1.0))  # noqa: S311 - so that ranks do not come all at once
    return min(2 * pause, _MAX_PAUSE_S)


class _UnreachableError(Exception):
    """A server that went away before it answered."""


def _received(sock: socket.socket, timeout_s: float) -> dict[str, object]:
    try:
        return receive(sock, timeout_s)[0]
    except DeliveryError as error:
        raise _UnreachableError(str(error)) from error


class _Receiving:
    """An iteration: a thread receives batches into buffers, a few ahead of the caller."""

    def __init__(
        self,
        servers: _Servers,
        wanted: RemoteRequest,
        cursor: Cursor,
        pool: BufferPool,
        copier: CudaCopier | None,
        depth: int,
    ) -> None:
        self._servers, self._wanted, self._cursor, self._pool, self._copier = servers, wanted, cursor, pool, copier
        self._ready: ReorderBuffer[tuple[FilledBuffer, tuple[Tensor, torch.cuda.Event] | None]] = ReorderBuffer(
            depth, FIRST_DEPTH
        )
        self._sock: socket.socket | None = None
        self._over = threading.Event()
        self._turn = 0
        self._refusals = 0  # failures that servers have told, since the last batch
        self._thread = threading.Thread(target=self._run, name="bucketline-receiver", daemon=True)
        self._thread.start()

    def next(self) -> tuple[FilledBuffer, Tensor] | None:
        """Return the next micro-batch and its bytes on the caller's device; see `ThreadStream.next`."""
        ready = self._ready.take(self._thread.is_alive)
        if ready is None:
            return None
        filled, copy = ready
        if copy is None or self._copier is None:
            return filled, self._pool.lend(filled.buffer)
        return filled, self._copier.receive(*copy)

    def note_queue(self, stats: Stats) -> None:
        """See `ThreadStream.note_queue`."""
        self._ready.note_queue(stats)
        stats.buffers = self._pool.num_made

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            until, pause, failures = time.monotonic() + self._servers.deadline_s, _FIRST_PAUSE_S, 0
            while not self._over.is_set():
                turn = self._turn
                try:
                    if self._receive_all(until):
                        break
                except _UnreachableError as error:
                    if self._turn != turn:
                        until, pause, failures = time.monotonic() + self._servers.deadline_s, _FIRST_PAUSE_S, 0
                    elif time.monotonic() > until:
                        raise DeliveryError(str(error)) from error
                failures += 1
                self._servers.lost()
                if failures >= self._servers.count:  # each has failed since the last batch
                    pause = _paused(pause, self._over)
        except BucketlineError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - delivered to the caller, who raises it
            failure = DeliveryError(f"the receiving thread failed: {type(error).__name__}: {error}")
        self._ready.end(self._turn, failure)

    def _receive_all(self, until: float) -> bool:
        """Receive from one server until the end; return True if that was the iteration's.

        Raises:
            _UnreachableError: if the server is lost, or says that it is stopped; the cursor is at the next micro-batch.
            BucketlineError: if every server refuses the request or cannot read the next batch.
        """
        state = {**(self._wanted.state or {}), "step": self._cursor.step, "micro_step": self._cursor.micro_step}
        sock, answer = self._servers.connected(replace(self._wanted, state=state), until, self._over)
        self._sock = sock
        if self._over.is_set():
            sock.close()
            return True
        with sock:
            frames = FrameReader(sock, min(answer.buffer_bytes, self._pool.buffer_bytes))
            try:
                while (kind := frames.next_kind()) is not FrameKind.END:
                    if kind is FrameKind.FAILURE:
                        self._refused(failure_of(frames.failure()))
                    if kind is FrameKind.BATCH and not self._take(frames):
                        return True
            except (DeliveryError, OSError) as error:
                raise _UnreachableError(str(error)) from error
        return True

    def _refused(self, failure: BucketlineError) -> None:
        """Try the next server, unless all have failed at this batch."""
        self._refusals += 1
        if isinstance(failure, DeliveryError) or self._refusals < self._servers.count:
            raise _UnreachableError(str(failure))
        raise failure

    def _take(self, frames: FrameReader) -> bool:
        """Receive one batch; return False if nobody needs it any more."""
        buffer = self._pool.take()
        try:
            filled = frames.batch(buffer)
        except BaseException:
            self._pool.give_back(buffer)
            raise
        if (filled.step, filled.micro_step) != (self._cursor.step, self._cursor.micro_step):
            self._pool.give_back(buffer)
            expected = f"step {self._cursor.step}, micro-batch {self._cursor.micro_step}"
            raise DeliveryError(f"step {filled.step}, micro-batch {filled.micro_step} came, expected {expected}")
        copy = None
        if self._copier is not None:
            copy = self._copier.copy(filled.buffer, filled.num_bytes, partial(self._pool.give_back, filled.buffer))
        if not self._ready.put(self._turn, (filled, copy)):
            if copy is None:
                self._pool.give_back(buffer)
            return False
        self._turn += 1
        self._refusals = 0
        self._cursor = self._cursor.after(filled.step, filled.micro_step, self._wanted.config.accumulation)
        return True

    def close(self) -> None:
        """End the iteration; the thread is gone when this returns."""
        self._over.set()
        for filled, copy in self._ready.close():
            if copy is None:
                self._pool.give_back(filled.buffer)
        if (sock := self._sock) is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join()
