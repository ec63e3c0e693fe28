"""Batches through shared memory: maps the buffers and pops announced ones. No thread, and no system call while any is ready."""

from __future__ import annotations

import ctypes
import logging
import os
import select
import socket
import time
import weakref
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bucketline.errors import DeliveryError
from bucketline.forks import OwnerProcess
from bucketline.loader.service.control_page import CONTROL_BYTES, FREE, ControlPage, Word, fence
from bucketline.loader.service.layouts import HEAD, filled_as_laid_out
from bucketline.loader.service.shared_memory import HEAD_BYTES, map_shared, stride_of
from bucketline.loader.service.wire import WAKE

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.loader.collate.buffer_pool import FilledBuffer
    from bucketline.loader.prefetch.cuda_copy import CudaCopier
    from bucketline.loader.service.wire import ServiceAnswer
    from bucketline.loader.stats import Stats

log = logging.getLogger(__name__)

_LOOK_MS = 100  # poll interval while waiting: no wake-up can be lost (`fence`), but if one were, this would be the delay
COPIED_AHEAD = 2  # micro-batches being copied to a CUDA device, in addition to the one that is returned


class RingStream:
    """An iteration whose batches a service fills in shared memory."""

    def __init__(self, answer: ServiceAnswer, copier: CudaCopier | None) -> None:
        """Map the control page of the memory that the service has granted."""
        self._sock, self._name, self._copier = answer.sock, answer.name, copier
        self._owner = OwnerProcess()
        self._granted = answer.granted()
        if len(answer.fds) != 1:
            raise DeliveryError(f"the answer of {answer.name} is invalid: it comes with {len(answer.fds)} descriptors")
        (self._fd,) = answer.fds
        self._control = ControlPage(map_shared(self._fd, 0, CONTROL_BYTES))
        self._stride = stride_of(self._granted.buffer_bytes)
        self._buffers: dict[int, NDArray[np.uint8]] = {}
        self._may_register = True
        self._registered: list[NDArray[np.uint8]] = []
        self._taken = self._announced = 0
        self._copied: list[tuple[FilledBuffer, Tensor, torch.cuda.Event]] = []
        self._low_water = self._granted.depth * 3 // 4
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        self._is_closed = False
        answer.fds.clear()  # last: until here, the caller closes it
        self._close_fd = weakref.finalize(self, os.close, self._fd)

    def next(self) -> tuple[FilledBuffer, Tensor] | None:
        """Return the next micro-batch; see `ThreadStream.next`."""
        if self._is_closed:
            return None
        if self._copier is not None:
            return self._next_on_device(self._copier)
        if self._taken == self._announced and not self._wait():
            return None
        filled, number = self._take()
        return filled, torch.from_numpy(self._lend(number))

    def _take(self) -> tuple[FilledBuffer, int]:
        """Pop the next announced micro-batch; return its description and the number of its buffer."""
        words = self._control.words
        number = self._control.announced(self._taken)
        buffer = self._buffers.get(number)
        if buffer is None:
            buffer = self._buffers[number] = self._map(number)
        head = memoryview(buffer)  # type: ignore[arg-type]
        _, *position, length, _ = HEAD.unpack_from(head)
        layout = bytes(head[HEAD.size : min(HEAD.size + length, HEAD_BYTES)])
        try:
            filled = filled_as_laid_out(buffer, position, layout)  # type: ignore[arg-type]
        except (ValueError, TypeError, RecursionError) as error:
            raise DeliveryError(f"{self._name} sent a damaged batch: {error}; is it of the same bucketline?") from error
        if filled.num_bytes > self._granted.buffer_bytes:
            raise DeliveryError(f"{self._name} sent a batch of {filled.num_bytes} bytes in {self._granted.buffer_bytes}")
        self._taken += 1
        words[Word.TAKEN] = self._taken
        fence()
        if words[Word.SERVICE_WAITS] and self._announced - self._taken <= self._low_water:
            self._wake_service()
        return filled, number

    def _map(self, number: int) -> NDArray[np.uint8]:
        buffer = map_shared(self._fd, CONTROL_BYTES + number * self._stride, self._stride)
        if self._copier is not None and self._may_register:
            self._may_register = _register(buffer)
            if self._may_register:
                self._registered.append(buffer)
        return buffer

    def _lend(self, number: int) -> NDArray[np.uint8]:
        """Return a buffer's bytes; the buffer is marked free once they are no longer used. No lock and no system call.

        A forked child maps the same memory, so the end of a batch in the child must not free the parent's buffer.
        """
        lent = np.frombuffer(self._buffers[number], dtype=np.uint8, count=self._granted.buffer_bytes, offset=HEAD_BYTES)
        weakref.finalize(lent, _free, self._control.states, number, self._owner).atexit = False
        return lent

    def _next_on_device(self, copier: CudaCopier) -> tuple[FilledBuffer, Tensor] | None:
        """Start copying the next few ready micro-batches to the device, and return the first."""
        while len(self._copied) <= COPIED_AHEAD:
            if self._taken == self._announced:
                self._announced = self._control.words[Word.ANNOUNCED]
                fence()
            if self._taken == self._announced and (self._copied or not self._wait()):
                break
            filled, number = self._take()
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
                if self._announced != self._taken:
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
                    self._wake_service()
                begun = begun or time.monotonic_ns()
                is_gone = self._is_service_gone()
        finally:
            words[Word.CLIENT_WAITS] = 0
            if begun:
                words[Word.WAITS] += 1
                words[Word.WAITED_US] += (time.monotonic_ns() - begun) // 1000

    def _is_service_gone(self) -> bool:
        if not self._poll.poll(_LOOK_MS):
            return False
        try:
            return not self._sock.recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _wake_service(self) -> None:
        with suppress(OSError):  # if the service is gone, `_wait` notices
            self._sock.send(WAKE, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def note_queue(self, stats: Stats) -> None:
        """See `ThreadStream.note_queue`."""
        self._control.note_queue(stats)
        stats.ready, stats.depth = stats.ready + len(self._copied), self._granted.depth

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
            _unregister(buffer)
        self._registered.clear()
        self._buffers.clear()


def _free(states: memoryview, number: int, owner: OwnerProcess) -> None:
    if owner.is_current:
        states[number] = FREE


def _nothing() -> None: ...


def _register(buffer: NDArray[np.uint8]) -> bool:
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


def _unregister(buffer: NDArray[np.uint8]) -> None:
    cudart: Any = torch.cuda.cudart  # untyped
    cudart().cudaHostUnregister(buffer.ctypes.data)
