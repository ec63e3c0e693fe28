"""A shard of a few lines, the cache that it is fetched into, and objects that fail on request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from bucketline.store.format.block import LINE_BYTES, checksum
from bucketline.store.remote.cache.cached_shard import CachedShard
from bucketline.store.remote.cache.fetch import LineFetcher
from bucketline.store.remote.cache.folder import CacheFolder, StoreFolder

NUM_LINES = 5
PIECE_BYTES = 3 << 20
NUM_BYTES = (NUM_LINES - 1) * LINE_BYTES + 12345
SHARD_ID = "0123456789abcdef" * 2


@cache
def contents() -> bytes:
    return np.random.default_rng(0).bytes(NUM_BYTES)


def line_of(number: int) -> bytes:
    return contents()[number * LINE_BYTES : (number + 1) * LINE_BYTES]


@cache
def sums() -> tuple[int, ...]:
    return tuple(checksum(line_of(number)) for number in range(NUM_LINES))


@dataclass
class Objects:
    """The folder in object storage: `fault` is called with a line's number before it is read, and may replace its bytes."""

    url: str = "s3://bucket/a.store"
    fault: Callable[[int], bytes | None] = lambda _: None
    requested: list[int] = field(default_factory=list)  # lines
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def pieces(self, name: str, begin: int, end: int) -> Iterator[memoryview]:
        assert name == "shards/g0.lmdb"
        number = begin // LINE_BYTES
        with self._lock:
            self.requested.append(number)
        assert (begin, end) == (number * LINE_BYTES, min((number + 1) * LINE_BYTES, NUM_BYTES))
        data = memoryview(self.fault(number) or line_of(number))
        for at in range(0, len(data), PIECE_BYTES):
            yield data[at : at + PIECE_BYTES]


@dataclass
class Opened:
    """A process's view of the shard."""

    objects: Objects
    cache: CacheFolder
    folder: StoreFolder
    shard: CachedShard
    fetcher: LineFetcher

    def states(self) -> list[int]:
        states: list[int] = self.shard.present.tolist()
        return states

    def read(self, *numbers: int) -> None:
        held = self.fetcher.hold([(self.shard, number) for number in numbers], 0)
        try:
            assert self.fetcher.wait(held)
            for number in numbers:
                assert self.shard.read(number) == line_of(number)
        finally:
            self.fetcher.release(held)

    def close(self) -> None:
        self.fetcher.close()
        self.folder.close()


def open_shard(path: Path, objects: Objects | None = None, *, limit: int = 1 << 30, deadline_s: float = 20.0) -> Opened:
    """Open the shard in a cache folder as another process would: with locks of its own."""
    objects = objects or Objects()
    cache = CacheFolder(path, limit)
    folder = cache.open_store("a" * 32, objects.url)
    shard = CachedShard(folder.path / "shards" / "g0.lmdb", NUM_BYTES, SHARD_ID, folder.locks)
    fetcher = LineFetcher(objects, cache, lambda _: sums(), deadline_s=deadline_s)  # type: ignore[arg-type]
    return Opened(objects, cache, folder, shard, fetcher)
