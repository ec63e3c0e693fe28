"""One client of the service: the slabs that are filled for it, and the end of its connection."""

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
from bucketline.loader.filling import Filling
from bucketline.loader.service.control import FREE, MAX_SLABS, TAKEN, Control, Word, fence
from bucketline.loader.service.protocol import WAKE, failure_as_json
from bucketline.loader.service.slabs import HEAD_BYTES, HeadWriter, SharedMemory

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.loader.delivery import Beginning
    from bucketline.loader.filler import Filled, Filler
    from bucketline.loader.service.protocol import Wanted

_LOOK_EVERY_S = 0.1  # whether there is room: no wake-up can be lost (`fence`), and if one were, this is what it would cost


class ToClient:
    """The sink of a client: filled slabs are announced in shared memory, in the order of their turns, at most `depth` ahead.

    No thread waits for another's turn: what is filled before it is announced by who fills what was missing.
    """

    def __init__(self, sock: socket.socket, slab_bytes: int, depth: int, *, is_pinned: bool) -> None:
        self._sock, self._depth, self._may_shrink = sock, depth, not is_pinned
        self.memory = SharedMemory(slab_bytes)
        self.control = Control(self.memory.control)
        self._heads = HeadWriter()
        self._slabs: list[NDArray] = []  # type: ignore[type-arg]
        self._number_at: dict[int, int] = {}  # by the address of a slab's tensors
        self._changed = threading.Condition()
        self._filled: dict[int, Filled] = {}  # by turn: those that wait for an earlier one
        self._turn = 0  # that is announced next
        self._end: tuple[int, BaseException | None] | None = None  # the turn from which on nothing comes, and why
        self._waiting = 0  # threads that wait for room
        self._is_over = False
        self.batches = self.bytes = 0
        self.by_bucket: Counter[str] = Counter()  # samples

    def slab(self) -> Tensor:
        """Give a free slab, or another one: this never waits for the client."""
        with self._changed:
            states, num_slabs = self.control.state_bytes, len(self._slabs)
            while self._may_shrink and num_slabs > self._depth + 2 and states[num_slabs - 1] == FREE:
                num_slabs -= 1  # the client held many and let them go
                self._slabs.pop()
                self.memory.remove(num_slabs)
            number = int(states[:num_slabs].argmin()) if num_slabs else 0
            if num_slabs == 0 or states[number] != FREE:
                number = num_slabs
                if number == MAX_SLABS:
                    raise DeliveryError(f"the client holds {MAX_SLABS} batches, as many as there can be; let some go")
                self._slabs.append(self.memory.add(number))
            self.control.words[Word.SLABS] = len(self._slabs)
            fence()
            states[number] = TAKEN
            tensors = torch.from_numpy(self._slabs[number][HEAD_BYTES:])[: self.memory.slab_bytes]
            self._number_at[tensors.data_ptr()] = number
            return tensors

    def put(self, turn: int, filled: Filled) -> bool:
        """Hand over a filled slab, waiting for room; False where nobody takes it any more."""
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
        """Announce what is filled and whose turn it is, and the end; say whether there was any."""
        begun = self._turn
        while (filled := self._filled.pop(self._turn, None)) is not None:
            number = self._number_at[filled.slab.data_ptr()]
            self._heads.write(self._slabs[number], filled)
            self.control.announce(number)
            self._turn += 1
            self.batches += 1
            self.bytes += filled.num_bytes
            self.by_bucket[filled.bucket] += filled.fields[0].shape[0]
        if self._end is not None and self._end[0] == self._turn and not self._is_over:
            self._is_over = True
            failure = self._end[1]
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
        """Tell the client that nothing comes from this turn on; the earliest counts."""
        with self._changed:
            is_news = False
            if not self._is_done(turn):
                self._end = turn, failure
                is_news = self._announce()
            self._changed.notify_all()
        if is_news:
            self._wake_client()

    def look_again(self) -> None:
        """Let threads that wait for room see whether there is some."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Let the threads go."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _wake_client(self) -> None:
        fence()
        if self.control.words[Word.CLIENT_WAITS]:
            with suppress(OSError):  # full of wake-ups that it has not read yet, or gone, which the reading side sees
                self._sock.send(WAKE, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStats:
    """What one client was given."""

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
    ready: int  # filled and not taken yet
    depth: int
    slabs: int
    by_bucket: dict[str, int]  # samples


class Session:
    """A client's connection, from the moment that its request was granted."""

    def __init__(self, sock: socket.socket, wanted: Wanted, filler: Filler, *, depth: int, beginning: Beginning) -> None:
        self.wanted, self._sock, self._depth = wanted, sock, depth
        self._sink = ToClient(sock, filler.slab_bytes, depth, is_pinned=wanted.is_pinned)
        self._filling = Filling(filler, self._sink, beginning, wanted.config.threads)
        self._begun = time.monotonic()
        self._is_closed = False

    @property
    def fd(self) -> int:
        return self._sink.memory.fd

    def run(self) -> None:
        """Fill until the client goes or `stop` is called."""
        self._filling.start()
        try:
            while self._sock.recv(4096):
                self._sink.look_again()
        except OSError:
            pass  # a client that was killed with bytes unread
        finally:
            self._filling.close()
            self._sink.memory.close()

    def stop(self, reason: str) -> None:
        """End the client's iteration with an error, after what is ready; `run` returns soon."""
        self._sink.control.end(failure_as_json(DeliveryError(reason)))
        self._sink.close()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def stats(self) -> SessionStats:
        """Count what was filled so far."""
        seconds, sink = time.monotonic() - self._begun, self._sink
        by_bucket = dict(sink.by_bucket)
        samples = sum(by_bucket.values())
        return SessionStats(
            pid=self.wanted.pid,
            rank=self.wanted.rank,
            world_size=self.wanted.world_size,
            stores=tuple(store.path for store in self.wanted.stores),
            seconds=seconds,
            batches=sink.batches,
            samples=samples,
            bytes=sink.bytes,
            samples_per_s=samples / seconds if seconds else 0.0,
            bytes_per_s=sink.bytes / seconds if seconds else 0.0,
            ready=max(0, sink.control.ready()),
            depth=self._depth,
            slabs=sink.control.words[Word.SLABS],
            by_bucket=by_bucket,
        )
