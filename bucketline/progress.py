"""Progress bars on stderr, shown only if it is a terminal; the one place that decides whether it is."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console
    from rich.progress import ProgressColumn


def stderr_console(**options: Any) -> Console:  # noqa: ANN401 - as rich's
    """Return a console on stderr whose `is_terminal` says whether to draw a bar or print lines; `options` are rich's.

    By itself, rich takes FORCE_COLOR for a terminal, and would draw a bar into a log file. A terminal that can show no bar has
    TTY_COMPATIBLE=0, and gets lines.
    """
    from rich.console import Console

    return Console(stderr=True, force_terminal=None if sys.stderr.isatty() else False, **options)


def shows_bars() -> bool:
    """Return whether stderr is a terminal that shows bars. Where it is none, rich is not imported."""
    return sys.stderr.isatty() and bool(stderr_console().is_terminal)


@contextmanager
def progress_bar(
    what: str, total: float | None, *columns: ProgressColumn, transient: bool = True
) -> Iterator[Callable[..., None]]:
    """Yield a function that takes `advance=`, or `completed=` and `total=`.

    The bar appears at once, or at the first call if there is no total yet. `columns` follow it; the time left comes last. With
    `transient`, it is erased at the end.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = stderr_console()
    shown = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    progress = Progress(*shown, console=console, transient=transient, disable=not console.is_terminal)
    task = progress.add_task(what, total=total)

    def update(**changes: Any) -> None:  # noqa: ANN401 - as rich's
        progress.start()
        progress.update(task, **changes)

    try:
        if total is not None:
            progress.start()
        yield update
    finally:
        if progress.live.is_started:
            progress.stop()
