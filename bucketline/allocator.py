"""The C library's malloc thresholds, for programs that compute on the CPU; torch's allocator on a GPU."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableMapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # named M_… in glibc
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Keep freed memory for the next allocation, instead of returning it to the kernel and page-faulting it in again.

    Every layer allocates and frees a convolution output of about 10 MiB; with glibc's default thresholds each one is a new
    mapping. Does nothing with another C library.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


def let_segments_grow(environment: MutableMapping[str, str]) -> None:
    """Have torch extend its segments of GPU memory instead of adding others, unless the user has set its allocator up.

    Buckets of many sizes would leave gaps that none of the others fits into. Call this before torch first looks for a GPU.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys():
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
