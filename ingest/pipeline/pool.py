"""Work ahead, in the order of the items, in threads and by reads of object storage; and the stage that is the bottleneck."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from bucketline.errors import BucketlineError
from bucketline.forks import JoinableThread
from bucketline.ingest.images.crop import RejectedError
from bucketline.ingest.sources.objects import ObjectSource
from bucketline.ingest.sources.tar import TarSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType

    from bucketline.ingest.partners.partner import SampleReader
    from bucketline.ingest.sources.source import Source, SourceItem


T = TypeVar("T")
R = TypeVar("R")

NICE = 19  # lowest priority: work ahead yields to the work at hand
_POLL_S = 0.2  # how soon an interrupt is noticed while no result is ready


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLimits:
    """Limits on work in flight, from fetching an item to returning its result."""

    num_threads: int
    items: int
    num_bytes: int  # as counted by the pool's `num_bytes`; one item is always allowed
    in_bursts: Callable[[], bool] = lambda: False
    """True if work is to be done only while the caller waits for a result, and then until the limits are reached."""


class OrderedPool(Generic[T, R]):
    """Runs a function over items in threads, as far ahead as `WorkLimits` allows.

    A separate thread iterates over the items, so that a slow source does not block the workers.
    """

    def __init__(self, items: Iterable[T], work: Callable[[T], R], num_bytes: Callable[[T], int], room: WorkLimits) -> None:
        """`num_bytes` returns the memory that an item takes while in flight; nothing runs before `with` is entered."""
        self._items, self._work, self._num_bytes, self._room = items, work, num_bytes, room
        self._pool = ThreadPoolExecutor(room.num_threads, thread_name_prefix="ahead", initializer=_yield_to_others)
        self._feeder = JoinableThread(self._feed, name="ahead-items")
        self._changed = threading.Condition()
        self._running: deque[tuple[T, Future[R], int]] = deque()
        self._bytes = 0
        self._is_over = self._is_closed = self._is_full = False
        self._may_work = threading.Event()
        self._may_work.set()
        self._failure: BaseException | None = None

    def __enter__(self) -> OrderedPool[T, R]:
        self._feeder.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._may_work.set()
        # do not wait for a feeder that is blocked on a stalled stream: it holds no work
        self._feeder.join(timeout=_POLL_S)
        self._pool.shutdown(wait=True, cancel_futures=True)

    def results(self, check: Callable[[], None]) -> Iterator[tuple[T, Future[R]]]:
        """Yield each item with its finished future, in order. `check` is called while waiting and may raise."""
        while True:
            with self._changed:
                while not self._is_next_ready():
                    if not self._running and self._is_over:
                        if self._failure is not None:
                            raise self._failure
                        return
                    self._changed.wait(_POLL_S)
                    check()
                item, future, num_bytes = self._running.popleft()
                self._bytes -= num_bytes
                self._changed.notify_all()
            yield item, future
            check()

    def _feed(self) -> None:
        try:
            for item in self._items:
                num_bytes = self._num_bytes(item)
                with self._changed:
                    while not (self._is_closed or self._has_room(num_bytes)):
                        self._is_full = True
                        self._changed.wait()
                    if self._is_closed:
                        return
                    self._is_full = False
                    future = self._pool.submit(self._when_allowed, item)
                    self._running.append((item, future, num_bytes))
                    self._bytes += num_bytes
                future.add_done_callback(self._note)
        except BaseException as error:  # noqa: BLE001 - raised in `results`
            self._failure = error
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _is_next_ready(self) -> bool:
        """Return True if the next result may be returned. In bursts, start a burst if it is missing, and wait for its end."""
        if not self._room.in_bursts():
            return bool(self._running) and self._running[0][1].done()
        if self._may_work.is_set():
            is_end = (self._is_full or self._is_over) and all(future.done() for _, future, _ in reversed(self._running))
            if is_end and self._running:
                self._may_work.clear()
                return True
            return False
        if self._running and self._running[0][1].done():
            return True
        self._may_work.set()
        return False

    def _when_allowed(self, item: T) -> R:
        self._may_work.wait()
        return self._work(item)

    def _has_room(self, num_bytes: int) -> bool:
        if not self._running:
            return True
        return len(self._running) < self._room.items and self._bytes + num_bytes <= self._room.num_bytes

    def _note(self, _: Future[R]) -> None:
        with self._changed:
            self._changed.notify_all()


def _yield_to_others() -> None:
    """Lower this thread's priority, so that work ahead does not slow down the work at hand."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


