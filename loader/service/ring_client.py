"""A client on this machine, as its service sees it: a connection, and buffers in shared memory that are filled for it."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from bucketline.errors import DeliveryError
from bucketline.loader.prefetch.threads import PrefetchThreads, depth_of
from bucketline.loader.service.client_connection import Client
from bucketline.loader.service.control_page import FREE, MAX_SLABS, TAKEN, ControlPage, Word, fence
from bucketline.loader.service.layouts import LayoutWriter
from bucketline.loader.service.shared_memory import HEAD_BYTES, SharedMemory
from bucketline.loader.service.sockets import peer_of
from bucketline.loader.service.wire import WAKE, Response
from bucketline.loader.stats import Stats

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.loader.collate.batch_builder import BatchBuilder
    from bucketline.loader.collate.buffer_pool import FilledBuffer
    from bucketline.loader.service.wire import Request

_LOOK_EVERY_S = 0.1  # poll interval for room: no wake-up can be lost (`fence`), but if one were, this would be the delay


class Ring:
    """A client's buffers in shared memory: filled ones are announced there, in turn, at most `depth` ahead.

    No thread waits for another's turn: a buffer filled early is announced by the thread that fills the missing one.
    """

    def __init__(self, sock: socket.socket, buffer_bytes: int, *, depth: int, is_pinned: bool) -> None:
        self._sock, self._depth, self._may_shrink = sock, depth, not is_pinned
        self.memory = SharedMemory(buffer_bytes)
        self.control = ControlPage(self.memory.control)
        self._layouts = LayoutWriter()
        self._buffers: list[NDArray] = []  # type: ignore[type-arg]
        self._number_at: dict[int, int] = {}  # by the address of a buffer's tensors
        self._changed = threading.Condition()
        self._filled: dict[int, FilledBuffer] = {}  # by turn: buffers that wait for an earlier one
        self._turn = 0  # the next turn to announce
        self._end: tuple[int, BaseException | None] | None = None  # the first turn that does not come, and why
        self._waiting = 0  # threads that wait for room
        self._is_over = False
        self._counts = Stats(begun=time.perf_counter())

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
            self._write_head(memoryview(self._buffers[number]), filled)  # type: ignore[arg-type]
            self.control.announce(number)
            self._turn += 1
            self._counts.count(filled)
        if self._end is not None and self._end[0] == self._turn and not self._is_over:
            self._is_over = True
            failure = self._end[1]
            self._counts.errors += failure is not None
            self.control.end(failure)
            self._changed.notify_all()
            return True
        return self._turn != begun

    def _write_head(self, buffer: memoryview, filled: FilledBuffer) -> None:
        head = self._layouts.head(filled, self._layouts.encoded(filled))
        if len(head) > HEAD_BYTES:
            raise DeliveryError(f"the head of a batch of {filled.bucket} has {len(head)} bytes, more than there is room for")
        buffer[: len(head)] = head

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

    def stats(self) -> Stats:
        """Return what was announced so far: the client counts its waits itself, in the shared page."""
        with self._changed:
            counts = self._counts.until_now()
        self.control.note_queue(counts)
        counts.waited_s, counts.depth = self.control.words[Word.WAITED_US] / 1e6, self._depth
        return counts

    def look_again(self) -> None:
        """Wake the threads that wait for room, so that they check again."""
        with self._changed:
            self._changed.notify_all()

    def close(self, failure: BaseException | None = None) -> None:
        """Release the threads that wait for room; the iteration ends with the failure, if there is one."""
        with self._changed:
            if failure is not None:
                self.control.end(failure)
            self._is_over = True
            self._changed.notify_all()

    def _wake_client(self) -> None:
        fence()
        if self.control.words[Word.CLIENT_WAITS]:
            with suppress(OSError):  # full of unread wake-ups, or closed, which the reading side notices
                self._sock.send(WAKE, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class RingClient(Client):
    """A client on this machine."""

    max_clients = max_strangers = 1024

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._ring: Ring | None = None
        self._threads: PrefetchThreads | None = None

    def admit(self) -> None:
        """Refuse processes of other users."""
        self._pid, uid = peer_of(self.sock)
        if uid != os.geteuid():
            raise DeliveryError(f"the service belongs to user {os.geteuid()}, you are user {uid}; start your own")

    def begin(self, builder: BatchBuilder, wanted: Request) -> dict[str, Any]:
        """Make the shared memory and send its descriptor; return who the client is."""
        depth = depth_of(builder.config, builder.buffer_bytes)
        self._ring = Ring(self.sock, builder.buffer_bytes, depth=depth, is_pinned=wanted.is_pinned)
        self._threads = PrefetchThreads(builder, wanted.cursor, self._ring)
        self.answer(asdict(Response(buffer_bytes=builder.buffer_bytes, depth=depth)), self._ring.memory.fd)
        return {"pid": self._pid}

    def run(self) -> None:
        """Fill buffers until the client leaves or `stop` is called."""
        assert self._threads is not None
        assert self._ring is not None
        try:
            self._threads.start()
            while self.sock.recv(4096):
                self._ring.look_again()
        except DeliveryError as error:
            self.stop(error)
        except OSError:
            pass  # a client that was killed with bytes unread

    def stop(self, failure: DeliveryError) -> None:
        """End the client's iteration with the failure after the ready batches; `run` returns soon."""
        if self._ring is not None:
            self._ring.close(failure)
        self.shut()

    def close(self) -> None:
        """End the threads, and close the memory and the connection; keep nothing that maps a store."""
        threads, ring, self._threads, self._ring = self._threads, self._ring, None, None
        if threads is not None:
            threads.close()
        if ring is not None:
            ring.memory.close()
        self.sock.close()

    def stats(self) -> Stats:
        """Return the statistics so far."""
        assert self._ring is not None
        return self._ring.stats()
