"""Buffers in shared memory: an unnamed file (memfd) that the service creates and the client maps.

The buffers follow the control page. Each has a head that describes its content, then the bytes of its tensors. The file grows
by one buffer if all are in use, and shrinks from its end. The kernel frees it once no process holds it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import DeliveryError
from bucketline.loader.service.control_page import CONTROL_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEAD_BYTES = 32768  # reserved before each buffer's tensors: 100 bytes for each column and each ragged group's fields
_PUNCH_HOLE_KEEP_SIZE = 3
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def stride_of(buffer_bytes: int) -> int:
    """Return the distance in bytes from one buffer to the next."""
    return -(-(HEAD_BYTES + buffer_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE


def map_shared(fd: int, offset: int, num_bytes: int) -> NDArray[np.uint8]:
    """Map a part of a file for reading and writing, `[num_bytes]`. Views keep the map. Unlike `mmap`, holds no descriptor."""
    found = _libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise DeliveryError(f"{num_bytes} bytes of shared memory cannot be mapped: {os.strerror(ctypes.get_errno())}")
    buffer = (ctypes.c_uint8 * num_bytes).from_address(found)
    # not at exit: batches may still be in use then
    weakref.finalize(buffer, _libc.munmap, found, num_bytes).atexit = False
    return np.frombuffer(memoryview(buffer), dtype=np.uint8)


class SharedMemory:
    """The service's side of the shared file."""

    def __init__(self, buffer_bytes: int) -> None:
        self.buffer_bytes, self._stride = buffer_bytes, stride_of(buffer_bytes)
        self.fd = os.memfd_create("bucketline-buffers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self.fd)
        self._grow(0, CONTROL_BYTES)
        # no client may shrink the file while the service uses it: that would kill the service (SIGBUS)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self.control = map_shared(self.fd, 0, CONTROL_BYTES)

    def add(self, number: int) -> NDArray[np.uint8]:
        """Allocate the memory of a buffer and map it."""
        offset = CONTROL_BYTES + number * self._stride
        self._grow(offset, self._stride)
        return map_shared(self.fd, offset, self._stride)

    def remove(self, number: int) -> None:
        """Return a buffer's memory to the system; its range in the file stays."""
        _libc.fallocate(self.fd, _PUNCH_HOLE_KEEP_SIZE, CONTROL_BYTES + number * self._stride, self._stride)

    def _grow(self, offset: int, num_bytes: int) -> None:
        try:
            os.posix_fallocate(self.fd, offset, num_bytes)
        except OSError as error:
            raise DeliveryError(
                f"not enough memory for another buffer of {num_bytes} bytes, after {offset}: {error.strerror}; use a smaller "
                "`prefetch_bytes`, or hold fewer batches at a time"
            ) from error

    def close(self) -> None:
        """Close the descriptor. Maps stay until their views are gone."""
        self._close()
