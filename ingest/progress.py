"""Progress of a pack rank, a scan or a dry run: a bar if stderr is a terminal, else a line every half minute."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar

from bucketline.command_line import as_log, per_second, progress_bar, shows_bars
from bucketline.ingest.images.crop import RejectedError
from bucketline.ingest.pipeline.pool import OrderedPool, WorkLimits, num_header_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bucketline.ingest.parallel.items import ItemParts
    from bucketline.ingest.pipeline.model import PhasePlan
    from bucketline.ingest.sources.source import Source, SourceItem

T = TypeVar("T")
LINE_EVERY_S = 30.0  # if stderr is not a terminal
_AHEAD_BYTES = 256 << 20  # of file contents, if they come with the items


@contextmanager
def packing_progress(total: int, what: str | None, remark: Callable[[], str] = lambda: "") -> Iterator[Callable[[], None]]:
    """Show progress of a share and a remark, unless `what` is None; yield a function to call once per image."""
    if what is None:
        yield lambda: None
        return
    with counting_progress(what, total, remark) as advance:
        yield advance


@contextmanager
def caption_progress(
    total: int, what: str | None, plan: Callable[[], PhasePlan]
) -> Iterator[tuple[Callable[[], None], Callable[[], bool]]]:
    """Show progress of captions; yield what to call once per image, and what tells whether there are two phases.

    The latter prints the plan when it is asked. If `what` is None, nothing is shown.
    """
    with ExitStack() as shown:
        advance: list[Callable[[], None]] = []

        def is_due() -> bool:
            if what is not None:
                print(f"pack: {plan()}", file=as_log(sys.stderr), flush=True)
                if plan().are_two:
                    advance.append(shown.enter_context(counting_progress("captions", total)))
            return plan().are_two

        yield lambda: advance[0]() if advance else None, is_due


@contextmanager
def counting_progress(what: str, total: int, remark: Callable[[], str] = lambda: "") -> Iterator[Callable[[], None]]:
    """Show images done, rate, time left and a remark; yield a function to call once per image."""
    if shows_bars():
        with _bar(what, total, remark) as advance:
            yield advance
    else:
        yield _Lines(what, total, remark).advance


@contextmanager
def _bar(what: str, total: int, remark: Callable[[], str]) -> Iterator[Callable[[], None]]:
    from rich.progress import MofNCompleteColumn, ProgressColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - rich's own signature
            rate = per_second(task.speed, "image") if task.speed and (task.elapsed or 0.0) >= 1.0 else ""
            return Text(f"{rate} {remark()}".strip())

    with progress_bar(what, total, MofNCompleteColumn(), Rate(), transient=False) as update:
        yield lambda: update(advance=1)


class _Lines:
    """Prints a line every half minute, for log files."""

    def __init__(self, what: str, total: int, remark: Callable[[], str]) -> None:
        self._what, self._total, self._remark = what, total, remark
        self._done = self._printed_done = 0
        self._printed_at = time.monotonic()

    def advance(self) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._printed_at < LINE_EVERY_S:
            return
        rate = (self._done - self._printed_done) / (now - self._printed_at)
        left_min = (self._total - self._done) / rate / 60
        speed = per_second(rate, "image")
        line = f"{self._what}: {self._done} of {self._total}, {speed}, {left_min:.0f} min left, {self._remark()}"
        print(line.rstrip(", "), file=as_log(sys.stderr), flush=True)
        self._printed_at, self._printed_done = now, self._done


def look_limits(source: Source, num_threads: int | None) -> WorkLimits:
    """Return the limits on work in flight; `num_threads`: None for as many as suit the source."""
    num_threads = num_threads or num_header_threads(source)
    return WorkLimits(num_threads=num_threads, items=2 * num_threads + 1, num_bytes=_AHEAD_BYTES)


def look_at(
    what: str, source: Source, items: ItemParts | Sequence[SourceItem], look: Callable[[SourceItem], T], room: WorkLimits
) -> Iterator[tuple[SourceItem, T | RejectedError]]:
    """Yield each item with what `look` returns of it, or why it rejects it, in order; show the progress of `what`."""

    def looked(item: SourceItem) -> T | RejectedError:
        try:
            return look(item)
        except RejectedError as error:
            return error

    with (
        counting_progress(what, len(items)) as on_image,
        OrderedPool(source.in_turn(items), looked, lambda item: len(item.held or b""), room) as ahead,
    ):
        for item, future in ahead.results(lambda: None):
            yield item, future.result()
            on_image()
