"""Readahead: micro-batches are located and planned many at a time; a cold store's are requested from the disk or the bucket.

A cold batch passes three stages before its copy is planned, each some batches ahead of the next, because each needs what the
one before requested: its rows; the numbers that say where its captions' tokens begin; the tokens.
"""

from __future__ import annotations

import random
import resource
import threading
import time
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from bucketline.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from typing import TypeAlias

    from bucketline.loader.collate.batch_builder import BatchBuilder
    from bucketline.loader.collate.window import CopyPlan, PendingBatch
    from bucketline.store.remote.cache.batch_lines import LineTable

    _Hold: TypeAlias = Callable[[PendingBatch, LineTable, int], None]


# ----------------------------------------------------------------------------------------------------------------- lines ahead
# The lines of batches that are read from object storage: requested far ahead, in the order of the plan.
#
# A batch needs two rounds. The lines of its rows' blocks are requested when it is located; its captions, which are drawn from
# the rows, say which text blocks' lines come next. Its copies are planned once all of them are present, and they are held
# until it is copied.

MAX_PENDING = 512  # micro-batches whose lines are held at most
PENDING_BYTES = 1 << 30  # of these micro-batches
PATIENCE_S = (0.1, 0.6)  # before the first micro-batch's own lines are released too; drawn between these
PAUSE_S = (0.02, 0.3)  # until they are requested again
OTHERS_S = 600.0  # that other processes may leave no room; without them, the deadline counts


