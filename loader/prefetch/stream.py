"""Prefetch: threads fill buffers, a reorder buffer delivers them in turn, CUDA copies run on a side stream; statistics."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

import torch

from bucketline.errors import DeliveryError
from bucketline.forks import JoinableThread, OwnerProcess
from bucketline.loader.collate.buffers import BufferPool
from bucketline.loader.prefetch.ahead import Readahead, at_once

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from bucketline.loader.collate.batch_builder import BatchBuilder
    from bucketline.loader.collate.buffers import FilledBuffer
    from bucketline.loader.collate.window import CopyPlan
    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.plan.epoch_steps import Cursor
    from bucketline.store.remote.cache.fetch import FetchStats


# ----------------------------------------------------------------------------------------------------------------------- stats
# Statistics of an iteration: what was delivered, and how long was waited.


@dataclass(slots=True, kw_only=True)
class Stats:
    """Counts of a loader's present or last iteration; see `Loader.stats`."""

    seconds: float = 0.0  # from the first `next()` to the end of the last
    batches: int = 0  # micro-batches consumed by the caller
    samples: int = 0
    bytes: int = 0  # of their tensors
    waits: int = 0  # for a micro-batch that was not ready, since reading ahead began
    waited_s: float = 0.0  # of the seconds, inside `next()`
    is_waiting: bool = False  # at this moment
    ready: int = 0  # micro-batches filled and not yet consumed
    depth: int = 0  # micro-batches that are filled ahead at present; grows if the caller had to wait
    buffers: int = 0  # allocated so far: ready, held by the caller or free
    by_bucket: dict[str, int] = field(default_factory=dict)  # samples
    fetched: tuple[FetchStats, ...] = ()  # of each store in object storage that this process reads, since it was opened
    begun: float | None = field(default=None, repr=False, compare=False)  # by `time.perf_counter`

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def waited(self) -> float:
        """The fraction of the time that the caller waited."""
        return self.waited_s / self.seconds if self.seconds else 0.0

    def count(self, filled: FilledBuffer, since: float) -> None:
        """Count a micro-batch that is delivered now, for which the caller has waited `since` then."""
        samples = filled.fields[0].shape[0]
        self.batches += 1
        self.samples += samples
        self.bytes += filled.num_bytes
        self.by_bucket[filled.bucket] = self.by_bucket.get(filled.bucket, 0) + samples
        now = time.perf_counter()
        if self.begun is None:
            self.begun = since
        self.seconds = now - self.begun
        self.waited_s += now - since

    def copy(self, fetched: tuple[FetchStats, ...] = ()) -> Stats:
        """Return a copy that counts no more."""
        return replace(self, by_bucket=dict(sorted(self.by_bucket.copy().items())), fetched=fetched)


# -------------------------------------------------------------------------------------------------------------- reorder buffer
# A bounded reorder buffer between the prefetch threads and the training thread; either side can end it cleanly.
#
# Each prefetch thread fills the next micro-batches that no other one fills. None waits for another: a micro-batch that is
# finished early stays in the buffer until the turns before it are popped.

T = TypeVar("T")

_LOOK_EVERY_S = 0.5  # while it waits, the consumer checks that a prefetch thread is still alive


