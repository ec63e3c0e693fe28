"""Batches through shared memory: the buffers, the page of control before them, the service's side and the client's.

The memory is an unnamed file (memfd) that the service creates and the client maps. First comes the control page: numbers that
both exchange without system calls, each written by one side only. To announce a batch, the service writes its buffer's number
into a ring of announcements and then increments the count of announced batches. The client follows with the count of popped
batches. A buffer's state is one byte: the service acquires free buffers, the client frees them. Each buffer has a head that
describes its content, then the bytes of its tensors. The file grows by one buffer if all are in use. The kernel frees it once
no process holds it.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import mmap
import os
import select
import socket
import threading
import time
import weakref
from contextlib import suppress
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bucketline.errors import DeliveryError
from bucketline.forks import OwnerProcess
from bucketline.loader.prefetch.stream import PrefetchThreads, depth_of
from bucketline.loader.service import wire
from bucketline.loader.service.sockets import peer_of
from bucketline.loader.service.wire import HEAD, Client, Response

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.errors import BucketlineError
    from bucketline.loader.collate.batch_builder import BatchBuilder
    from bucketline.loader.collate.buffers import FilledBuffer
    from bucketline.loader.prefetch.stream import CudaCopier, Stats
    from bucketline.loader.service.wire import Answer, Request

log = logging.getLogger(__name__)

MAX_BUFFERS = 1 << 16
FREE, IN_USE = 0, 1
_WORDS, _ANNOUNCEMENTS, _FAILURE_BYTES = 64, 1024, 1 << 16
_ANNOUNCED_AT = 8 * _WORDS
_STATES_AT = _ANNOUNCED_AT + 4 * _ANNOUNCEMENTS
_FAILURE_AT = _STATES_AT + MAX_BUFFERS
CONTROL_BYTES = -(-(_FAILURE_AT + _FAILURE_BYTES) // 4096) * 4096
HEAD_BYTES = 32768  # reserved before each buffer's tensors: 100 bytes for each column and each ragged group's fields
COPIED_AHEAD = 2  # micro-batches being copied to a CUDA device, in addition to the one that is returned
_WAKE = b"\0"  # each byte on the socket after the response means: read the control page again
_LOOK_EVERY_S = 0.1  # poll interval of a side that waits: no wake-up can be lost (`fence`), but if one were, this is the delay
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Word(IntEnum):
    """Index of a number in the control page. Numbers that change often have separate cache lines."""

    ANNOUNCED = 0  # by the service: micro-batches filled so far
    HAS_ENDED = 8  # by the service, after the last announcement
    FAILURE_BYTES = 9  # of the failure's text; 0 if all batches were announced
    BUFFERS = 10  # by the service: number of buffers
    SERVICE_WAITS = 16  # by the service: wake it when there is room
    POPPED = 24  # by the client: micro-batches popped so far
    CLIENT_WAITS = 32  # by the client: wake it when there is news
    WAITS = 33  # by the client: how often it had to wait for a micro-batch
    WAITED_US = 34  # by the client: for how long, in microseconds


def fence() -> None:
    """Issue a memory fence: writes before it become visible to others before writes after it, and likewise for reads.

    It acquires a lock that nobody else has, twice. Each acquire and each release is an atomic operation, and together they
    order the code before and after. On x86 a single one would be enough; 64-bit ARM reorders more. Takes 0.25 us.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


