"""Threads that fill ahead: each takes the next micro-batch that nobody fills yet, and hands it over in its turn."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

import torch

from bucketline.errors import DeliveryError
from bucketline.loader.lookahead import Lookahead

if TYPE_CHECKING:
    from torch import Tensor

    from bucketline.loader.delivery import Beginning
    from bucketline.loader.filler import Filled, Filler


class Sink(Protocol):
    """Where filled slabs go."""

    def slab(self) -> Tensor:
        """Give a slab to be filled, `[slab_bytes]` uint8; never waits."""

    def put(self, turn: int, filled: Filled) -> bool:
        """Hand over, waiting for the turn (from 0 on) and for room; False where nobody takes any more."""

    def end(self, turn: int, failure: BaseException | None) -> None:
        """Say that nothing comes from this turn on, because all is done or because of a failure."""

    def close(self) -> None:
        """Let the threads go that wait for their turn or for room."""


class Filling:
    """The threads of one iteration. They know nothing of the loader, so that a dropped loader ends them."""

    def __init__(self, filler: Filler, sink: Sink, beginning: Beginning, num_threads: int) -> None:
        self._filler, self._sink = filler, sink
        self._coming = iter(Lookahead(filler, beginning.micro_steps()))
        self._order = threading.Lock()  # what comes next, and where it lies, is found by one thread at a time
        self._turn = 0
        self._pid = os.getpid()
        self._started = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._run, name="bucketline-filler", daemon=True) for _ in range(num_threads)]

    def start(self) -> None:
        """Start the threads. Torch's own are as many as before when this returns."""
        num_threads = torch.get_num_threads()
        _RUNNING.add(self)
        try:
            for thread in self._threads:
                thread.start()
                self._started.acquire()
        finally:
            torch.set_num_threads(num_threads)

    def is_alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Close the sink; the threads are gone when this returns. In a process that was forked off they never were."""
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
        """Fill the next micro-batch; False where there is nothing more to do."""
        turn = None
        try:
            with self._order:
                turn, self._turn = self._turn, self._turn + 1
                coming = next(self._coming, None)
            if coming is not None:
                return self._sink.put(turn, self._filler.fill(self._sink.slab(), coming))
            failure: BaseException | None = None
        except Exception as error:  # noqa: BLE001 - handed to the caller, who raises it
            failure = error
        except BaseException as error:  # noqa: BLE001 - what is meant for this thread must not end the caller's too
            failure = DeliveryError(f"a thread that fills batches was ended by {error!r}; begin a new iteration")
        self._sink.end(self._turn if turn is None else turn, failure)
        return False


_RUNNING: weakref.WeakSet[Filling] = weakref.WeakSet()
os.register_at_fork(after_in_child=_RUNNING.clear)  # their threads are not in the child


@atexit.register
def _end_all() -> None:
    """End every filling thread before the interpreter goes: one that is inside torch then would abort the process."""
    for filling in list(_RUNNING):
        filling.close()
