"""Copy a sealed file and verify the copy's digest."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from bucketline.errors import CorruptError, StoreError
from bucketline.files.regular_file import open_regular
from bucketline.store.format.hashing import file_digest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.store.format.manifest import FileEntry

CHUNK_BYTES = 64 << 20  # per system call; progress is reported after each
READ_BYTES = 1 << 20
_CANNOT = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


def copy_file(source: Path, target: Path, expected: FileEntry, on_bytes: Callable[[int], None]) -> None:
    """Copy a file durably; `target` must not exist. Blocks are shared if the file system supports it.

    Raises:
        StoreError: if the source is missing.
        CorruptError: if the copy's digest differs from the manifest's.
    """
    try:
        reading = open(open_regular(source), "rb", buffering=0)  # noqa: PTH123, SIM115 - opens a descriptor; closed below
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
        raise CorruptError(f"{source} is damaged: its digest is not the manifest's; run `store verify`")


def _copy_some(source: int, target: int, num_bytes: int) -> int:
    """Copy bytes from the descriptors' current positions. Return their number, 0 at the end of the source."""
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
