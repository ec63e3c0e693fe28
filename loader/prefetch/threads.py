"""Prefetch threads: each takes the next micro-batch that no other one has, fills a buffer, and delivers it in its turn."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from bucketline.errors import DeliveryError
from bucketline.loader.prefetch.readahead import Readahead
from bucketline.loader.prefetch.reorder_buffer import ReorderBuffer
from bucketline.loader.prefetch.stream import QueueStats

if TYPE_CHECKING:
    from torch import Tensor

    from bucketline.loader.collate.batch_builder import BatchBuilder
    from bucketline.loader.collate.buffer_pool import BufferPool
    from bucketline.loader.collate.pending import FilledBuffer
    from bucketline.loader.prefetch.cuda_copy import CudaCopier
    from bucketline.loader.prefetch.stream import Cursor

FIRST_DEPTH = 2  # micro-batches filled ahead as long as the caller never has to wait


@dataclass(frozen=True, slots=True)
class _Ready:
    """A filled micro-batch on its way to the caller; on a CUDA device, its bytes there and the event that ends their copy."""

    filled: FilledBuffer
    copy: tuple[Tensor, torch.cuda.Event] | None = None


class _ToCaller:
    """The sink of this process: filled buffers wait for the caller, on a CUDA device with their copies started."""

    def __init__(self, pool: BufferPool, copier: CudaCopier | None, depth: int) -> None:
        self._pool, self._copier = pool, copier
        self._copying = threading.Lock()
        self.ready: ReorderBuffer[_Ready] = ReorderBuffer(depth, FIRST_DEPTH)

    def buffer(self) -> Tensor:
        return self._pool.take()

    def put(self, turn: int, filled: FilledBuffer) -> bool:
        if self._copier is not None:
            with self._copying:
                copy = self._copier.copy(filled.buffer, filled.num_bytes, partial(self._pool.give_back, filled.buffer))
            return self.ready.put(turn, _Ready(filled, copy))
        is_wanted = self.ready.put(turn, _Ready(filled))
        if not is_wanted:
            self._pool.give_back(filled.buffer)
        return is_wanted

    def end(self, turn: int, failure: BaseException | None) -> None:
        self.ready.end(turn, failure)

    def close(self) -> None:
        for left in self.ready.close():
            if left.copy is None:
                self._pool.give_back(left.filled.buffer)


class ThreadStream:
    """An iteration whose batches are filled by threads of this process."""

    def __init__(
        self, builder: BatchBuilder, pool: BufferPool, copier: CudaCopier | None, *, cursor: Cursor, depth: int, threads: int
    ) -> None:
        """Start the threads."""
        self._pool, self._copier = pool, copier
        self._sink = _ToCaller(pool, copier, depth)
        self._filling = PrefetchThreads(builder, self._sink, cursor, threads)
        self._filling.start()

    def next(self) -> tuple[FilledBuffer, Tensor] | None:
        """Return the next micro-batch; see `BatchStream.next`."""
        ready = self._sink.ready.take(self._filling.is_alive)
        if ready is None:
            return None
        if ready.copy is None or self._copier is None:
            return ready.filled, self._pool.lend(ready.filled.buffer)
        return ready.filled, self._copier.receive(*ready.copy)

    def queue_stats(self) -> QueueStats:
        return QueueStats(ready=len(self._sink.ready), depth=self._sink.ready.depth, buffers=self._pool.num_made)

    def close(self) -> None:
        """End the threads."""
        self._filling.close()


class Sink(Protocol):
    """The destination of filled buffers."""

    def buffer(self) -> Tensor:
        """Return a buffer to be filled, `[buffer_bytes]` uint8; never waits."""

    def put(self, turn: int, filled: FilledBuffer) -> bool:
        """Deliver a buffer in its turn, counted from 0, waiting for room. Return False if it is no longer needed."""

    def end(self, turn: int, failure: BaseException | None) -> None:
        """End the delivery before this turn, because all is done or because of a failure."""

    def close(self) -> None:
        """Release the threads that wait for their turn or for room."""


class PrefetchThreads:
    """The threads of one iteration. They hold no reference to the loader, so that a dropped loader ends them."""

    def __init__(self, builder: BatchBuilder, sink: Sink, cursor: Cursor, num_threads: int) -> None:
        self._builder, self._sink = builder, sink
        self._pending = iter(Readahead(builder, cursor.micro_steps()))
        self._order = threading.Lock()  # one thread at a time plans and locates the next one
        self._turn = 0
        self._pid = os.getpid()
        self._started = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._run, name="bucketline-builder", daemon=True) for _ in range(num_threads)]

    def start(self) -> None:
        """Start the threads. Torch's own number of threads is unchanged when this returns.

        Raises:
            DeliveryError: if the system refuses to start another thread; those already started have ended then.
        """
        num_threads = torch.get_num_threads()
        _RUNNING.add(self)
        try:
            for number, thread in enumerate(self._threads):
                try:
                    thread.start()
                except RuntimeError as error:
                    self.close()
                    count = f"{number} of {len(self._threads)}"
                    raise DeliveryError(
                        f"only {count} prefetch threads could be started: {error}; use fewer threads, or end other processes"
                    ) from error
                self._started.acquire()
        finally:
            torch.set_num_threads(num_threads)

    def is_alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Close the sink; the threads have ended when this returns. A forked process never had them."""
        if os.getpid() != self._pid:
            return
        self._sink.close()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        # One thread that copies is enough, and torch's own pool belongs to the trainer. The setting is this thread's,
        # and the default of threads to come, which `start` puts back. Torch takes that default in a thread's first call that
        # could be shared out, whatever was set before: so it is asked first, which counts as one.
        torch.get_num_threads()
        torch.set_num_threads(1)
        self._started.release()
        while self._fill_one():
            pass

    def _fill_one(self) -> bool:
        """Fill the next micro-batch; return False if there is none left."""
        turn = None
        try:
            with self._order:
                turn, self._turn = self._turn, self._turn + 1
                pending = next(self._pending, None)
            if pending is not None:
                return self._sink.put(turn, self._builder.fill(self._sink.buffer(), pending))
            failure: BaseException | None = None
        except Exception as error:  # noqa: BLE001 - passed to the caller, who raises it
            failure = error
        except BaseException as error:  # noqa: BLE001 - what is meant for this thread must not end the caller's too
            failure = DeliveryError(f"a prefetch thread was ended by {error!r}; start a new iteration")
        self._sink.end(self._turn if turn is None else turn, failure)
        return False


_RUNNING: weakref.WeakSet[PrefetchThreads] = weakref.WeakSet()
os.register_at_fork(after_in_child=_RUNNING.clear)  # their threads are not in the child


@atexit.register
def _end_all() -> None:
    """End every prefetch thread before the interpreter exits: one that is inside torch then would abort the process."""
    for filling in list(_RUNNING):
        filling.close()
