"""Prefetch threads: each fills a buffer with the next micro-batch that no other has, and delivers it in its turn."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

import torch

from bucketline.errors import DeliveryError
from bucketline.forks import OwnerProcess
from bucketline.joinable_thread import JoinableThread
from bucketline.loader.prefetch.delivery import Delivery
from bucketline.loader.prefetch.readahead import Readahead

if TYPE_CHECKING:
    from torch import Tensor

    from bucketline.loader.collate.batch_builder import BatchBuilder
    from bucketline.loader.collate.buffer_pool import FilledBuffer
    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.plan.epoch_steps import Cursor
    from bucketline.loader.prefetch.delivery import Buffers
    from bucketline.loader.stats import Stats

MIN_DEPTH, _MAX_DEPTH = 2, 64  # micro-batches


def depth_of(config: LoaderConfig, buffer_bytes: int) -> int:
    """Return how many micro-batches of `buffer_bytes` each are filled ahead at most."""
    return min(max(config.prefetch_bytes // buffer_bytes, MIN_DEPTH), _MAX_DEPTH)


class Sink(Protocol):
    """The place that filled buffers go to: the caller in this process (`Delivery`), or another process."""

    def acquire(self) -> Tensor:
        """Return a buffer to fill, `[buffer_bytes]` uint8; never waits."""

    def put(self, turn: int, filled: FilledBuffer) -> bool:
        """Deliver the buffer of a turn, counted from 0; waits for room. Return False if nobody needs it any more."""

    def end(self, turn: int, failure: BaseException | None) -> None:
        """End the batches before this turn, because all are done or because of a failure; the earliest such turn counts."""

    def close(self) -> None:
        """Release the threads that wait for room; nothing is delivered any more."""


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
        """Return whether a thread still runs."""
        return any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """End the iteration; the threads are gone when this returns. A forked child has none. Batches held stay valid."""
        if not self._owner.is_current:
            return
        self._sink.close()
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
        while self._fill_one():
            pass

    def _fill_one(self) -> bool:
        """Fill the next micro-batch; return False if there is nothing more to do."""
        turn = None
        try:
            with self._order:
                turn, self._next_turn = self._next_turn, self._next_turn + 1
                copy_plan = next(self._copy_plans, None)
            if copy_plan is not None:
                try:
                    filled = self._builder.fill(self._sink.acquire(), copy_plan)
                finally:
                    copy_plan.batch.release()
                del copy_plan  # or its window's arrays would be held while this waits for room
                return self._sink.put(turn, filled)
            failure: BaseException | None = None
        except Exception as error:  # noqa: BLE001 - delivered to the caller, who raises it
            failure = error
        except BaseException as error:  # noqa: BLE001 - what is meant for this thread must not end the caller's too
            failure = DeliveryError(f"a prefetch thread was ended by {error!r}; start a new iteration")
        self._sink.end(self._next_turn if turn is None else turn, failure)
        return False


_RUNNING: weakref.WeakSet[PrefetchThreads] = weakref.WeakSet()
os.register_at_fork(after_in_child=_RUNNING.clear)  # their threads are not in the child


@atexit.register
def _end_all() -> None:
    """End every prefetch thread before the interpreter exits: one that is inside torch then would abort the process."""
    for threads in list(_RUNNING):
        threads.close()


class ThreadStream(PrefetchThreads):
    """An iteration whose batches are filled by threads of this process."""

    def __init__(self, builder: BatchBuilder, buffers: Buffers, cursor: Cursor) -> None:
        """Start the threads."""
        depth = depth_of(builder.config, builder.buffer_bytes)
        self._delivery = Delivery(buffers, builder.buffer_bytes, depth + 1 + builder.config.threads, depth)
        super().__init__(builder, cursor, self._delivery)
        self.start()

    def next(self) -> tuple[FilledBuffer, Tensor] | None:
        """Return the next micro-batch and its bytes on the caller's device, `[buffer_bytes]` uint8; None at the end."""
        return self._delivery.take(self.is_alive)

    def note_queue(self, stats: Stats) -> None:
        """Set what is ready at this moment, and how often the caller had to wait since the stream began."""
        self._delivery.note_queue(stats)

    def release(self) -> None:
        """Let no more be delivered; the threads end soon."""
        self._delivery.close()
