"""Progress bars of the `store` commands."""

from __future__ import annotations

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