class ReorderBuffer(Generic[T]):
    """Items in the order of their turns, at most `depth` at a time. A failure is raised for the consumer, in its turn.

    The depth begins at `first_depth`. It is doubled, up to `depth`, when the consumer has to wait after the producers had to
    wait for room: until then, more room would only be memory touched for nothing.

    `pop` needs no lock while the next item is ready, and `put` needs none while there is room.
    """

    def __init__(self, depth: int, first_depth: int | None = None) -> None:
        self._max_depth = depth
        self.depth = depth if first_depth is None else min(depth, first_depth)  # at present
        self._items: dict[int, T] = {}  # by turn
        self._next = 0  # the turn that is popped next
        self._end: int | None = None  # the first turn that will have no item
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._producers_waiting = 0
        self._was_full = False  # a producer had to wait for room since the depth last changed
        self._consumer_waits, self._waits = False, 0  # the consumer, now; and how often it had to
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def note_queue(self, stats: Stats) -> None:
        """Set how much is ready at this moment, and how often the consumer had to wait."""
        stats.ready, stats.depth, stats.waits, stats.is_waiting = len(self), self.depth, self._waits, self._consumer_waits

    def put(self, turn: int, item: T, *, more: bool = False) -> bool:
        """Add the item of a turn, counted from 0, waiting for room; see `Sink.put`."""
        if turn >= self._next + self.depth:
            with self._changed:
                self._producers_waiting += 1
                self._was_full = True
                self._changed.notify_all()
                try:
                    self._changed.wait_for(lambda: self._is_over(turn) or turn < self._next + self.depth)
                finally:
                    self._producers_waiting -= 1
        if self._is_over(turn):
            return False
        self._items[turn] = item
        if self._consumer_waits and not more and self._next in self._items:
            with self._changed:
                self._changed.notify_all()
        return True

    def _is_over(self, turn: int) -> bool:
        return self._closed or (self._end is not None and turn >= self._end)

    def end(self, turn: int, failure: BaseException | None = None) -> None:
        """End the items before this turn, because all are done or because of a failure; the earliest end counts."""
        with self._changed:
            if not self._is_over(turn):
                self._end, self._failure = turn, failure
            self._changed.notify_all()

    def pop(self, is_filled: Callable[[], bool] = lambda: True) -> T | None:
        """Wait for the next item and return it; None at the end. `is_filled` tells whether a producer is still alive."""
        if self._closed:
            return None
        if self._next not in self._items:
            self._wait(is_filled)
        turn = self._next
        item = self._items.get(turn)
        if item is None:
            if self._failure is not None and not self._closed:
                raise self._failure from None
            return None
        # in this order, so that Ctrl-C in between leaves no turn that is awaited and that nobody fills
        self._next = turn + 1
        self._items.pop(turn, None)
        if self._producers_waiting and len(self._items) <= self.depth // 2:  # they fill several then
            with self._changed:
                self._changed.notify_all()
        return item

    def _wait(self, is_filled: Callable[[], bool]) -> None:
        def is_ready() -> bool:
            return self._next in self._items or self._is_over(self._next)

        with self._changed:
            if self._was_full and self.depth < self._max_depth:
                self._was_full, self.depth = False, min(2 * self.depth, self._max_depth)
            self._consumer_waits = True
            self._waits += 1
            try:
                while not self._changed.wait_for(is_ready, timeout=_LOOK_EVERY_S):
                    if not is_filled() and not is_ready():
                        raise DeliveryError("the prefetch threads are gone; start a new iteration")
            finally:
                self._consumer_waits = False

    def close(self) -> list[T]:
        """Release waiting producers, and return the items that were not taken."""
        with self._changed:
            self._closed = True
            left = list(self._items.values())
            self._items.clear()
            self._changed.notify_all()
        return left


# ------------------------------------------------------------------------------------------------------------------- cuda copy
# Copying a filled buffer to a CUDA device on a side stream, with events and without a global synchronise.


class CudaCopier:
    """Copies pinned buffers to a device and releases each buffer once its copy is done.

    The filling thread calls `copy`, one call at a time; the training thread calls `receive`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in_flight: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()

    def copy(self, buffer: Tensor, num_bytes: int, let_go: Callable[[], None]) -> tuple[Tensor, torch.cuda.Event]:
        """Start copying the first `num_bytes` of a pinned buffer; return the device's bytes and the event that ends the copy.

        A later `copy` or `finish` calls `let_go` once the buffer may be overwritten.
        """
        self._let_go()
        # The thread's current device is 0: leaving the stream alone would make a context on it, half a GB for each rank.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            flat.copy_(buffer[:num_bytes], non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._in_flight.append((event, let_go))
        return flat, event

    def receive(self, flat: Tensor, event: torch.cuda.Event) -> Tensor:
        """Make the current stream wait for the copy, and record with the allocator that this stream uses the memory."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        flat.record_stream(stream)
        return flat

    def finish(self) -> None:
        """Wait for the copies in flight. Their sources may be freed afterwards."""
        while self._in_flight:
            event, let_go = self._in_flight.popleft()
            event.synchronize()
            let_go()

    def _let_go(self) -> None:
        while self._in_flight and self._in_flight[0][0].query():  # type: ignore[no-untyped-call]
            self._in_flight.popleft()[1]()


# --------------------------------------------------------------------------------------------------------------------- threads

MIN_DEPTH, _MAX_DEPTH = 2, 64  # micro-batches


