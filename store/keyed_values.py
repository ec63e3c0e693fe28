"""Values of a shard whose places in its file could not be confirmed when it was sealed: LMDB is asked for them.

Its sidecars give places as if all values lay end to end in the order of their keys; here they are turned back into keys.
Slower than reading ranges, and the same bytes.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import lmdb
import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.store.digests import file_digest
from bucketline.store.layout import META_KEY, block_key, sample_key

if TYPE_CHECKING:
    from bucketline.store.sealed_shard import SealedShard


class KeyedValues:
    """Reads one shard through LMDB. Its file's digest is compared first: LMDB's own code follows pointers in the file."""

    def __init__(self, shard: SealedShard) -> None:
        """Nothing is opened yet."""
        self._shard = shard
        self._lock = threading.Lock()  # py-lmdb opens a file only once in a process
        self._is_sound = False

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Read bytes of the values laid end to end, within one value.

        Raises:
            StoreError: where the file is missing or cannot be opened.
            CorruptError: where the file is not what was written, or holds no such bytes.
        """
        key, begin = self._key_at(offset)
        path = self._shard.paths.lmdb
        with self._lock:
            self._check_digest()
            try:
                with (
                    lmdb.open(str(path), subdir=False, lock=False, readonly=True, create=False, readahead=False) as env,
                    env.begin(buffers=True) as txn,
                ):
                    value = txn.get(key)
                    data = b"" if value is None else bytes(value[offset - begin : offset - begin + num_bytes])
            except lmdb.Error as error:
                raise StoreError(f"{path} cannot be opened by LMDB: {error}") from error
        if len(data) != num_bytes:
            raise CorruptError(f"{path}: the value of {key!r} has not the {num_bytes} bytes that its sidecars promise")
        return data

    def _check_digest(self) -> None:
        if self._is_sound:
            return
        path, expected = self._shard.paths.lmdb, self._shard.entry.lmdb
        try:
            found = file_digest(path)
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
        if found != (expected.num_bytes, expected.digest):
            raise CorruptError(f"{path} is not what was written: its digest is not the manifest's; run `store verify`")
        self._is_sound = True

    def _key_at(self, offset: int) -> tuple[bytes, int]:
        """Give the key of the value that holds a place, and where the value begins. Keys: meta, samples, then blocks."""
        extents, index = self._shard.extents, self._shard.index
        at = _last_not_after(extents.column("offset"), offset)
        if at >= 0:
            for group, entry in self._shard.entry.groups.items():
                if entry.first_block <= at < entry.first_block + entry.blocks:
                    return block_key(group, at - entry.first_block), int(extents.take("offset", np.array([at]))[0])
            raise CorruptError(f"{extents.path}: block {at} is of no bucket; run `store verify`")
        at = _last_not_after(index.column("record_offset"), offset)
        if at >= 0:
            digest: bytes = index.take("digest", np.array([at]))[0].tobytes()
            return sample_key(digest), int(index.take("record_offset", np.array([at]))[0])
        return META_KEY, 0


def _last_not_after(offsets: np.ndarray[tuple[int], np.dtype[np.uint64]], offset: int) -> int:
    return int(np.searchsorted(offsets, np.uint64(offset), side="right")) - 1
