"""A bounded queue between the thread that fills and the one that trains, which ends cleanly from either side."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Handover(Generic[T]):
    """Items in order, at most `depth` at a time. A failure on the filling side is raised on the taking side, in its place."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._ended = False
        self._failure: BaseException | None = None

    def put(self, item: T) -> bool:
        """Hand an item over, waiting for room; False where the taking side has closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
            if self._closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def end(self, failure: BaseException | None = None) -> None:
        """Say that nothing more comes, because all is done or because of a failure."""
        with self._changed:
            self._ended, self._failure = True, failure
            self._changed.notify_all()

    def take(self) -> T | None:
        """Take the next item, waiting for it; None at the end.

        Raises:
            BaseException: the failure that ended the filling side.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._items or self._ended)
            if self._items and not self._closed:
                self._changed.notify_all()
                return self._items.popleft()
            if self._failure is not None:
                raise self._failure
            return None

    def close(self) -> None:
        """Let the filling side stop, and drop what was not taken."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
