"""A bounded reorder buffer between the prefetch threads and the training thread; either side can end it cleanly.

Each prefetch thread fills the next micro-batch that no other one fills. None waits for another: a micro-batch that is finished
early stays in the buffer until the turns before it are taken.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from bucketline.errors import DeliveryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.loader.stats import Stats

T = TypeVar("T")

_LOOK_EVERY_S = 0.5  # while it waits, the consumer checks that a prefetch thread is still alive


class ReorderBuffer(Generic[T]):
    """Items in the order of their turns, at most `depth` at a time. A failure is raised for the consumer, in its turn.

    The depth begins at `first_depth`. It is doubled, up to `depth`, when the consumer has to wait after the producers had to
    wait for room: until then, more room would only be memory touched for nothing.

    `take` needs no lock while the next item is ready, and `put` needs none while there is room.
    """

    def __init__(self, depth: int, first_depth: int | None = None) -> None:
        self._max_depth = depth
        self.depth = depth if first_depth is None else min(depth, first_depth)  # at present
        self._items: dict[int, T] = {}  # by turn
        self._taken = 0  # also the turn that is taken next
        self._end: int | None = None  # the first turn that will have no item
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._fillers_waiting = 0
        self._was_full = False  # a producer had to wait for room since the depth last changed
        self._taker_waits, self._waits = False, 0  # the consumer, now; and how often it had to
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def note_queue(self, stats: Stats) -> None:
        """Set how much is ready at this moment, and how often the consumer had to wait."""
        stats.ready, stats.depth, stats.waits, stats.is_waiting = len(self), self.depth, self._waits, self._taker_waits

    def put(self, turn: int, item: T) -> bool:
        """Add the item of a turn, counted from 0, waiting for room. Return False if it is no longer needed."""
        if turn >= self._taken + self.depth:
            with self._changed:
                self._fillers_waiting += 1
                self._was_full = True
                try:
                    self._changed.wait_for(lambda: self._is_over(turn) or turn < self._taken + self.depth)
                finally:
                    self._fillers_waiting -= 1
        if self._is_over(turn):
            return False
        self._items[turn] = item
        if self._taker_waits and turn == self._taken:
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

    def take(self, is_filled: Callable[[], bool] = lambda: True) -> T | None:
        """Wait for the next item and return it; None at the end. `is_filled` tells whether a producer is still alive."""
        if self._closed:
            return None
        if self._taken not in self._items:
            self._wait(is_filled)
        turn = self._taken
        item = self._items.get(turn)
        if item is None:
            if self._failure is not None and not self._closed:
                raise self._failure from None
            return None
        # in this order, so that Ctrl-C in between leaves no turn that is awaited and that nobody fills
        self._taken = turn + 1
        self._items.pop(turn, None)
        if self._fillers_waiting:
            with self._changed:
                self._changed.notify_all()
        return item

    def _wait(self, is_filled: Callable[[], bool]) -> None:
        def is_ready() -> bool:
            return self._taken in self._items or self._is_over(self._taken)

        with self._changed:
            if self._was_full and self.depth < self._max_depth:
                self._was_full, self.depth = False, min(2 * self.depth, self._max_depth)
            self._taker_waits = True
            self._waits += 1
            try:
                while not self._changed.wait_for(is_ready, timeout=_LOOK_EVERY_S):
                    if not is_filled() and not is_ready():
                        raise DeliveryError("the prefetch threads are gone; start a new iteration")
            finally:
                self._taker_waits = False

    def close(self) -> list[T]:
        """Release waiting producers, and return the items that were not taken."""
        with self._changed:
            self._closed = True
            left = list(self._items.values())
            self._items.clear()
            self._changed.notify_all()
        return left
