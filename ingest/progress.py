"""The progress bar of a packing rank, and of a scan, on stderr."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def packing_progress(total: int, rank: int, world_size: int) -> Iterator[Callable[[], None]]:
    """Show images done, rate and time left of rank 0's share; give what is to be called for each image."""
    if rank != 0:
        yield lambda: None
        return
    with counting_progress("pack" if world_size == 1 else f"pack (rank 0 of {world_size})", total) as advance:
        yield advance


@contextmanager
def counting_progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show images done, rate and time left; give what is to be called for each image."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - rich's own signature
            return Text(f"{task.speed or 0.0:.1f} images/s")

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
