"""Copying a sealed file, and comparing what was copied with the digest that it should have."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from bucketline.errors import CorruptError, StoreError
from bucketline.store.digests import file_digest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.store.manifest import FileEntry

CHUNK_BYTES = 64 << 20  # of one call to the kernel; progress is told after each
READ_BYTES = 1 << 20
_CANNOT = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


def copy_file(source: Path, target: Path, expected: FileEntry, on_bytes: Callable[[int], None]) -> None:
    """Copy a file durably; `target` must not exist. Where the file system can, it shares the blocks instead.

    Raises:
        StoreError: where the source is missing.
        CorruptError: where the copy is not what the manifest lists.
    """
    try:
        reading = source.open("rb", buffering=0)
    except FileNotFoundError as error:
        raise StoreError(f"{source} is missing, the manifest lists it; restore it, or open a newer generation") from error
    with reading, target.open("xb", buffering=0) as writing:
        left = expected.num_bytes
        while left and (count := _copy_some(reading.fileno(), writing.fileno(), min(left, CHUNK_BYTES))):
            left -= count
            on_bytes(count)
        os.fsync(writing.fileno())
        if left or os.fstat(reading.fileno()).st_size != expected.num_bytes:
            found = os.fstat(reading.fileno()).st_size
            raise CorruptError(f"{source} has {found} bytes, the manifest says {expected.num_bytes}; run `store verify`")
    if file_digest(target) != (expected.num_bytes, expected.digest):
        raise CorruptError(f"{source} is not what was written: its digest is not the manifest's; run `store verify`")


def _copy_some(source: int, target: int, num_bytes: int) -> int:
    """Copy bytes from where both descriptors stand; give how many, 0 at the end of the source."""
    try:
        return os.copy_file_range(source, target, num_bytes)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    data = memoryview(os.read(source, min(num_bytes, READ_BYTES)))
    done = 0
    while done < len(data):
        done += os.write(target, data[done:])
    return len(data)
