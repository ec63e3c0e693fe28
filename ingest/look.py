"""Look at images in threads without packing them: the loop of a dry run and of a scan."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.pipeline.ordered_pool import OrderedPool, WorkLimits
from bucketline.ingest.pipeline.read_ahead import num_header_threads
from bucketline.ingest.progress import counting_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bucketline.ingest.parallel.item_parts import ItemParts
    from bucketline.ingest.sources.source import Source, SourceItem

T = TypeVar("T")

_AHEAD_BYTES = 256 << 20  # of file contents, if they come from a stream


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