class LinesAhead:
    """How many of the pending micro-batches have which of their lines, counted from the first."""

    def __init__(self, builder: BatchBuilder, lines: LineTable) -> None:
        self._builder, self._lines = builder, lines
        self._most = min(MAX_PENDING, max(2, PENDING_BYTES // builder.buffer_bytes))
        self._with_rows = self._with_captions = self.num_ready = 0
        self._popped = 0
        self._gave_way_at = 0.0  # to another process, the last time
        self._is_over = False

    def stop(self) -> None:
        """Let `wait` return, now and later."""
        self._is_over = True
        self._lines.wake()

    def wants_more(self, pending: deque[PendingBatch | StoreError]) -> bool:
        """Return whether more micro-batches should be located and their lines requested: not before the first one is gone."""
        is_all_asked = self._popped > 0 and self._with_rows == len(pending) < self._most
        return is_all_asked and self._lines.held_bytes < self._lines.most_bytes

    def advance(self, pending: deque[PendingBatch | StoreError]) -> None:
        """Request what can be requested now. A micro-batch whose lines cannot be requested is replaced by the error."""
        while self._with_rows < len(pending):
            if self._with_rows and self._lines.held_bytes >= self._lines.most_bytes:
                break
            self._request(pending, self._with_rows, self._builder.hold_rows)
            self._with_rows += 1
        while self._with_captions < self._with_rows and _is_ready(pending[self._with_captions]):
            self._request(pending, self._with_captions, self._builder.hold_captions)
            self._with_captions += 1
        while self.num_ready < self._with_captions and _is_ready(pending[self.num_ready]):
            self.num_ready += 1

    def _request(self, pending: deque[PendingBatch | StoreError], at: int, hold: _Hold) -> None:
        batch = pending[at]
        if isinstance(batch, StoreError):
            return
        try:
            hold(batch, self._lines, self._popped + at)
        except StoreError as error:
            batch.release()
            pending[at] = error

    def wait(self, pending: deque[PendingBatch | StoreError], begun: float) -> bool:
        """Wait for the lines of the first micro-batch that are requested; return False if the iteration is over.

        `begun`: since when the micro-batch is waited for, whose deadline is one for all that it needs. If several processes
        fill one cache, each may hold a part of what its first micro-batch needs, and wait for the others' parts for ever. One
        that gets no room therefore releases all, first the lines of later micro-batches and after a while also those of the
        first, and requests them again after a pause. These times are random, so that not all processes do so at once, and
        do not count for the deadline: another process may keep what it holds while its training pauses.
        """
        first = pending[0]
        assert not isinstance(first, StoreError)
        first_begun, begun = begun, max(begun, self._gave_way_at)
        gives_way_at = time.monotonic() + random.uniform(*PATIENCE_S)  # noqa: S311 - nothing secret
        gives_way = False

        def on_no_room() -> bool:
            nonlocal gives_way
            released = self._release_after(pending, max(1, self._with_rows // 2))
            gives_way = not released and time.monotonic() > gives_way_at
            return released

        def is_over() -> bool:
            return self._is_over or gives_way

        try:
            if all(lines.wait(is_over=is_over, on_no_room=on_no_room, begun=begun) for lines in first.lines):
                return True
        except StoreError as error:
            raise type(error)(f"step {first.step}, bucket {first.bucket.name}: {error}") from error
        if gives_way and not self._is_over:
            self._release_after(pending, 0)
            if time.monotonic() - first_begun < OTHERS_S and self._lines.is_cache_shared:
                self._gave_way_at = time.monotonic()
            time.sleep(random.uniform(*PAUSE_S))  # noqa: S311
        return not self._is_over

    def _release_after(self, pending: deque[PendingBatch | StoreError], keep: int) -> bool:
        """Release the lines of all micro-batches but the first `keep`; return whether there were any."""
        released = False
        for batch in islice(pending, keep, self._with_rows):
            if not isinstance(batch, StoreError):
                released = released or bool(batch.lines)
                batch.release()
        self._with_rows = min(self._with_rows, keep)
        self._with_captions = min(self._with_captions, keep)
        self.num_ready = min(self.num_ready, keep)
        return released

    def pop(self) -> None:
        """Count the first micro-batch as planned and gone."""
        self._popped += 1
        self._with_rows, self._with_captions = max(0, self._with_rows - 1), max(0, self._with_captions - 1)
        self.num_ready = max(0, self.num_ready - 1)

    def close(self) -> None:
        """Close the table of lines; the pending micro-batches were released before."""
        self._lines.close()


def _is_ready(batch: PendingBatch | StoreError) -> bool:
    return isinstance(batch, StoreError) or all(lines.are_ready for lines in batch.lines)


# ------------------------------------------------------------------------------------------------------------------- readahead

WINDOW, WINDOW_ROWS, _MOST_WINDOW = 32, 512, 128  # micro-batches located or planned at once: more of few rows; and at most
AHEAD_BYTES = 8 << 20  # between two stages: 64 requests of 128 KiB; twice as many and more gave less
_MAX_AHEAD = 32  # micro-batches between two stages
FILLED_BYTES, _MAX_FILLED = 1 << 18, 16  # of micro-batches that a thread fills at once, and wakes their reader once
WARM_AFTER = 64  # micro-batches without a read from the disk
COLD_FOR = 8  # of these that one read stands for: a store is cold if more than one in nine micro-batches read


def at_once(buffer_bytes: int) -> int:
    """Return how many micro-batches a thread fills at once: each wake of another thread costs as much as a small one."""
    return min(_MAX_FILLED, max(1, FILLED_BYTES // buffer_bytes))


class ColdDetector:
    """Detects if batches come from the disk, by the kernel's counts of the prefetch threads' block reads and major faults.

    Asking ahead costs a tenth of a hot batch, and at batch size 1 several times as much as one. So it ends after a while
    without reads, and begins again with the first ones, for a while that grows with each: even a cached store has some.
    """

    def __init__(self, *, is_warm: bool = False) -> None:
        """Assume a cold store until counts show otherwise. `is_warm`: the first batch was found in the page cache."""
        # by thread, each updated by itself; what this one has read until now were programs and sidecars
        self._counts = {threading.get_ident(): _reads()}
        self._left = 0 if is_warm else WARM_AFTER

    @property
    def is_cold(self) -> bool:
        return self._left > 0

    def note(self) -> None:
        """Look at this thread's counts after a batch; another thread's begin at 0."""
        thread, count = threading.get_ident(), _reads()
        has_read = count != self._counts.get(thread, 0)
        self._left = min(WARM_AFTER, self._left + COLD_FOR) if has_read else max(0, self._left - 1)
        self._counts[thread] = count


def _reads() -> int:
    usage = resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF))
    return usage.ru_inblock + usage.ru_majflt


class Readahead:
    """Yields the copy plans of an order's micro-batches in turn, each requested from the disk in time if it is cold."""

    def __init__(self, builder: BatchBuilder, order: Iterator[tuple[int, int]]) -> None:
        """`order` yields (step, micro step). It is consumed as far ahead as batches are located."""
        self._builder, self._order = builder, order
        self._ahead = min(_MAX_AHEAD, max(1, AHEAD_BYTES // builder.buffer_bytes))
        self._at_once = at_once(builder.buffer_bytes)
        self._pending: deque[PendingBatch | StoreError] = deque()  # a failure is raised in its turn, after all before it
        self._planned: deque[CopyPlan] = deque()  # of the first of those that are pending
        self._window = 1  # then eight times as many, then all: the first batch does not wait for many
        self._most = min(max(WINDOW, WINDOW_ROWS // builder.most_rows), _MOST_WINDOW)
        self._stages: list[tuple[int, Callable[[PendingBatch], None]]] = [
            (3, builder.ask_rows),  # batches ahead, in units of `_ahead`
            (2, builder.ask_starts),
            (1, builder.ask_tokens),
        ]
        self._asked = [0, 0, 0]  # how many of the pending ones have passed each stage, the first stage's the most
        lines = builder.open_lines()
        self._lines = None if lines is None else LinesAhead(builder, lines)

    def stop(self) -> None:
        """End the iteration soon, also if it waits for lines; for another thread."""
        if self._lines is not None:
            self._lines.stop()

    def __iter__(self) -> Generator[list[CopyPlan], None, None]:
        """Yield the copy plans of the next micro-batches to fill at once: of a cold store only one."""
        try:
            yield from self._copy_plans()
        finally:
            for pending in self._pending:
                if not isinstance(pending, StoreError):
                    pending.release()
            if self._lines is not None:
                self._lines.close()

    def _copy_plans(self) -> Iterator[list[CopyPlan]]:
        begun = time.monotonic()
        self._locate(0)
        if self._pending and not self._have_lines(begun):  # lines that have just arrived are in the page cache
            return
        first = [pending for pending in islice(self._pending, 1) if not isinstance(pending, StoreError)]
        cold = ColdDetector(is_warm=any(map(self._builder.is_resident, first)))  # to treat a cached store as cold is dear
        ahead = 0  # the first batch waits for what it reads itself
        while True:
            is_cold = cold.is_cold
            self._locate(3 * ahead if is_cold else 0)
            if not self._pending or not self._have_lines(begun):
                return
            if is_cold:
                self._ask(ahead)
            if not self._planned:
                self._plan()
            count = 1 if is_cold else min(len(self._planned), self._at_once)
            for _ in range(count):
                if not isinstance(self._pending.popleft(), StoreError) and self._lines is not None:
                    self._lines.pop()
            if self._asked[0]:
                self._asked = [max(0, asked - count) for asked in self._asked]
            yield [self._planned.popleft() for _ in range(count)]
            begun, ahead = time.monotonic(), self._ahead
            cold.note()

    def _locate(self, count: int) -> None:
        """Locate more until more than `count` are."""
        while len(self._pending) <= count:
            pairs = list(islice(self._order, self._window))
            try:
                self._pending.extend(self._builder.locate(pairs))
            except StoreError:
                self._pending.extend(map(self._locate_one, pairs))
            if len(pairs) < self._window:
                return
            self._window = min(8 * self._window, self._most)
            if count == 0 or self._window < self._most:
                return

    def _locate_one(self, pair: tuple[int, int]) -> PendingBatch | StoreError:
        try:
            return self._builder.locate([pair])[0]
        except StoreError as error:
            return error

    def _have_lines(self, begun: float) -> bool:
        """Request lines of the pending ones, and wait for those of the first; return False if the iteration is over.

        `begun`: since when the first one is waited for (`time.monotonic`).
        """
        lines = self._lines
        if lines is None:
            return True
        lines.advance(self._pending)
        if lines.wants_more(self._pending):  # one window a time
            self._locate(len(self._pending))
            lines.advance(self._pending)
        while not lines.num_ready:
            if not lines.wait(self._pending, begun):
                return False
            lines.advance(self._pending)
        return True

    @property
    def _num_ready(self) -> int:
        return len(self._pending) if self._lines is None else self._lines.num_ready

    def _ask(self, ahead: int) -> None:
        for number, (distance, ask) in enumerate(self._stages):
            end = min(distance * ahead + 1, self._num_ready)
            for pending in islice(self._pending, self._asked[number], end):
                if not isinstance(pending, StoreError):
                    with suppress(StoreError):  # raised again when the copy is planned
                        ask(pending)
            self._asked[number] = max(self._asked[number], min(len(self._pending), end))

    def _plan(self) -> None:
        """Plan the copies of the next micro-batches together, as many as have passed the same stages."""
        rows, _, tokens = self._asked
        batches: list[PendingBatch] = []
        for pending in islice(self._pending, min(tokens or rows or self._most, self._num_ready, self._most)):
            if isinstance(pending, StoreError):
                if not batches:
                    raise pending
                break
            batches.append(pending)
        self._planned.extend(self._builder.copy_plans(batches, plainly=rows > 0))
