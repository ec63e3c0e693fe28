"""A client of the service: it maps the slabs and takes what is announced. No thread, no system call while steps are ready."""

from __future__ import annotations

import os
import select
import socket
import weakref
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bucketline.errors import DeliveryError
from bucketline.loader.delivery import Supply
from bucketline.loader.service.control import CONTROL_BYTES, FREE, Control, State, Word, fence
from bucketline.loader.service.protocol import WAKE, Granted, Wanted, failure_of, receive, send
from bucketline.loader.service.slabs import HEAD_BYTES, HeadReader, map_shared, stride_of
from bucketline.store.typed_json import TypedJsonError, decode, encode

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.loader.device import CudaCopier
    from bucketline.loader.filler import Filled

ANSWER_S = 600.0  # that the service may take to open a store and plan
_LOOK_MS = 100  # while waiting: no wake-up can be lost (`fence`), and if one were, this is what it would cost
COPIED_AHEAD = 2  # micro-batches whose copies to a CUDA device are under way, beside the one that is given


class Served:
    """An iteration whose batches a service fills."""

    def __init__(self, sock: socket.socket, name: str, wanted: Wanted, copier: CudaCopier | None) -> None:
        """Say what is wanted, and map the control page. `name` says in messages which service it is.

        Raises:
            DeliveryError: where the service ends, or does not grant it.
            BucketlineError: what the service says is wrong.
        """
        self._sock, self._name, self._copier = sock, name, copier
        self._pid = os.getpid()
        send(sock, _as_json(wanted))
        message, fds = receive(sock, ANSWER_S, with_fd=True)
        if "error" in message:
            raise failure_of(message)
        try:
            self._granted = decode(Granted, message)
            (self._fd,) = fds
        except (TypedJsonError, ValueError) as error:
            raise DeliveryError(f"the answer of {name} cannot be understood: {error}") from error
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        self._control = Control(map_shared(self._fd, 0, CONTROL_BYTES))
        self._stride = stride_of(self._granted.slab_bytes)
        self._slabs: dict[int, NDArray[np.uint8]] = {}
        self._heads = HeadReader()
        self._taken = self._announced = 0
        self._copied: list[tuple[Filled, Tensor, torch.cuda.Event]] = []
        self._low_water = self._granted.depth * 3 // 4
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._is_closed = False

    def next(self) -> tuple[Filled, Tensor] | None:
        """Give the next micro-batch; see `Delivery.next`."""
        if self._is_closed:
            return None
        if self._copier is not None:
            return self._next_on_device(self._copier)
        if self._taken == self._announced and not self._wait():
            return None
        filled, number = self._take()
        return filled, torch.from_numpy(self._lend(number))

    def _take(self) -> tuple[Filled, int]:
        """Take what is announced next: what it is, and the number of its slab."""
        words = self._control.words
        number = self._control.announced(self._taken)
        slab = self._slabs.get(number)
        if slab is None:
            slab = self._slabs[number] = self._map(number)
        filled = self._heads.read(memoryview(slab), slab)  # type: ignore[arg-type]
        self._taken += 1
        words[Word.TAKEN] = self._taken
        fence()
        if words[Word.SERVICE_WAITS] and self._announced - self._taken <= self._low_water:
            self._wake_service()
        return filled, number

    def _map(self, number: int) -> NDArray[np.uint8]:
        slab = map_shared(self._fd, CONTROL_BYTES + number * self._stride, self._stride)
        if self._copier is not None:
            _register(slab)
        return slab

    def _lend(self, number: int) -> NDArray[np.uint8]:
        """Lend a slab's bytes; when they are no longer used, the slab's state says so. No lock, and no system call.

        What was forked off has the same memory before it: there, the end of a batch must not free the parent's.
        """
        lent = np.frombuffer(self._slabs[number], dtype=np.uint8, count=self._granted.slab_bytes, offset=HEAD_BYTES)
        weakref.finalize(lent, _free, self._control.states, number, self._pid).atexit = False
        return lent

    def _next_on_device(self, copier: CudaCopier) -> tuple[Filled, Tensor] | None:
        """Begin the copies of the next few that are ready, and give the first."""
        while len(self._copied) <= COPIED_AHEAD:
            if self._taken == self._announced:
                self._announced = self._control.words[Word.ANNOUNCED]
                fence()
            if self._taken == self._announced and (self._copied or not self._wait()):
                break
            filled, number = self._take()
            slab = torch.from_numpy(self._slabs[number])[HEAD_BYTES:]
            self._copied.append(
                (filled, *copier.copy(slab, filled.num_bytes, partial(_free, self._control.states, number, self._pid)))
            )
        if not self._copied:
            return None
        filled, flat, event = self._copied.pop(0)
        return filled, copier.receive(flat, event)

    def _wait(self) -> bool:
        """Wait for an announcement; False at the end.

        Raises:
            BucketlineError: the failure that the service met; a `DeliveryError` where it is gone.
        """
        words, is_gone = self._control.words, False
        words[Word.CLIENT_WAITS] = 1
        try:
            while True:
                fence()
                state = words[Word.STATE]
                fence()
                self._announced = words[Word.ANNOUNCED]
                if self._announced != self._taken:
                    fence()
                    return True
                if state == State.ENDED:
                    return False
                if state == State.FAILED:
                    raise failure_of(self._control.failure())
                if is_gone:
                    raise DeliveryError(
                        f"{self._name} has ended without a word (was it killed?); start it again and iterate again: the next "
                        "iteration goes on at the same batch"
                    )
                if words[Word.SERVICE_WAITS]:
                    self._wake_service()
                is_gone = self._is_service_gone()
        finally:
            words[Word.CLIENT_WAITS] = 0

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
        with suppress(OSError):  # gone, which `_wait` sees
            self._sock.send(WAKE, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def supply(self) -> Supply:
        return Supply(
            ready=self._control.ready() + len(self._copied),
            depth=self._granted.depth,
            slabs=self._control.words[Word.SLABS],
        )

    def close(self) -> None:
        """Leave the service. Batches that are held keep their memory."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._copier is not None and os.getpid() == self._pid:
            self._copier.finish()
        self._sock.close()
        self._close_fd()
        self._copied.clear()
        for slab in self._slabs.values() if self._copier is not None and os.getpid() == self._pid else ():
            _unregister(slab)
        self._slabs.clear()


def _as_json(wanted: Wanted) -> dict[str, object]:
    message = asdict(wanted)
    encoded = encode(message)
    assert isinstance(encoded, dict)
    return dict(encoded)


def _free(states: memoryview, number: int, pid: int) -> None:
    if os.getpid() == pid:
        states[number] = FREE


def _register(slab: NDArray[np.uint8]) -> None:
    """Tell the CUDA driver of memory that it is to copy from, so that it stays in place and copies run beside the host."""
    cudart: Any = torch.cuda.cudart  # untyped
    code = int(cudart().cudaHostRegister(slab.ctypes.data, slab.nbytes, 0))
    if code:
        raise DeliveryError(f"the CUDA driver refuses to register {slab.nbytes} bytes of shared memory: error {code}")


def _unregister(slab: NDArray[np.uint8]) -> None:
    cudart: Any = torch.cuda.cudart  # untyped
    cudart().cudaHostUnregister(slab.ctypes.data)
