"""The lines of batches that are read from object storage: requested far ahead, in the order of the plan.

A batch needs two rounds. The lines of its rows' blocks are requested when it is located; its captions, which are drawn from the
rows, say which text blocks' lines come next. Its copies are planned once all of them are present, and they are held until it
is copied.
"""

from __future__ import annotations

import random
import time
from itertools import islice
from typing import TYPE_CHECKING

from bucketline.errors import StoreError

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable
    from typing import TypeAlias

    from bucketline.loader.collate.batch_builder import BatchBuilder
    from bucketline.loader.collate.window import PendingBatch
    from bucketline.store.remote.cache.batch_lines import LineTable

    _Hold: TypeAlias = Callable[[PendingBatch, LineTable, int], None]

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
            if all(held.wait(is_over=is_over, on_no_room=on_no_room, begun=begun) for held in first.lines):
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

    def close(self, pending: deque[PendingBatch | StoreError]) -> None:
        """Release everything."""
        for batch in pending:
            if not isinstance(batch, StoreError):
                batch.release()
        self._lines.close()


def _is_ready(batch: PendingBatch | StoreError) -> bool:
    return isinstance(batch, StoreError) or all(held.are_ready for held in batch.lines)
