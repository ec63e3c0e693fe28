"""A bounded queue between the threads that fill and the one that trains, which ends cleanly from either side.

Several threads fill, each the next micro-batch that nobody fills yet; each hands over in its turn, so that the order is kept.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from bucketline.errors import DeliveryError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_LOOK_EVERY_S = 0.5  # while it waits, the taking side sees to it that somebody still fills


class Handover(Generic[T]):
    """Items in the order of their turns, at most `depth` at a time. A failure is raised on the taking side, in its place.

    While there are items, taking one takes no lock, and no more do the threads that fill while there is room.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._turn = 0
        self._fillers_waiting = 0
        self._taker_waits = False
        self._closed = False
        self._ended = False
        self._failure: BaseException | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, turn: int, item: T) -> bool:
        """Hand an item over, waiting for its turn (from 0 on) and for room; False where nobody takes any more."""
        if turn != self._turn or len(self._items) >= self.depth:
            with self._changed:
                self._fillers_waiting += 1
                try:
                    self._changed.wait_for(lambda: self._is_over or (turn == self._turn and len(self._items) < self.depth))
                finally:
                    self._fillers_waiting -= 1
        if self._is_over:
            return False
        self._items.append(item)
        self._turn = turn + 1
        if self._taker_waits or self._fillers_waiting:
            with self._changed:
                self._changed.notify_all()
        return True

    @property
    def _is_over(self) -> bool:
        return self._closed or self._ended

    def end(self, turn: int, failure: BaseException | None = None) -> None:
        """Say that nothing comes from this turn on, because all is done or because of a failure."""
        with self._changed:
            self._fillers_waiting += 1
            try:
                self._changed.wait_for(lambda: self._is_over or turn == self._turn)
            finally:
                self._fillers_waiting -= 1
            if not self._is_over:
                self._ended, self._failure = True, failure
            self._changed.notify_all()

    def take(self, is_filled: Callable[[], bool] = lambda: True) -> T | None:
        """Take the next item, waiting for it; None at the end. `is_filled` says whether there is still a thread that fills.

        Raises:
            BaseException: the failure that ended the filling side.
            DeliveryError: where the filling side is gone without a word.
        """
        if self._closed:
            return None
        if not self._items:
            self._wait(is_filled)
        try:
            item = self._items.popleft()
        except IndexError:
            if self._failure is not None and not self._closed:
                raise self._failure from None
            return None
        if self._fillers_waiting:
            with self._changed:
                self._changed.notify_all()
        return item

    def _wait(self, is_filled: Callable[[], bool]) -> None:
        with self._changed:
            self._taker_waits = True
            try:
                while not self._changed.wait_for(lambda: self._items or self._is_over, timeout=_LOOK_EVERY_S):
                    if not is_filled() and not self._items and not self._is_over:
                        raise DeliveryError("the threads that fill batches are gone; begin a new iteration")
            finally:
                self._taker_waits = False

    def close(self) -> None:
        """Let the filling side stop, and drop what was not taken."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
