"""Progress on stderr: bars if that is a terminal, which only this file decides, and lines that may be lost."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

from bucketline.errors import BucketlineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console
    from rich.progress import ProgressColumn


class _OutputStream:
    """A text stream with a function that is called if it cannot be written; everything else is the stream's own."""

    def __init__(self, stream: TextIO, fail: Callable[[OSError], None]) -> None:
        self._stream: TextIO = stream._stream if isinstance(stream, _OutputStream) else stream
        self._fail = fail

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the stream has
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._fail(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._fail(error)


def as_log(stream: TextIO) -> TextIO:
    """Return a stream whose writes never fail: a full disk, a closed pipe or a lost terminal must not end what is logged."""
    return cast("TextIO", _OutputStream(stream, lambda _: None))


def as_results(stream: TextIO) -> TextIO:
    """Return stdout as a stream of which a failed write is an error of ours, or a BrokenPipeError if `head` has closed it."""

    def fail(error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            raise error
        raise BucketlineError(f"stdout cannot be written: {error.strerror}; fix this and rerun the command") from error

    return cast("TextIO", _OutputStream(stream, fail))


def stderr_console(**options: Any) -> Console:  # noqa: ANN401 - as rich's
    """Return a console on stderr whose `is_terminal` says whether to draw a bar or print lines; `options` are rich's.

    By itself, rich takes FORCE_COLOR for a terminal, and would draw a bar into a log file. A terminal that can show no bar has
    TTY_COMPATIBLE=0, and gets lines.
    """
    from rich.console import Console

    return Console(file=as_log(sys.stderr), force_terminal=None if sys.stderr.isatty() else False, **options)


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
