"""The lines that batches read: held from the moment that a batch is planned until it is copied.

Letters: B byte ranges of shards' files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bucketline.store.format.block import LINE_BYTES
from bucketline.store.remote.cache.cached_shard import PINNED
from bucketline.store.shard.mapped import distinct

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from bucketline.store.remote.cache.cached_shard import CachedShard
    from bucketline.store.remote.cache.fetch import HeldLine, LineFetcher
    from bucketline.store.remote.cache.remote_source import RemoteSource
    from bucketline.store.shard.reader import SealedShard

LOOKAHEAD_BYTES = 512 << 20  # of lines that are held for batches that are not copied yet


class HeldLines:
    """Some lines that are held; nothing for a batch whose lines are pinned."""

    __slots__ = ("_lines", "_parts", "_table")

    def __init__(self, table: LineTable, lines: list[int], parts: list[tuple[LineFetcher, list[HeldLine]]]) -> None:
        self._table, self._lines, self._parts = table, lines, parts

    @property
    def are_ready(self) -> bool:
        return all(fetcher.are_ready(held) for fetcher, held in self._parts)

    def wait(self, *, is_over: Callable[[], bool], on_no_room: Callable[[], bool], begun: float) -> bool:
        """Wait until the lines are present; see `LineFetcher.wait`."""
        return all(fetcher.wait(held, is_over=is_over, on_no_room=on_no_room, begun=begun) for fetcher, held in self._parts)

    def release(self) -> None:
        """Release the lines; idempotent."""
        parts, self._parts = self._parts, []
        for fetcher, held in parts:
            fetcher.release(held)
        lines, self._lines = self._lines, []
        self._table.forget(lines)


class LineTable:
    """The lines of several shards, numbered consecutively. One reader's: for one thread at a time, but for `release`."""

    def __init__(self, shards: Sequence[SealedShard]) -> None:
        """Open nothing yet. Shards without a source have no lines."""
        self._shards = shards
        self._sources: list[RemoteSource | None] = [shard.source for shard in shards]  # type: ignore[misc]
        counts = [-(-shard.entry.lmdb.num_bytes // LINE_BYTES) if shard.source else 0 for shard in shards]
        self._num_lines = np.array(counts, dtype=np.int64)  # [shards]
        self._first = np.cumsum([0, *counts], dtype=np.int64)  # [shards + 1]
        self._is_pinned = np.zeros(int(self._first[-1]), dtype=bool)  # of those that this object has looked at
        self._is_known = self._num_lines == 0  # [shards]
        self._counts: dict[int, int] = {}  # of holders, by line
        self._own_sources = {id(source): source for source in self._sources if source is not None}.values()
        for source in self._own_sources:
            source.readers.add(self)
            source.files.try_again()

    @property
    def is_complete(self) -> bool:
        """True if every line is known to be pinned: nothing has to be held then."""
        return bool(self._is_known.all() and self._is_pinned.all())

    def look_at_all(self) -> None:
        """Look at every shard, if all of them have been read from before."""
        pairs = zip(self._sources, self._shards, strict=True)
        if all(source is None or source.has_list(shard.entry) for source, shard in pairs):
            for ordinal in np.flatnonzero(~self._is_known).tolist():
                self._look_at(ordinal)

    @property
    def held_bytes(self) -> int:
        """Bytes of the lines that are held, at most."""
        return len(self._counts) * LINE_BYTES

    @property
    def most_bytes(self) -> int:
        """Bytes that a reader should hold at most: half of the ring is for captions, which are known later than rows."""
        own = [source.ring_bytes // 2 // max(1, len(source.readers)) for source in self._own_sources]
        return min([LOOKAHEAD_BYTES, *own])

    @property
    def is_cache_shared(self) -> bool:
        """True if another process uses a cache of these shards."""
        return any(source.is_cache_shared for source in self._own_sources)

    def hold(self, shard: NDArray[np.int64], begin: NDArray[np.int64], end: NDArray[np.int64], priority: int) -> HeldLines:
        """Hold lines of byte ranges of shards' files, `[B]` each, until they are released; request those that are missing."""
        for ordinal in distinct(shard[~self._is_known[shard]]).tolist():
            self._look_at(ordinal)
        lines = self._lines_of(shard, begin, end)
        is_pinned = self._is_pinned[lines]
        self._count_hits(lines[is_pinned])
        lines = lines[~is_pinned]
        owners = np.searchsorted(self._first, lines, side="right") - 1
        wanted: dict[LineFetcher, list[tuple[CachedShard, int]]] = {}
        numbers = []
        for line, ordinal, first in zip(lines.tolist(), owners.tolist(), self._first[owners].tolist(), strict=True):
            source = self._sources[ordinal]
            assert source is not None
            cached = source.cached(self._shards[ordinal].entry)
            if cached.present[line - first] == PINNED:
                self._is_pinned[line] = True
                source.lines.count_hits(1)
            else:
                wanted.setdefault(source.lines, []).append((cached, line - first))
                numbers.append(line)
        parts = [(fetcher, fetcher.hold(pairs, priority)) for fetcher, pairs in wanted.items()]
        for line in numbers:
            self._counts[line] = self._counts.get(line, 0) + 1
        return HeldLines(self, numbers, parts)

    def _count_hits(self, lines: NDArray[np.int64]) -> None:
        if len(self._own_sources) == 1:
            next(iter(self._own_sources)).lines.count_hits(len(lines))
            return
        for ordinal in (np.searchsorted(self._first, lines, side="right") - 1).tolist():
            source = self._sources[ordinal]
            assert source is not None
            source.lines.count_hits(1)

    def _look_at(self, ordinal: int) -> None:
        source, shard = self._sources[ordinal], self._shards[ordinal]
        assert source is not None
        begin, end = self._first[ordinal : ordinal + 2].tolist()
        self._is_pinned[begin:end] = source.pinned(shard.entry)
        self._is_known[ordinal] = True

    def _lines_of(self, shard: NDArray[np.int64], begin: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
        has_lines = (self._num_lines[shard] > 0) & (end > begin)
        if not has_lines.all():
            shard, begin, end = shard[has_lines], begin[has_lines], end[has_lines]
        first, last = self._first[shard] + begin // LINE_BYTES, self._first[shard] + (end - 1) // LINE_BYTES
        most = int((last - first).max(initial=0))
        found = [first] + [np.minimum(first + n, last) for n in range(1, most + 1)]
        return distinct(np.concatenate(found))

    def forget(self, lines: list[int]) -> None:
        for line in lines:
            left = self._counts.get(line, 0) - 1
            if left > 0:
                self._counts[line] = left
            else:
                self._counts.pop(line, None)

    def wake(self) -> None:
        """Let those that wait for lines look again."""
        for source in self._own_sources:
            source.lines.wake()

    def close(self) -> None:
        """Leave the ring's share to other readers."""
        for source in self._own_sources:
            source.readers.discard(self)