class ControlPage:
    """Access to the control page, for both sides."""

    def __init__(self, page: NDArray[np.uint8]) -> None:
        """Wrap a page. `page`: `[CONTROL_BYTES]` of shared memory, initially zeros."""
        whole = memoryview(page)  # type: ignore[arg-type]
        self.words = whole[: 8 * _WORDS].cast("Q")
        self.states = whole[_STATES_AT:_FAILURE_AT]
        self.state_bytes = page[_STATES_AT:_FAILURE_AT]  # the same, for numpy
        self._announced = whole[_ANNOUNCED_AT:_STATES_AT].cast("I")
        self._failure = whole[_FAILURE_AT : _FAILURE_AT + _FAILURE_BYTES]

    def announce(self, buffer: int) -> None:
        announced = self.words[Word.ANNOUNCED]
        self._announced[announced % _ANNOUNCEMENTS] = buffer
        fence()
        self.words[Word.ANNOUNCED] = announced + 1

    def announced(self, number: int) -> int:
        """Return the buffer of an announced micro-batch, by its index since the iteration's start."""
        return self._announced[number % _ANNOUNCEMENTS]

    def end(self, failure: BaseException | None) -> None:
        """Announce that no more batches will follow, because of a failure if there is one. The first end counts."""
        if self.words[Word.HAS_ENDED]:
            return
        if failure is not None:
            message = wire.failure_as_json(failure)
            text = json.dumps({**message, "message": message["message"][: _FAILURE_BYTES // 16]}).encode()
            self._failure[: len(text)] = text
            self.words[Word.FAILURE_BYTES] = len(text)
        fence()
        self.words[Word.HAS_ENDED] = 1

    def failure(self) -> BucketlineError | None:
        num_bytes = self.words[Word.FAILURE_BYTES]
        return wire.failure_of(json.loads(bytes(self._failure[:num_bytes]))) if num_bytes else None


def stride_of(buffer_bytes: int) -> int:
    return -(-(HEAD_BYTES + buffer_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE


def map_shared(fd: int, offset: int, num_bytes: int) -> NDArray[np.uint8]:
    """Map a part of a file for reading and writing, `[num_bytes]`. Views keep the map. Unlike `mmap`, holds no descriptor."""
    address = _libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise DeliveryError(f"{num_bytes} bytes of shared memory cannot be mapped: {os.strerror(ctypes.get_errno())}")
    buffer = (ctypes.c_uint8 * num_bytes).from_address(address)
    # not at exit: batches may still be in use then
    weakref.finalize(buffer, _libc.munmap, address, num_bytes).atexit = False
    return np.frombuffer(memoryview(buffer), dtype=np.uint8)


class SharedMemory:
    """The service's side of the shared file."""

    def __init__(self, buffer_bytes: int) -> None:
        self.buffer_bytes, self._stride = buffer_bytes, stride_of(buffer_bytes)
        self.fd = os.memfd_create("bucketline-buffers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.close = weakref.finalize(self, os.close, self.fd)  # maps stay until their views are gone
        self._grow(0, CONTROL_BYTES)
        # no client may shrink the file while the service uses it: that would kill the service (SIGBUS)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self.control = map_shared(self.fd, 0, CONTROL_BYTES)

    def add(self, number: int) -> NDArray[np.uint8]:
        """Allocate the memory of a buffer and map it."""
        offset = CONTROL_BYTES + number * self._stride
        self._grow(offset, self._stride)
        return map_shared(self.fd, offset, self._stride)

    def _grow(self, offset: int, num_bytes: int) -> None:
        try:
            os.posix_fallocate(self.fd, offset, num_bytes)
        except OSError as error:
            raise DeliveryError(
                f"not enough memory for another buffer of {num_bytes} bytes, after {offset}: {error.strerror}; use a smaller "
                "`prefetch_bytes`, or hold fewer batches at a time"
            ) from error


class Ring:
    """A client's buffers, the service's side: filled ones are announced in turn, at most `depth` ahead.

    No thread waits for another's turn: a buffer filled early is announced by the thread that fills the missing one.
    """

    def __init__(self, buffer_bytes: int, depth: int, client: Client) -> None:
        self._depth, self._client = depth, client
        self.memory = SharedMemory(buffer_bytes)
        self.control = ControlPage(self.memory.control)
        self._buffers: list[NDArray] = []  # type: ignore[type-arg]
        self._number_at: dict[int, int] = {}  # by the address of a buffer's tensors
        self._changed = threading.Condition()
        self._filled: dict[int, int] = {}  # numbers of buffers by turn, that wait for an earlier one
        self._turn = 0  # the next turn to announce
        self._end: tuple[int, BaseException | None] | None = None  # the first turn that does not come, and why
        self._waiting = 0  # threads that wait for room
        self._is_over = False

    def acquire(self) -> Tensor:
        """Return a free buffer, or a new one if none is free; never waits for the client."""
        with self._changed:
            states, num_buffers = self.control.state_bytes, len(self._buffers)
            number = int(states[:num_buffers].argmin()) if num_buffers else 0
            if num_buffers == 0 or states[number] != FREE:
                number = num_buffers
                if number == MAX_BUFFERS:
                    raise DeliveryError(f"the client holds {MAX_BUFFERS} batches, the maximum; release some")
                self._buffers.append(self.memory.add(number))
            self.control.words[Word.BUFFERS] = len(self._buffers)
            fence()
            states[number] = IN_USE
            tensors = torch.from_numpy(self._buffers[number][HEAD_BYTES:])[: self.memory.buffer_bytes]
            self._number_at[tensors.data_ptr()] = number
            return tensors

    def put(self, turn: int, filled: FilledBuffer, *, more: bool = False) -> bool:
        """Hand over a filled buffer, waiting for room; return False if it is no longer needed. See `Sink.put`."""
        head = wire.head_of(filled, wire.layout_of(filled))
        if len(head) > HEAD_BYTES:
            raise DeliveryError(f"the head of a batch of {filled.bucket} has {len(head)} bytes, more than there is room for")
        with self._changed:
            if not self._has_room(turn):
                self._wake_client()
                self._wait_for_room(turn)
            if self._is_done(turn):
                return False
            number = self._number_at[filled.buffer.data_ptr()]
            memoryview(self._buffers[number])[: len(head)] = head  # type: ignore[arg-type]
            self._filled[turn] = number
            self._client.count(filled)
            is_news = self._announce()
        if is_news and not more:
            self._wake_client()
        return True

    def _is_done(self, turn: int) -> bool:
        return self._is_over or (self._end is not None and turn >= self._end[0])

    def _announce(self) -> bool:
        """Announce the filled buffers whose turn it is, and the end; return whether anything was announced."""
        begun = self._turn
        while (number := self._filled.pop(self._turn, None)) is not None:
            self.control.announce(number)
            self._turn += 1
        if self._end is not None and self._end[0] == self._turn and not self._is_over:
            self._is_over = True
            failure = self._end[1]
            self._client.counts["errors"] += failure is not None
            self.control.end(failure)
            self._changed.notify_all()
            return True
        return self._turn != begun

    def _has_room(self, turn: int) -> bool:
        return turn - self.control.words[Word.POPPED] < self._depth

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

    def release(self, failure: BaseException | None = None) -> None:
        """Release the threads that wait for room; the iteration ends with the failure, if there is one."""
        with self._changed:
            if failure is not None:
                self.control.end(failure)
            self._is_over = True
            self._changed.notify_all()

    def _wake_client(self) -> None:
        fence()
        if self.control.words[Word.CLIENT_WAITS]:
            _wake(self._client.sock)


def _wake(sock: socket.socket) -> None:
    with suppress(OSError):  # if the other side is gone, who waits for it notices
        sock.send(_WAKE, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class RingClient(Client):
    """A client on this machine, as its service sees it."""

    max_clients = max_strangers = 1024

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._ring: Ring | None = None
        self._threads: PrefetchThreads | None = None

    def admit(self) -> None:
        """Refuse processes of other users."""
        if (uid := peer_of(self.sock)) != os.geteuid():
            raise DeliveryError(f"the service belongs to user {os.geteuid()}, you are user {uid}; start your own")

    def begin(self, builder: BatchBuilder, request: Request) -> None:
        """Make the shared memory and send its descriptor."""
        depth = depth_of(builder.config, builder.buffer_bytes)
        self._ring = Ring(builder.buffer_bytes, depth, self)
        self._threads = PrefetchThreads(builder, request.cursor, self._ring)
        self.answer(Response(buffer_bytes=builder.buffer_bytes, depth=depth), self._ring.memory.fd)

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
            self._ring.release(failure)
        self.shut()

    def counted(self) -> Counter[str]:
        """Return the counts so far; the client counts its waits itself, and may write nonsense."""
        if self._ring is not None:
            words = self._ring.control.words
            self.counts["waits"], self.counts["waited_us"] = words[Word.WAITS], words[Word.WAITED_US]
        return self.counts

    def close(self) -> None:
        """End the threads, and close the memory and the connection; keep nothing that maps a store."""
        threads, ring, self._threads, self._ring = self._threads, self._ring, None, None
        if threads is not None:
            threads.close()
        if ring is not None:
            ring.memory.close()
        self.sock.close()


class RingStream:
    """An iteration whose batches a service fills in shared memory. No thread, and no system call while any is ready."""

    def __init__(self, answer: Answer, copier: CudaCopier | None) -> None:
        """Map the control page of the memory that the service sent."""
        self._sock, self._name, self._copier = answer.sock, answer.name, copier
        self._owner = OwnerProcess()
        self._response = answer.response()
        if len(answer.fds) != 1:
            raise DeliveryError(f"the answer of {answer.name} is invalid: it comes with {len(answer.fds)} descriptors")
        (self._fd,) = answer.fds
        self._control = ControlPage(map_shared(self._fd, 0, CONTROL_BYTES))
        self._stride = stride_of(self._response.buffer_bytes)
        self._buffers: dict[int, NDArray[np.uint8]] = {}
        self._may_register = True
        self._registered: list[NDArray[np.uint8]] = []
        self._popped = self._announced = 0
        self._copied: list[tuple[FilledBuffer, Tensor, torch.cuda.Event]] = []
        self._low_water = self._response.depth * 3 // 4
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        self._is_closed = False
        answer.fds.clear()  # last: until here, the caller closes it
        self._close_fd = weakref.finalize(self, os.close, self._fd)

    def next(self) -> tuple[FilledBuffer, Tensor] | None:
        """Return the next micro-batch; see `Stream.next`."""
        if self._is_closed:
            return None
        if self._copier is not None:
            return self._next_on_device(self._copier)
        if self._popped == self._announced and not self._wait():
            return None
        filled, number = self._pop()
        return filled, torch.from_numpy(self._lend(number))

    def _pop(self) -> tuple[FilledBuffer, int]:
        """Pop the next announced micro-batch; return its description and the number of its buffer."""
        words = self._control.words
        number = self._control.announced(self._popped)
        buffer = self._buffers.get(number)
        if buffer is None:
            buffer = self._buffers[number] = self._map(number)
        head = memoryview(buffer)  # type: ignore[arg-type]
        _, *position, length, _ = HEAD.unpack_from(head)
        layout = bytes(head[HEAD.size : min(HEAD.size + length, HEAD_BYTES)])
        try:
            filled = wire.filled_as_laid_out(buffer, position, layout)  # type: ignore[arg-type]
        except (ValueError, TypeError, RecursionError) as error:
            raise DeliveryError(f"{self._name} sent a damaged batch: {error}; is it of the same bucketline?") from error
        if filled.num_bytes > self._response.buffer_bytes:
            raise DeliveryError(f"{self._name} sent a batch of {filled.num_bytes} bytes in {self._response.buffer_bytes}")
        self._popped += 1
        words[Word.POPPED] = self._popped
        fence()
        if words[Word.SERVICE_WAITS] and self._announced - self._popped <= self._low_water:
            _wake(self._sock)
        return filled, number

    def _map(self, number: int) -> NDArray[np.uint8]:
        buffer = map_shared(self._fd, CONTROL_BYTES + number * self._stride, self._stride)
        if self._copier is not None and self._may_register:
            self._may_register = register(buffer)
            if self._may_register:
                self._registered.append(buffer)
        return buffer

    def _lend(self, number: int) -> NDArray[np.uint8]:
        """Return a buffer's bytes; the buffer is marked free once they are no longer used. No lock and no system call.

        A forked child maps the same memory, so the end of a batch in the child must not free the parent's buffer.
        """
        lent = np.frombuffer(self._buffers[number], dtype=np.uint8, count=self._response.buffer_bytes, offset=HEAD_BYTES)
        weakref.finalize(lent, _free, self._control.states, number, self._owner).atexit = False
        return lent

    def _next_on_device(self, copier: CudaCopier) -> tuple[FilledBuffer, Tensor] | None:
        """Start copying the next few ready micro-batches to the device, and return the first."""
        while len(self._copied) <= COPIED_AHEAD:
            if self._popped == self._announced:
                self._announced = self._control.words[Word.ANNOUNCED]
                fence()
            if self._popped == self._announced and (self._copied or not self._wait()):
                break
            filled, number = self._pop()
            buffer = torch.from_numpy(self._buffers[number])[HEAD_BYTES:]
            let_go: Callable[[], None] = partial(_free, self._control.states, number, self._owner)
            if not self._may_register:
                # torch keeps pinned memory for reuse, and reuses none before the copies from it have ended
                buffer = buffer[: filled.num_bytes].pin_memory()
                let_go()
                let_go = _nothing
            self._copied.append((filled, *copier.copy(buffer, filled.num_bytes, let_go)))
        if not self._copied:
            return None
        filled, flat, event = self._copied.pop(0)
        return filled, copier.receive(flat, event)

    def _wait(self) -> bool:
        """Wait for an announcement; return False at the end."""
        words, is_gone, begun = self._control.words, False, 0
        words[Word.CLIENT_WAITS] = 1
        try:
            while True:
                fence()
                has_ended = words[Word.HAS_ENDED]
                fence()
                self._announced = words[Word.ANNOUNCED]
                if self._announced != self._popped:
                    fence()
                    return True
                if has_ended:
                    if (failure := self._control.failure()) is not None:
                        raise failure
                    return False
                if is_gone:
                    raise DeliveryError(
                        f"{self._name} has ended without a message (was it killed?); restart it and iterate again: the next "
                        "iteration continues at the same batch"
                    )
                if words[Word.SERVICE_WAITS]:
                    _wake(self._sock)
                begun = begun or time.monotonic_ns()
                is_gone = self._is_service_gone()
        finally:
            words[Word.CLIENT_WAITS] = 0
            if begun:
                words[Word.WAITS] += 1
                words[Word.WAITED_US] += (time.monotonic_ns() - begun) // 1000

    def _is_service_gone(self) -> bool:
        if not self._poll.poll(1000 * _LOOK_EVERY_S):
            return False
        try:
            return not self._sock.recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def note_queue(self, stats: Stats) -> None:
        """See `Stream.note_queue`."""
        words = self._control.words
        stats.ready = max(0, words[Word.ANNOUNCED] - words[Word.POPPED]) + len(self._copied)
        stats.buffers, stats.waits, stats.depth = words[Word.BUFFERS], words[Word.WAITS], self._response.depth
        stats.is_waiting = bool(words[Word.CLIENT_WAITS])

    def close(self) -> None:
        """Disconnect from the service. Batches still held keep their memory."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._copier is not None and self._owner.is_current:
            self._copier.finish()
        self._sock.close()
        self._close_fd()
        self._copied.clear()
        for buffer in self._registered if self._owner.is_current else ():
            unregister(buffer)
        self._registered.clear()
        self._buffers.clear()


def _free(states: memoryview, number: int, owner: OwnerProcess) -> None:
    if owner.is_current:
        states[number] = FREE


def _nothing() -> None: ...


def register(buffer: NDArray[np.uint8]) -> bool:
    """Register memory with the CUDA driver, so that it stays in place and copies run asynchronously; return if it may be."""
    cudart: Any = torch.cuda.cudart  # untyped
    code = int(cudart().cudaHostRegister(buffer.ctypes.data, buffer.nbytes, 0))
    if code:
        log.warning(
            "the CUDA driver refuses to register %d bytes of shared memory (error %d), as in some containers: batches are "
            "copied twice; allow locked memory (ulimit -l unlimited), or leave out the service",
            buffer.nbytes,
            code,
        )
        _clear_last_error(code)
    return code == 0


def _clear_last_error(code: int) -> None:
    """Clear the runtime's last error of this thread, which torch would raise at its next kernel launch.

    torch's bindings of the runtime lack the function; torch has loaded the runtime for the whole process.
    """
    clear = getattr(ctypes.CDLL(None), "hipGetLastError" if torch.version.hip else "cudaGetLastError", None)
    if clear is None:
        log.warning("the CUDA runtime's last error cannot be cleared: the next CUDA call may report error %d once more", code)
    else:
        clear()


def unregister(buffer: NDArray[np.uint8]) -> None:
    cudart: Any = torch.cuda.cudart  # untyped
    cudart().cudaHostUnregister(buffer.ctypes.data)