# ------------------------------------------------------------------------------------------------------------------ read ahead

REQUESTS = 32  # at a time; each waits for a round trip most of the time
MOST_BYTES = 256 << 20  # of files that are read and not taken yet
_GUESSED_BYTES = 1 << 20  # of a file of which the size is not known yet
_MOST_THREADS = 4  # that read headers of local files; more do not help


def num_header_threads(source: Source) -> int:
    """Return how many threads are to read headers of a source at a time."""
    return REQUESTS if _as_remote(source) is not None else min(_MOST_THREADS, os.cpu_count() or 1)


def read_ahead(
    source: Source, items: Iterable[SourceItem], will_read: Callable[[SourceItem], bool], files: SampleReader
) -> Iterator[SourceItem]:
    """Yield items in order; of a source in object storage, those that `will_read` holds for come with their bytes.

    An item that cannot be read comes without: reading it again says why.
    """
    remote = _as_remote(source)
    if remote is None:
        yield from items
        return

    def fetched(item: SourceItem) -> SourceItem:
        try:
            if item.held is not None or not will_read(item):
                return item
            return files.with_partners_held(remote.fetched(item)) if item.partners else remote.fetched(item)
        except (BucketlineError, RejectedError):
            return item

    room = WorkLimits(num_threads=REQUESTS, items=2 * REQUESTS, num_bytes=MOST_BYTES)
    with OrderedPool(items, fetched, lambda item: remote.known_bytes(item) or _GUESSED_BYTES, room) as ahead:
        for _, future in ahead.results(lambda: None):
            yield future.result()


def _as_remote(source: Source) -> ObjectSource | TarSource | None:
    if isinstance(source, ObjectSource) or (isinstance(source, TarSource) and source.is_remote):
        return source
    return None


# ----------------------------------------------------------------------------------------------------------------- stage timer

DECODE, ENCODE, WRITE = "decode", "encode", "write"
HELD_UP = 0.1  # share of the time spent waiting for a stage, above which that stage is the slowest
HELD_UP_ON_SHARED_CORES = 0.5  # higher: there, decoding takes its time from encoding anyway
FADE_S = 10.0  # time constant: older measurements count for little


class StageTimer:
    """Time that the encoding thread spends waiting for decoded images, encoding, and waiting for the writer."""

    def __init__(self, *, on_shared_cores: Callable[[], bool]) -> None:
        """`on_shared_cores`: whether the encoders run on the same cores as the decoders, once they are loaded."""
        self.on_shared_cores = on_shared_cores
        self.seconds = dict.fromkeys((DECODE, ENCODE, WRITE), 0.0)  # waiting, encoding, waiting
        self._recent = dict(self.seconds)

    @contextmanager
    def spent(self, stage: str) -> Iterator[None]:
        """Add the time spent inside the `with` block to a stage."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - begin)

    def each(self, stage: str, items: Iterator[T]) -> Iterator[T]:
        """Yield items, and add the time spent waiting for each to a stage."""
        while True:
            with self.spent(stage):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item

    def add(self, stage: str, seconds: float) -> None:
        self.seconds[stage] += seconds
        kept = max(0.0, 1.0 - seconds / FADE_S)
        for name in self._recent:
            self._recent[name] *= kept
        self._recent[stage] += seconds

    @property
    def slowest(self) -> str:
        """The stage that is currently the bottleneck."""
        return slowest_of(self._recent, on_shared_cores=self.on_shared_cores())


def slowest_of(seconds: dict[str, float], *, on_shared_cores: bool) -> str:
    """Return the slowest stage, judged by how the encoding thread spent its time.

    >>> slowest_of({"decode": 0.5, "encode": 3.0, "write": 0.1}, on_shared_cores=False)
    'decode'
    >>> slowest_of({"decode": 0.5, "encode": 3.0, "write": 0.1}, on_shared_cores=True)
    'encode'
    """
    limit = (HELD_UP_ON_SHARED_CORES if on_shared_cores else HELD_UP) * sum(seconds.values())
    waited = max((DECODE, WRITE), key=lambda stage: seconds.get(stage, 0.0))
    return waited if seconds.get(waited, 0.0) > limit else ENCODE
