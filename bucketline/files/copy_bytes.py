"""Copy bytes between two open files; they share blocks if the file system supports it."""

from __future__ import annotations

import errno
import os

_READ_BYTES = 1 << 20
_CANNOT = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


def copy_some(source: int, target: int, num_bytes: int) -> int:
    """Copy bytes from the descriptors' current positions. Return their number, 0 at the end of the source."""
    try:
        return os.copy_file_range(source, target, num_bytes)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    data = memoryview(os.read(source, min(num_bytes, _READ_BYTES)))
    done = 0
    while done < len(data):
        done += os.write(target, data[done:])
    return len(data)
