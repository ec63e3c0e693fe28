"""A thread that can be joined whatever has become of its start, which Ctrl-C may interrupt."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class JoinableThread(threading.Thread):
    """A daemon thread whose `join` never fails because it has not started, and leaves none that runs its target later.

    A `KeyboardInterrupt` in `Thread.start` leaves open whether the thread runs, and `Thread.join` raises a `RuntimeError` then.
    """

    def __init__(self, target: Callable[..., object], *, name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._turn = threading.Lock()
        self._is_started = self._is_running = self._is_cancelled = False

    def start(self) -> None:
        """Start the thread; as `Thread.start`."""
        super().start()
        self._is_started = True

    def run(self) -> None:
        """Call the target, unless `join` was called before and `start` has not returned."""
        with self._turn:
            if self._is_cancelled:
                return
            self._is_running = True
        super().run()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread ends. If `start` has not returned and the target does not run, it never will."""
        if not self._is_started:
            with self._turn:
                if not self._is_running:
                    self._is_cancelled = True
                    return
        super().join(timeout)
