"""Ctrl-C at moments of our choosing: between images, never within a commit."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


@contextmanager
def interrupts_between_images() -> Iterator[Callable[[], None]]:
    """Note Ctrl-C instead of raising it at once; what is given raises KeyboardInterrupt if it was pressed.

    A second Ctrl-C is raised where it falls.
    """
    pressed = threading.Event()

    def note(_number: int, _frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    def check() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield check
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
