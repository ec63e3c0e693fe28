"""A bounded buffer between the threads that fill and the one that trains, which ends cleanly from either side.

Several threads fill, each the next micro-batch that nobody fills yet. None waits for another: what is done before its turn
lies ready until the turns before it are taken.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from bucketline.errors import DeliveryError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_LOOK_EVERY_S = 0.5  # while it waits, the taking side sees to it that somebody still fills


class ReorderBuffer(Generic[T]):
    """Items in the order of their turns, at most `depth` at a time. A failure is raised on the taking side, in its place.

    The depth begins at `first_depth`. It is doubled, up to `depth`, when the taking side has to wait after the filling side had
    to wait for room: until then more room would be memory that is touched for nothing.

    While there is an item, taking it takes no lock, and no more do the threads that fill while there is room.
    """

    def __init__(self, depth: int, first_depth: int | None = None) -> None:
        self._max_depth = depth
        self.depth = depth if first_depth is None else min(depth, first_depth)  # at present
        self._items: dict[int, T] = {}  # by turn
        self._taken = 0  # also the turn that is taken next
        self._end: int | None = None  # the turn from which on nothing comes
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._fillers_waiting = 0
        self._was_full = False  # since the depth is what it is, a builder has had to wait for room
        self._taker_waits = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, turn: int, item: T) -> bool:
        """Hand over the item of a turn, from 0 on, waiting for room; False where nobody takes it any more."""
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
        """Say that nothing comes from this turn on, because all is done or because of a failure; the earliest counts."""
        with self._changed:
            if not self._is_over(turn):
                self._end, self._failure = turn, failure
            self._changed.notify_all()

    def take(self, is_filled: Callable[[], bool] = lambda: True) -> T | None:
        """Take the next item, waiting for it; None at the end. `is_filled` says whether there is still a thread that fills.

        Raises:
            BaseException: the failure that ended the filling side.
            DeliveryError: if the filling side is gone without a word.
        """
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
        # in this order, so that Ctrl-C in between leaves no turn that nobody fills and that is waited for
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
            try:
                while not self._changed.wait_for(is_ready, timeout=_LOOK_EVERY_S):
                    if not is_filled() and not is_ready():
                        raise DeliveryError("the threads that fill batches are gone; begin a new iteration")
            finally:
                self._taker_waits = False

    def close(self) -> list[T]:
        """Let the filling side stop, and give what was not taken."""
        with self._changed:
            self._closed = True
            left = list(self._items.values())
            self._items.clear()
            self._changed.notify_all()
        return left
