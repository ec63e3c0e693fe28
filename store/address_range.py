"""One range of addresses over all shards of a store, so that a batch that spans many shards is gathered in one call.

The range is reserved without memory behind it; a shard is mapped into its place at first use. The range begins with pages
of zeros: the index of a padding token points there.

A file that is truncated while it is mapped ends the process (SIGBUS), whatever the code does; where a medium cannot be
trusted that far, read with `Bucket.read`, which gives an error instead.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from bucketline.store.sealed_shard import SealedShard

ZERO_BYTES = 1 << 20  # at the start of the range; a row of padding must fit
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _mmap(address: int | None, num_bytes: int, prot: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, num_bytes, prot, flags, fd, 0)
    if found is None or found == _FAILED:
        raise StoreError(f"{num_bytes} bytes of addresses cannot be mapped: {os.strerror(ctypes.get_errno())}")
    return int(found)


def map_file(fd: int, num_bytes: int) -> memoryview:
    """Map a file to be read. Unlike Python's own `mmap`, the map keeps no descriptor open: a store may have thousands."""
    base = _mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd)
    buffer = (ctypes.c_uint8 * num_bytes).from_address(base)
    weakref.finalize(buffer, _libc.munmap, base, num_bytes).atexit = False  # views of it keep `buffer` alive
    return memoryview(buffer).cast("B").toreadonly()


class AddressRange:
    """Addresses of all shards of a store; `bytes_view` is the range as one array of bytes."""

    def __init__(self, shards: tuple[SealedShard, ...]) -> None:
        """Reserve the range; nothing is mapped yet but the zeros.

        Raises:
            StoreError: where the system refuses so large a range.
        """
        page = mmap.PAGESIZE
        sizes = [-(-shard.entry.lmdb.num_bytes // page) * page for shard in shards]
        self._shards = shards
        self.first_byte = np.cumsum([ZERO_BYTES, *sizes], dtype=np.int64)  # [shards + 1], of each shard in the range
        self.num_bytes = int(self.first_byte[-1])
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._base = _mmap(None, self.num_bytes, _PROT_NONE, private, -1)
        # not at exit: a thread may still be reading, and the process is about to give its memory back anyway
        weakref.finalize(self, _libc.munmap, self._base, self.num_bytes).atexit = False
        _mmap(self._base, ZERO_BYTES, mmap.PROT_READ, private | _MAP_FIXED, -1)
        self._mapped = np.zeros(len(shards), dtype=bool)

    def map(self, ordinals: NDArray[np.int64] | Iterable[int]) -> None:
        """Map shards into their places, where they are not yet.

        Raises:
            StoreError, CorruptError: where a shard's file is missing or of another length than the manifest says.
        """
        for ordinal in np.unique(np.asarray(ordinals)):
            if not self._mapped[ordinal]:
                shard = self._shards[ordinal]
                place = self._base + int(self.first_byte[ordinal])
                with shard.opened() as fd:  # the map outlasts it
                    _mmap(place, shard.entry.lmdb.num_bytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd)
                self._mapped[ordinal] = True

    def bytes_view(self) -> NDArray[np.uint8]:
        """Give the whole range as bytes, `[num_bytes]`. Only what is mapped may be touched; keep this object alive."""
        buffer = (ctypes.c_uint8 * self.num_bytes).from_address(self._base)
        return np.frombuffer(memoryview(buffer), dtype=np.uint8)
