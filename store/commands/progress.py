"""Progress bars of the `store` commands."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bucketline.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def bar_of_bytes(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show bytes done, rate and time left. Yield a callback that takes each number of bytes processed."""
    with _bytes(what, total) as update:
        yield lambda num_bytes: update(advance=num_bytes)


@contextmanager
def byte_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show bytes done, rate and time left. Yield a callback that takes the bytes done so far and the total."""
    with _bytes(what, None) as update:
        yield lambda done, total: update(completed=done, total=total)


class Tally:
    """Adds up bytes from several threads for `byte_progress`, once the total is known."""

    def __init__(self, on_bytes: Callable[[int, int], None]) -> None:
        self._on_bytes, self._lock, self._done, self._total = on_bytes, threading.Lock(), 0, 0

    def expect(self, total: int) -> None:
        self._total = total

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._on_bytes(self._done, max(self._done, self._total))


@contextmanager
def bar_of_samples(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show samples done and time left. Yield a callback to call once per sample."""
    from rich.progress import MofNCompleteColumn

    with progress_bar(what, total, MofNCompleteColumn()) as update:
        yield lambda: update(advance=1)


@contextmanager
def _bytes(what: str, total: int | None) -> Iterator[Callable[..., None]]:
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with progress_bar(what, total, DownloadColumn(binary_units=True), TransferSpeedColumn()) as update:
        yield update
