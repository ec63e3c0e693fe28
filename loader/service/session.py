"""A session of the service: one client's connection and the buffers that are filled for it."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bucketline.errors import DeliveryError
from bucketline.loader.prefetch.threads import PrefetchThreads
from bucketline.loader.service.control_page import FREE, MAX_SLABS, TAKEN, ControlPage, Word, fence
from bucketline.loader.service.protocol import WAKE, failure_as_json
from bucketline.loader.service.shared_memory import HEAD_BYTES, HeadWriter, SharedMemory

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.loader.collate.batch_builder import BatchBuilder
    from bucketline.loader.collate.buffer_pool import FilledBuffer
    from bucketline.loader.plan.cursor import Cursor
    from bucketline.loader.service.protocol import Request

_LOOK_EVERY_S = 0.1  # poll interval for room: no wake-up can be lost (`fence`), but if one were, this would be the delay


class ClientThreads(PrefetchThreads):
    """The threads of a client's iteration: filled buffers are announced in shared memory, in turn, at most `depth` ahead.

    No thread waits for another's turn: a buffer filled early is announced by the thread that fills the missing one.
    """

    def __init__(self, sock: socket.socket, builder: BatchBuilder, cursor: Cursor, *, depth: int, is_pinned: bool) -> None:
        super().__init__(builder, cursor)
        self._sock, self._depth, self._may_shrink = sock, depth, not is_pinned
        self.memory = SharedMemory(builder.buffer_bytes)
        self.control = ControlPage(self.memory.control)
        self._heads = HeadWriter()
        self._buffers: list[NDArray] = []  # type: ignore[type-arg]
        self._number_at: dict[int, int] = {}  # by the address of a buffer's tensors
        self._changed = threading.Condition()
        self._filled: dict[int, FilledBuffer] = {}  # by turn: buffers that wait for an earlier one
        self._turn = 0  # the next turn to announce
        self._end: tuple[int, BaseException | None] | None = None  # the first turn that does not come, and why
        self._waiting = 0  # threads that wait for room
        self._is_over = False
        self.batches = self.bytes = self.errors = 0
        self.by_bucket: Counter[str] = Counter()  # samples

    def acquire(self) -> Tensor:
        """Return a free buffer, or a new one if none is free; never waits for the client."""
        with self._changed:
            states, num_buffers = self.control.state_bytes, len(self._buffers)
            while self._may_shrink and num_buffers > self._depth + 2 and states[num_buffers - 1] == FREE:
                num_buffers -= 1  # the client held many and has freed them
                self._buffers.pop()
                self.memory.remove(num_buffers)
            number = int(states[:num_buffers].argmin()) if num_buffers else 0
            if num_buffers == 0 or states[number] != FREE:
                number = num_buffers
                if number == MAX_SLABS:
                    raise DeliveryError(f"the client holds {MAX_SLABS} batches, the maximum; release some")
                self._buffers.append(self.memory.add(number))
            self.control.words[Word.SLABS] = len(self._buffers)
            fence()
            states[number] = TAKEN
            tensors = torch.from_numpy(self._buffers[number][HEAD_BYTES:])[: self.memory.buffer_bytes]
            self._number_at[tensors.data_ptr()] = number
            return tensors

    def put(self, turn: int, filled: FilledBuffer) -> bool:
        """Hand over a filled buffer, waiting for room; return False if it is no longer needed."""
        with self._changed:
            if not self._has_room(turn):
                self._wait_for_room(turn)
            if self._is_done(turn):
                return False
            self._filled[turn] = filled
            is_news = self._announce()
        if is_news:
            self._wake_client()
        return True

    def _is_done(self, turn: int) -> bool:
        return self._is_over or (self._end is not None and turn >= self._end[0])

    def _announce(self) -> bool:
        """Announce the filled buffers whose turn it is, and the end; return whether anything was announced."""
        begun = self._turn
        while (filled := self._filled.pop(self._turn, None)) is not None:
            number = self._number_at[filled.buffer.data_ptr()]
            self._heads.write(self._buffers[number], filled)
            self.control.announce(number)
            self._turn += 1
            self.batches += 1
            self.bytes += filled.num_bytes
            self.by_bucket[filled.bucket] += filled.fields[0].shape[0]
        if self._end is not None and self._end[0] == self._turn and not self._is_over:
            self._is_over = True
            failure = self._end[1]
            self.errors += failure is not None
            self.control.end(None if failure is None else failure_as_json(failure))
            self._changed.notify_all()
            return True
        return self._turn != begun

    def _has_room(self, turn: int) -> bool:
        return turn - self.control.words[Word.TAKEN] < self._depth

    def _wait_for_room(self, turn: int) -> None:
        self._waiting += 1
        self.control.words[Word.SERVICE_WAITS] = 1
        fence()
        while not self._is_done(turn) and not self._has_room(turn):
            self._changed.wait(_LOOK_EVERY_S)
        self._waiting -= 1
        self.control.words[Word.SERVICE_WAITS] = int(self._waiting > 0)

    def end(self, turn: int, failure: BaseException | None) -> None:
        """Announce that the iteration ends before this turn; the earliest such turn counts."""
        with self._changed:
            is_news = False
            if not self._is_done(turn):
                self._end = turn, failure
                is_news = self._announce()
            self._changed.notify_all()
        if is_news:
            self._wake_client()

    def look_again(self) -> None:
        """Wake the threads that wait for room, so that they check again."""
        with self._changed:
            self._changed.notify_all()

    def release(self) -> None:
        """Release the threads that wait for room."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _wake_client(self) -> None:
        fence()
        if self.control.words[Word.CLIENT_WAITS]:
            with suppress(OSError):  # full of unread wake-ups, or closed, which the reading side notices
                self._sock.send(WAKE, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStats:
    """Statistics of one client."""

    pid: int
    rank: int
    world_size: int
    stores: tuple[str, ...]
    seconds: float
    batches: int  # micro-batches filled
    samples: int
    bytes: int
    samples_per_s: float
    bytes_per_s: float
    waits: int  # of the client for a micro-batch that was not ready, as it counts them
    waited_s: float
    is_waiting: bool  # at this moment
    errors: int  # 1 if the iteration ended with an error
    ready: int  # filled and not yet popped
    depth: int
    buffers: int
    by_bucket: dict[str, int]  # samples


class Session:
    """A client's connection, from the moment that its request is accepted."""

    def __init__(
        self, sock: socket.socket, wanted: Request, builder: BatchBuilder, *, stores: tuple[str, ...], depth: int
    ) -> None:
        """Begin nothing yet. `stores` are the names of what the client reads, as the service knows them."""
        self.wanted, self._stores, self._sock, self._depth = wanted, stores, sock, depth
        self._threads = ClientThreads(sock, builder, wanted.cursor, depth=depth, is_pinned=wanted.is_pinned)
        self._begun = time.monotonic()
        self._is_closed = False

    @property
    def fd(self) -> int:
        return self._threads.memory.fd

    def run(self) -> None:
        """Fill buffers until the client leaves or `stop` is called."""
        try:
            self._threads.start()
            while self._sock.recv(4096):
                self._threads.look_again()
        except DeliveryError as error:
            self.stop(str(error))
        except OSError:
            pass  # a client that was killed with bytes unread
        finally:
            self._threads.close()
            self._threads.memory.close()

    def stop(self, reason: str) -> None:
        """End the client's iteration with an error after the ready batches; `run` returns soon."""
        self._threads.control.end(failure_as_json(DeliveryError(reason)))
        self._threads.release()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def stats(self) -> SessionStats:
        """Return the statistics so far."""
        seconds, threads = time.monotonic() - self._begun, self._threads
        by_bucket = dict(threads.by_bucket)
        samples = sum(by_bucket.values())
        return SessionStats(
            pid=self.wanted.pid,
            rank=self.wanted.rank,
            world_size=self.wanted.world_size,
            stores=self._stores,
            seconds=seconds,
            batches=threads.batches,
            samples=samples,
            bytes=threads.bytes,
            samples_per_s=samples / seconds if seconds else 0.0,
            bytes_per_s=threads.bytes / seconds if seconds else 0.0,
            waits=threads.control.words[Word.WAITS],
            waited_s=threads.control.words[Word.WAITED_US] / 1e6,
            is_waiting=bool(threads.control.words[Word.CLIENT_WAITS]),
            errors=threads.errors,
            ready=max(0, threads.control.ready()),
            depth=self._depth,
            buffers=threads.control.words[Word.SLABS],
            by_bucket=by_bucket,
        )
