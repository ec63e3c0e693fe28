"""A progress bar of bytes, on stderr."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def byte_progress(what: str) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """Show bytes done, rate and time left; give what is to be called with the total, and with each amount that is done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda total: progress.update(task, total=total), lambda num_bytes: progress.advance(task, num_bytes)
