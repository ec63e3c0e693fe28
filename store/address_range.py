"""One range of addresses over many files (a store's shards), so that a batch that spans many is gathered in one call.

The range is reserved without memory behind it; a file is mapped into its place at first use. The range begins with pages
of zeros: the index of a padding token points there.

A file that is truncated while it is mapped ends the process (SIGBUS), whatever the code does; where a medium cannot be
trusted that far, read with `FileGather`, which gives an error instead.
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
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

ZERO_BYTES = 1 << 20  # at the start of the range; a row of padding must fit
_MAX_BYTES = 1 << 47
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _mmap(address: int | None, num_bytes: int, prot: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, num_bytes, prot, flags, fd, 0)
    if found is None or found == _FAILED:
        raise StoreError(f"{num_bytes} bytes of addresses cannot be mapped: {os.strerror(ctypes.get_errno())}")
    return int(found)


def map_file(fd: int, num_bytes: int) -> memoryview:
    """Map a file to be read. Unlike Python's own `mmap`, the map keeps no descriptor open: a store may have thousands."""
    base = _mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd)
    return memoryview(_owning_buffer(base, num_bytes)).cast("B").toreadonly()


def _owning_buffer(base: int, num_bytes: int) -> ctypes.Array[ctypes.c_uint8]:
    """See addresses as a buffer; they are given back when the last view of it is gone."""
    buffer = (ctypes.c_uint8 * num_bytes).from_address(base)
    # not at exit: a thread may still be reading, and the process is about to give its memory back anyway
    weakref.finalize(buffer, _libc.munmap, base, num_bytes).atexit = False
    return buffer


class AddressRange:
    """Addresses of many files; `bytes_view` is the range as one array of bytes."""

    def __init__(self, num_bytes: Sequence[int], opened: Callable[[int], AbstractContextManager[int]]) -> None:
        """Reserve the range for files of these lengths; nothing is mapped yet but the zeros.

        `opened` opens a file by its number for a moment, and gives its descriptor.

        Raises:
            StoreError: where the system refuses so large a range.
        """
        page = mmap.PAGESIZE
        self._sizes, self._opened = num_bytes, opened
        places = [-(-size // page) * page for size in num_bytes]
        if sum(places) >= _MAX_BYTES:
            raise StoreError(f"{sum(places)} bytes of addresses cannot be mapped: a process has {_MAX_BYTES}")
        self.first_byte = np.cumsum([ZERO_BYTES, *places], dtype=np.int64)  # [files + 1], of each file in the range
        self.num_bytes = int(self.first_byte[-1])
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._base = _mmap(None, self.num_bytes, _PROT_NONE, private, -1)
        self._buffer = _owning_buffer(self._base, self.num_bytes)
        _mmap(self._base, ZERO_BYTES, mmap.PROT_READ, private | _MAP_FIXED, -1)
        self.is_mapped = np.zeros(len(num_bytes), dtype=bool)

    def map(self, ordinals: NDArray[np.int64]) -> None:
        """Map files into their places, where they are not yet.

        Raises:
            StoreError: where the system refuses, or what `opened` raises.
        """
        if self.is_mapped[ordinals].all():
            return
        for ordinal in np.unique(ordinals[~self.is_mapped[ordinals]]).tolist():
            with self._opened(ordinal) as fd:  # the map outlasts it
                place = self._base + int(self.first_byte[ordinal])
                _mmap(place, self._sizes[ordinal], mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd)
            self.is_mapped[ordinal] = True

    def ask_ahead(self, begin: NDArray[np.int64], num_bytes: NDArray[np.int64] | int) -> None:
        """Ask the kernel to read ranges from the disk, each from a byte of the range, `[B]`; returns at once.

        It is advice: what the kernel does not take is read when it is touched.
        """
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        for address, length in zip((self._base + first).tolist(), (begin - first + num_bytes).tolist(), strict=True):
            _libc.madvise(address, length, mmap.MADV_WILLNEED)

    def bytes_view(self) -> NDArray[np.uint8]:
        """Give the whole range as bytes, `[num_bytes]`. Only what is mapped may be touched. Views keep the range."""
        return np.frombuffer(memoryview(self._buffer), dtype=np.uint8)
