"""Handle Ctrl-C and SIGTERM at safe points: between images, never within a commit."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, TracebackType

ECHO_S = 2.0  # torchrun forwards to its ranks the Ctrl-C that the terminal has already sent them
_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it


class Terminated(KeyboardInterrupt):
    """Raised for SIGTERM, as KeyboardInterrupt is for Ctrl-C."""


class Stopped(KeyboardInterrupt):
    """Packing was stopped between images; everything encoded is committed."""

    def __init__(self, exit_code: int, num_encoded: int) -> None:
        """`num_encoded`: images that this run encoded and committed."""
        super().__init__(exit_code, num_encoded)
        self.exit_code, self.num_encoded = exit_code, num_encoded


def exit_code_of(stop: KeyboardInterrupt) -> int:
    """Return the exit code for a signal: 128 plus the signal's number, as in shells."""
    if isinstance(stop, Stopped):
        return stop.exit_code
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


class Interrupts:
    """Signal handlers for the duration of a run: the first signal raises at once, or within `between_images` at the next check.

    A second signal ends the process at once. With several ranks, one within `echo_s` of the first is ignored.
    """

    def __init__(self, *, echo_s: float = 0.0) -> None:
        self._echo_s = echo_s
        self._first: tuple[int, float] | None = None  # the signal and its time
        self._is_held = False
        self._is_ending = False
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # only the main thread gets signals
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._is_ending else handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Restore the default handlers within: for calls that ignore Python's handlers, while there is nothing to lose."""
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)
        try:
            yield
        finally:
            for number in self._before:
                signal.signal(number, self._note)

    @contextmanager
    def between_images(self, *also: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Defer signals, and yield a function that raises KeyboardInterrupt or Terminated if there was one.

        That function also calls each of `also`, which may raise for other reasons. After an exception the first signal stays
        deferred, so that cleanup is not interrupted.
        """
        self._is_held = True

        def check() -> None:
            self.check()
            for further in also:
                further()

        yield check
        self._is_held = False
        self.check()

    def end(self) -> None:
        """Defer signals from now on, and ignore them after `__exit__`, while the process reports why it ends.

        torchrun sends SIGTERM to the last ranks to end, which would otherwise look as if they had been killed.
        """
        self._is_held = self._is_ending = True

    def check(self) -> None:
        """Raise the signal that was recorded, if any."""
        if self._first is not None:
            raise Terminated if self._first[0] == signal.SIGTERM else KeyboardInterrupt

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = (number, now)
            if not self._is_held:
                self.check()
        elif now - self._first[1] >= self._echo_s:
            _end_at_once(number)


def _end_at_once(number: int) -> None:
    if sys.stderr.isatty():
        os.write(2, _SHOW_CURSOR)
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
