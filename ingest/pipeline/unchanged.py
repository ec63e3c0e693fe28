"""Leave out the unchanged images of a source before any is decoded: many at a time, since most of them are in most runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from bucketline.ingest.sources.source import SourceItem

_PART_ITEMS = 64  # compared by a thread at a time; fewer would cost more in passing them on than in comparing them
PARTS_PER_THREAD = 4  # in a window, so that threads rarely wait for the slowest


class ChangedItems:
    """Iterates over the items that are not unchanged, in order. `num_unchanged` may be read from another thread."""

    def __init__(
        self, items: Iterable[SourceItem], are_unchanged: Callable[[Sequence[SourceItem]], Sequence[bool]], num_threads: int
    ) -> None:
        """`are_unchanged` is called with at most _PART_ITEMS items, from several threads."""
        self._items, self._are_unchanged, self._num_threads = items, are_unchanged, num_threads
        self.num_unchanged = 0

    def __iter__(self) -> Iterator[SourceItem]:
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="compare") as pool:
            for window in self._windows():
                parts = [window[at : at + _PART_ITEMS] for at in range(0, len(window), _PART_ITEMS)]
                for part, flags in zip(parts, pool.map(self._are_unchanged, parts), strict=True):
                    for item, is_unchanged in zip(part, flags, strict=True):
                        if is_unchanged:
                            self.num_unchanged += 1
                        else:
                            yield item

    def _windows(self) -> Iterator[list[SourceItem]]:
        """Collect items; one that comes with its bytes waits for no other, since the next may be a gigabyte as well."""
        window: list[SourceItem] = []
        for item in self._items:
            window.append(item)
            if item.held is not None or len(window) == _PART_ITEMS * PARTS_PER_THREAD * self._num_threads:
                yield window
                window = []
        if window:
            yield window