def depth_of(config: LoaderConfig, buffer_bytes: int) -> int:
    """Return how many micro-batches of `buffer_bytes` each are filled ahead at most."""
    return min(max(config.prefetch_bytes // buffer_bytes, MIN_DEPTH), _MAX_DEPTH)


class Sink(Protocol):
    """The place that filled buffers go to: a `Stream` of this process, or a `Ring` that another process reads."""

    def acquire(self) -> Tensor:
        """Return a buffer to fill, `[buffer_bytes]` uint8; never waits."""

    def put(self, turn: int, filled: FilledBuffer, *, more: bool = False) -> bool:
        """Deliver the buffer of a turn, counted from 0; waits for room. Return False if nobody needs it any more.

        `more`: the reader need not wake before the next turn's, which comes soon from the same thread.
        """

    def end(self, turn: int, failure: BaseException | None) -> None:
        """End the batches before this turn, because all are done or because of a failure; the earliest such turn counts."""

    def release(self) -> None:
        """Release the threads that wait for room; nothing is delivered any more."""


class Fillers(Protocol):
    """The threads that fill a stream: `PrefetchThreads`, or the one that receives from a service over TCP."""

    def is_alive(self) -> bool: ...

    def close(self) -> None: ...


class PrefetchThreads:
    """The threads of one iteration. They know nothing of the loader, so that a dropped loader ends them."""

    def __init__(self, builder: BatchBuilder, cursor: Cursor, sink: Sink) -> None:
        self._builder, self._sink = builder, sink
        self._readahead = Readahead(builder, cursor.micro_steps(builder.config.accumulation))
        self._copy_plans = self._readahead.__iter__()
        self._order = threading.Lock()  # what comes next is located and planned by one thread at a time
        self._next_turn = 0
        self._owner = OwnerProcess()
        self._started = threading.Semaphore(0)
        self._threads = [JoinableThread(self._run, name="bucketline-builder") for _ in range(builder.config.threads)]

    def start(self) -> None:
        """Start the threads. The number of torch's own threads is unchanged when this returns."""
        num_threads = torch.get_num_threads()
        _RUNNING.add(self)
        try:
            for number, thread in enumerate(self._threads):
                try:
                    thread.start()
                except RuntimeError as error:
                    count = f"{number} of {len(self._threads)}"
                    raise DeliveryError(
                        f"only {count} prefetch threads could be started: {error}; use fewer threads, or end other processes"
                    ) from error
                self._started.acquire()
        except BaseException:  # Ctrl-C too: nobody else knows of the threads that have started, which would wait for room
            self.close()
            raise
        finally:
            torch.set_num_threads(num_threads)

    def is_alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """End the iteration; the threads are gone when this returns. A forked child has none. Batches held stay valid."""
        if not self._owner.is_current:
            return
        self._sink.release()
        self._readahead.stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        if threading.current_thread() not in self._threads:
            self._copy_plans.close()

    def _run(self) -> None:
        # One thread that copies is enough, and torch's own pool belongs to the trainer. The setting is this thread's and the
        # default of later threads, which `start` restores. Torch reads that default at a thread's first call that could be
        # divided, whatever was set before; the first line is such a call.
        torch.get_num_threads()
        torch.set_num_threads(1)
        self._started.release()
        while self._fill_some():
            pass

    def _fill_some(self) -> bool:
        """Fill the next micro-batches, one or a few small ones; return False if there is nothing more to do."""
        turn = None
        copy_plans: list[CopyPlan] = []
        try:
            with self._order:
                turn, self._next_turn = self._next_turn, self._next_turn + 1
                copy_plans = next(self._copy_plans, copy_plans)
                self._next_turn += max(len(copy_plans) - 1, 0)
            while copy_plans:
                filled = self._builder.fill(self._sink.acquire(), copy_plans[0])
                copy_plans.pop(0).batch.release()  # and its window's arrays are not held while this waits for room
                if not self._sink.put(turn, filled, more=bool(copy_plans)):
                    return False
                turn += 1
                if not copy_plans:
                    return True
            failure: BaseException | None = None
        except Exception as error:  # noqa: BLE001 - delivered to the caller, who raises it
            failure = error
        except BaseException as error:  # noqa: BLE001 - what is meant for this thread must not end the caller's too
            failure = DeliveryError(f"a prefetch thread was ended by {error!r}; start a new iteration")
        finally:
            for copy_plan in copy_plans:
                copy_plan.batch.release()
        self._sink.end(self._next_turn if turn is None else turn, failure)
        return False


_RUNNING: weakref.WeakSet[PrefetchThreads] = weakref.WeakSet()
os.register_at_fork(after_in_child=_RUNNING.clear)  # their threads are not in the child


@atexit.register
def _end_all() -> None:
    """End every prefetch thread before the interpreter exits: one that is inside torch then would abort the process."""
    for threads in list(_RUNNING):
        threads.close()


# ---------------------------------------------------------------------------------------------------------------------- stream
# The caller's end of an iteration: filled buffers, and their copies on a CUDA device, each waiting for its turn.

_Ready: TypeAlias = "tuple[FilledBuffer, tuple[Tensor, torch.cuda.Event] | None]"  # with the copy on a CUDA device
FIRST_DEPTH = 2  # of what is filled at once, ahead as long as the caller never has to wait


class Buffers:
    """A loader's buffers, made by its first iteration in each process: a parent's stay the parent's."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._made_for = device, (-1, -1)

    def get(self, buffer_bytes: int, num_buffers: int) -> tuple[BufferPool, CudaCopier | None]:
        """Return buffers of `buffer_bytes`, and what copies them to the device."""
        if self._made_for != (os.getpid(), buffer_bytes):
            on_cuda = self._device.type == "cuda"
            self._pool = BufferPool(buffer_bytes, num_buffers, pinned=on_cuda)
            self._copier = CudaCopier(self._device) if on_cuda else None
            self._made_for = os.getpid(), buffer_bytes  # last: after a failure or Ctrl-C above, the next iteration makes them
        return self._pool, self._copier


class Stream:
    """One iteration's micro-batches, of which at most `depth` are filled ahead; a copy to the device begins at once.

    Threads of this process fill them: prefetch threads read a store (`read_ahead`), or one receives from a service over TCP.
    """

    def __init__(self, buffers: Buffers, buffer_bytes: int, depth: int, num_threads: int) -> None:
        """Fill nothing yet: `fillers` does, to whom this is the sink."""
        self.fillers: Fillers | None = None
        self.pool, self._copier = buffers.get(buffer_bytes, depth + 1 + num_threads)
        self._copying = threading.Lock()
        self._ready: ReorderBuffer[_Ready] = ReorderBuffer(depth, FIRST_DEPTH * at_once(buffer_bytes))

    def next(self) -> tuple[FilledBuffer, Tensor] | None:
        """Return the next micro-batch and its bytes on the caller's device, `[buffer_bytes]` uint8; None at the end."""
        if (ready := self._ready.pop(self.is_alive)) is None:
            return None
        filled, copy = ready
        if copy is None or self._copier is None:
            return filled, self.pool.lend(filled.buffer)
        return filled, self._copier.receive(*copy)

    def note_queue(self, stats: Stats) -> None:
        """Set what is ready at this moment, and how often the caller had to wait since the stream began."""
        self._ready.note_queue(stats)
        stats.buffers = self.pool.num_made

    def close(self) -> None:
        """End the iteration; its threads are gone when this returns. Batches held stay valid."""
        if self.fillers is not None:
            self.fillers.close()
            self.fillers = None  # they know this stream, and hold maps of the stores

    def is_alive(self) -> bool:
        return self.fillers is not None and self.fillers.is_alive()

    def acquire(self) -> Tensor:
        return self.pool.acquire()

    def put(self, turn: int, filled: FilledBuffer, *, more: bool = False) -> bool:
        if self._copier is not None:
            with self._copying:
                copy = self._copier.copy(filled.buffer, filled.num_bytes, partial(self.pool.release, filled.buffer))
            return self._ready.put(turn, (filled, copy), more=more)
        is_needed = self._ready.put(turn, (filled, None), more=more)
        if not is_needed:
            self.pool.release(filled.buffer)
        return is_needed

    def end(self, turn: int, failure: BaseException | None) -> None:
        self._ready.end(turn, failure)

    def release(self) -> None:
        """Let no more be delivered, and return the buffers that the caller has not popped to the pool."""
        for filled, copy in self._ready.close():
            if copy is None:
                self.pool.release(filled.buffer)


def read_ahead(builder: BatchBuilder, buffers: Buffers, cursor: Cursor) -> Stream:
    """Return a stream from a position, that prefetch threads fill; they are started."""
    depth = depth_of(builder.config, builder.buffer_bytes)
    stream = Stream(buffers, builder.buffer_bytes, depth, builder.config.threads)
    stream.fillers = prefetch = PrefetchThreads(builder, cursor, stream)
    prefetch.start()
    return stream
