"""Read the images of a source in object storage ahead, many at a time, as far as bounded memory allows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from bucketline.errors import BucketlineError
from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.pipeline.ordered_pool import OrderedPool, WorkLimits
from bucketline.ingest.sources.objects.source import ObjectSource
from bucketline.ingest.sources.tar.tar_source import TarSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from bucketline.ingest.sources.source import Source, SourceItem


REQUESTS = 32  # at a time; each waits for a round trip most of the time
MOST_BYTES = 256 << 20  # of files that are read and not taken yet
_GUESSED_BYTES = 1 << 20  # of a file of which the size is not known yet
_MOST_THREADS = 4  # that read headers of local files; more do not help


def num_header_threads(source: Source) -> int:
    """Return how many threads are to read headers of a source at a time."""
    return REQUESTS if _as_remote(source) is not None else min(_MOST_THREADS, os.cpu_count() or 1)


def read_ahead(source: Source, items: Iterable[SourceItem], will_read: Callable[[SourceItem], bool]) -> Iterator[SourceItem]:
    """Yield items in order; of a source in object storage, those that `will_read` holds for come with their bytes.

    An item that cannot be read comes without: reading it again says why.
    """
    remote = _as_remote(source)
    if remote is None:
        yield from items
        return

    def fetched(item: SourceItem) -> SourceItem:
        try:
            return remote.fetched(item) if item.held is None and will_read(item) else item
        except (BucketlineError, RejectedError):
            return item

    room = WorkLimits(num_threads=REQUESTS, items=2 * REQUESTS, num_bytes=MOST_BYTES)
    with OrderedPool(items, fetched, lambda item: remote.known_bytes(item) or _GUESSED_BYTES, room) as ahead:
        for _, future in ahead.results(lambda: None):
            yield future.result()


def _as_remote(source: Source) -> ObjectSource | TarSource | None:
    """Return a source if it is in object storage."""
    if isinstance(source, ObjectSource) or (isinstance(source, TarSource) and source.is_remote):
        return source
    return None
