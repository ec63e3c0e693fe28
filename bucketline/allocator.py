"""What the C library does with memory that was freed, for programs that compute on the CPU."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names begin with M_
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Keep freed memory for the next allocation, instead of handing it to the kernel and faulting it in again, page by page.

    A convolution's output of some 10 MiB is made and freed at every layer; by glibc's own thresholds each is a fresh mapping.
    Nothing happens where the C library is another one.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
