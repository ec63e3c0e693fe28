"""From the store's object to the shard's sparse file: a line's bytes, written while they arrive and compared with its checksum.

The line is locked by this process until it is known to be right or is freed again, also if the store is closed meanwhile.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from bucketline.errors import CorruptError
from bucketline.store.format.hashing import LineSums, checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bucketline.store.remote.cache.cached_shard import CachedShard
    from bucketline.store.remote.cache.folder import CacheFolder
    from bucketline.store.remote.objects import ObjectFolder


class WrongBytesError(CorruptError):
    """Bytes that are not the line's, although there are as many."""


class LineDownload:
    """Fetches lines of a store's shards into a cache."""

    def __init__(self, objects: ObjectFolder, cache: CacheFolder, sums_of: Callable[[CachedShard], Sequence[int]]) -> None:
        """`sums_of` returns the checksums of a shard's lines; it may request objects itself."""
        self._objects, self._cache, self._sums_of = objects, cache, sums_of

    def fetch(self, shard: CachedShard, number: int) -> None:
        """Write a line's bytes to the shard's file; its byte is not set yet. The caller has locked the line and has its room.

        On a full disk, the space that is allocated for the ring is used, then its lines are freed, and nothing is pinned.
        """
        expected = self._sums_of(shard)[number]
        while True:
            try:
                with shard.writing(number) as write:
                    try:
                        self._write(shard, number, expected, write)
                    except BaseException:
                        with suppress(OSError):
                            shard.punch(number)
                        raise
            except OSError as error:
                self._cache.shrink()
                if not (self._cache.release_space() or self._cache.make_room()):
                    raise self._cache.full(error) from error
            else:
                return

    def _write(self, shard: CachedShard, number: int, expected: int, write: Callable[[memoryview], None]) -> None:
        begin, end = shard.place(number)
        found, count = LineSums(), 0
        for piece in self._objects.pieces(f"shards/{shard.path.name}", begin, end):
            count += len(piece)
            if count > end - begin:
                break
            found.update(piece)
            write(piece)
        if count != end - begin:
            raise CorruptError(
                f"{count} bytes came, {end - begin} were requested; the object is shorter than its manifest says"
            )
        if found.finish() != [expected]:
            raise WrongBytesError(
                "its bytes do not match the line's checksum; if this stays, run `store verify` on the original"
            )

    def is_right(self, shard: CachedShard, number: int) -> bool:
        """Return whether the file has a line's bytes: those of before a restart may not have reached the disk."""
        return checksum(memoryview(shard.read(number))) == self._sums_of(shard)[number]
