"""Batches over TCP: a thread receives them into the memory that they are used in, a few ahead of the caller."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from bucketline.errors import BucketlineError, DeliveryError
from bucketline.forks import OwnerProcess
from bucketline.joinable_thread import JoinableThread
from bucketline.loader.prefetch.delivery import Delivery
from bucketline.loader.prefetch.threads import depth_of
from bucketline.loader.service.frames import FrameReader
from bucketline.loader.service.layouts import FrameKind
from bucketline.loader.service.links import Search
from bucketline.loader.service.sockets import shut
from bucketline.loader.service.wire import LostError, message_of

if TYPE_CHECKING:
    from torch import Tensor

    from bucketline.loader.collate.buffer_pool import FilledBuffer
    from bucketline.loader.prefetch.delivery import Buffers
    from bucketline.loader.service.links import Servers
    from bucketline.loader.service.wire import Request, ServiceAnswer
    from bucketline.loader.stats import Stats


class FrameStream:
    """An iteration whose batches a server sends; if it is lost, the next one continues at the same batch."""

    def __init__(self, servers: Servers, wanted: Request, answer: ServiceAnswer, buffers: Buffers) -> None:
        """Begin to receive from the server that has answered."""
        self._servers, self._wanted = servers, wanted
        buffer_bytes = answer.granted().buffer_bytes
        depth = depth_of(wanted.config, buffer_bytes)
        self._delivery = Delivery(buffers, buffer_bytes, depth + 2, depth)
        self._owner, self._over = OwnerProcess(), threading.Event()
        self._sock = answer.sock
        self._turn = 0
        self._refusals = 0  # failures that servers have told, since the last batch
        self._thread = JoinableThread(self._run, args=(answer,), name="bucketline-receiver")
        self._thread.start()

    def next(self) -> tuple[FilledBuffer, Tensor] | None:
        """Return the next micro-batch and its bytes on the caller's device; see `ThreadStream.next`."""
        return self._delivery.take(self._thread.is_alive)

    def note_queue(self, stats: Stats) -> None:
        """See `ThreadStream.note_queue`."""
        self._delivery.note_queue(stats)

    def _run(self, answer: ServiceAnswer) -> None:
        failure: BaseException | None = None
        try:
            self._receive(answer)
        except BucketlineError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - delivered to the caller, who raises it
            failure = DeliveryError(f"the receiving thread failed: {type(error).__name__}: {error}")
        self._delivery.end(self._turn, failure)

    def _receive(self, first: ServiceAnswer) -> None:
        """Receive until the end, from one server after another."""
        answer: ServiceAnswer | None = first
        search = Search(self._servers, self._over)
        while not self._over.is_set():
            turn = self._turn
            try:
                answer = answer or search.ask(message_of(self._wanted))
                reached = time.monotonic()
                try:
                    self._receive_all(answer)
                    return
                finally:
                    search.until += time.monotonic() - reached  # the deadline is of the time without a server
            except (LostError, OSError) as error:
                if self._turn != turn:
                    search = Search(self._servers, self._over)
                search.turn(error)
            answer = None

    def _receive_all(self, answer: ServiceAnswer) -> None:
        """Receive from one server until the iteration's end."""
        self._sock = sock = answer.sock
        with sock:
            if self._over.is_set():
                return
            frames = FrameReader(sock, min(answer.granted().buffer_bytes, self._delivery.pool.buffer_bytes))
            while (kind := frames.next_kind()) is not FrameKind.END:
                if kind is FrameKind.BATCH and not self._take(frames):
                    return
            if (failure := frames.failure()) is not None:
                self._refused(failure)

    def _refused(self, failure: BucketlineError) -> None:
        """Try the next server, unless all have failed at this batch."""
        self._refusals += 1
        if isinstance(failure, DeliveryError) or self._refusals < len(self._servers.addresses):
            raise LostError(str(failure))
        raise failure

    def _take(self, frames: FrameReader) -> bool:
        """Receive one batch; return False if nobody needs it any more."""
        pool, cursor = self._delivery.pool, self._wanted.cursor
        buffer = self._delivery.acquire()
        try:
            filled = frames.batch(buffer)
            if (filled.step, filled.micro_step) != (cursor.step, cursor.micro_step):
                expected = f"step {cursor.step}, micro-batch {cursor.micro_step}"
                raise LostError(f"step {filled.step}, micro-batch {filled.micro_step} came, expected {expected}")
        except BaseException:
            pool.give_back(buffer)
            raise
        if not self._delivery.put(self._turn, filled):
            return False
        self._turn += 1
        self._refusals = 0
        after = cursor.after(filled.step, filled.micro_step, self._wanted.config.accumulation)
        self._wanted = replace(self._wanted, cursor=after)
        return True

    def close(self) -> None:
        """End the iteration; the thread is gone when this returns. A forked child has none."""
        if not self._owner.is_current:
            return
        self._over.set()
        self._delivery.close()
        shut(self._sock)
        if self._thread is not threading.current_thread():
            self._thread.join()
