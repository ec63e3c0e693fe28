"""Read through LMDB when a shard's byte offsets could not be verified at sealing.

Its sidecars then have offsets into all values concatenated in key order; this module maps them back to keys. Slower than
reading ranges; the bytes are the same.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import lmdb
import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.forks import ForkSafeLock
from bucketline.store.format.hashing import file_digest
from bucketline.store.format.layout import META_KEY, block_key, sample_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bucketline.store.format.layout import ShardPaths
    from bucketline.store.format.manifest_entries import ShardEntry
    from bucketline.store.shard.sidecar import PagedFile


class ShardFiles(Protocol):
    """The parts of a shard needed here: its files and its sidecars."""

    @property
    def paths(self) -> ShardPaths: ...

    @property
    def entry(self) -> ShardEntry: ...

    @property
    def extents(self) -> PagedFile: ...

    @property
    def index(self) -> PagedFile: ...


@contextmanager
def read_lmdb(path: Path, *, readahead: bool = True) -> Iterator[tuple[Any, Any]]:
    """Open a shard's file through LMDB; yield the environment and a transaction whose values are views of the file."""
    with (
        lmdb.open(str(path), subdir=False, lock=False, readonly=True, create=False, readahead=readahead) as env,
        env.begin(buffers=True) as txn,
    ):
        yield env, txn


class KeyedValues:
    """Reads one shard through LMDB, after verifying the file's digest: LMDB follows pointers in the file."""

    def __init__(self, shard: ShardFiles) -> None:
        """Open nothing yet."""
        self._shard = shard
        self._lock = ForkSafeLock(is_awaited=True)  # py-lmdb opens a file only once per process, forked children included
        self._is_sound = False

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes of the concatenated values, within one value.

        Raises:
            StoreError: if the file is missing or cannot be opened.
            CorruptError: if the file is damaged, or has no such bytes.
        """
        key, begin = self._key_at(offset)
        path = self._shard.paths.lmdb
        self._check_digest()  # slow but idempotent, so outside the lock
        with self._lock:
            try:
                with read_lmdb(path, readahead=False) as (_, txn):
                    value = txn.get(key)
                    data = b"" if value is None else bytes(value[offset - begin : offset - begin + num_bytes])
            except lmdb.Error as error:
                raise StoreError(f"{path} cannot be opened by LMDB: {error}") from error
        if len(data) != num_bytes:
            raise CorruptError(f"{path}: the value of {key!r} does not have the {num_bytes} bytes that its sidecars promise")
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
            raise CorruptError(f"{path} is damaged: its digest is not the manifest's; run `store verify`")
        self._is_sound = True

    def _key_at(self, offset: int) -> tuple[bytes, int]:
        """Return the key of the value at an offset, and the value's own offset.

        Key order: meta, blocks of ragged groups, samples, other blocks.
        """
        extents = self._shard.extents
        block, block_at = _last_not_after(extents, "offset", offset)
        sample, sample_at = -1, -1  # an added column has none
        if not self._shard.entry.is_of_column:
            sample, sample_at = _last_not_after(self._shard.index, "record_offset", offset)
        if max(block, sample) < 0:
            return META_KEY, 0
        if sample_at > block_at:
            digest: bytes = self._shard.index.take("digest", np.array([sample]))[0].tobytes()
            return sample_key(digest), sample_at
        for group, entry in self._shard.entry.groups.items():
            if entry.first_block <= block < entry.first_block + entry.blocks:
                return block_key(group, block - entry.first_block), block_at
        raise CorruptError(f"{extents.path}: block {block} belongs to no bucket; run `store verify`")


def _last_not_after(file: PagedFile, name: str, offset: int) -> tuple[int, int]:
    """Return the number of the last value of a sidecar that begins at an offset or before, and where it begins; -1 if none."""
    at = int(np.searchsorted(file.column(name), np.uint64(offset), side="right")) - 1
    return at, int(file.take(name, np.array([at]))[0]) if at >= 0 else -1
