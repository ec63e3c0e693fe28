"""Ctrl-C and SIGTERM at moments of our choosing: between images, never within a commit."""

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

ECHO_S = 2.0  # torchrun passes on to its ranks the Ctrl-C that the terminal has sent them already
_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it


class Terminated(KeyboardInterrupt):
    """SIGTERM, where Ctrl-C would be a KeyboardInterrupt."""


class Stopped(KeyboardInterrupt):
    """Packing was stopped between images, and what was encoded is committed."""

    def __init__(self, exit_code: int, num_encoded: int) -> None:
        """`num_encoded` images were encoded by this run, and are committed."""
        super().__init__(exit_code, num_encoded)
        self.exit_code, self.num_encoded = exit_code, num_encoded


def exit_code_of(stop: KeyboardInterrupt) -> int:
    """Give what a command ends with: 128 and the signal's number, as shells count."""
    if isinstance(stop, Stopped):
        return stop.exit_code
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


class Interrupts:
    """While this is entered, a first signal raises where it falls, but `between_images` only where it is asked for.

    A second one ends the process at once; of several ranks, one that does not follow on the heels of the first.
    """

    def __init__(self, *, echo_s: float = 0.0) -> None:
        self._echo_s = echo_s
        self._first: tuple[int, float] | None = None  # the signal, and when it came
        self._is_held = False
        self._is_ending = False
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # signals come to no other
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._is_ending else handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """End the process where it is, as if nobody listened: for calls that hear no signal, while there is nothing to lose."""
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)
        try:
            yield
        finally:
            for number in self._before:
                signal.signal(number, self._note)

    @contextmanager
    def between_images(self, also: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Raise nothing by itself; what is given raises KeyboardInterrupt, or Terminated, if there was a signal.

        It calls `also` too, which may raise for reasons of its own. It stays so after an exception: what follows is the
        ending, which no first signal is to break off.
        """
        self._is_held = True

        def check() -> None:
            self.check()
            also()

        yield check
        self._is_held = False
        self.check()

    def end(self) -> None:
        """Raise nothing by itself any more, nor after this is left: the process says why it ends, and ends.

        torchrun sends SIGTERM to the ranks that end last, which would look as if they had been killed.
        """
        self._is_held = self._is_ending = True

    def check(self) -> None:
        """Raise what was noted.

        Raises:
            KeyboardInterrupt: where Ctrl-C was pressed.
            Terminated: where SIGTERM came.
        """
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
