"""Open regular files for reading, or links to them; never a pipe or a device, which could block or never end.

Links are followed, because large shards may be on another disk. Writes and removals never follow one (`atomic_write`,
`locks`).
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

NO_FILE = "it is a pipe, a device or a folder, expected a file"
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK: do not block if a pipe has just replaced the file


def open_regular(path: Path) -> int:
    """Open a regular file, or a link to one, and return its descriptor."""
    _refuse_others(path.stat(), path)  # check before opening: opening a device may have side effects
    fd = os.open(path, _FLAGS)
    try:
        _refuse_others(os.fstat(fd), path)
    except OSError:
        os.close(fd)
        raise
    return fd


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return a file's content, truncated to `most_bytes` + 1 bytes, so that the caller can detect a file that is too long."""
    with open(open_regular(path), "rb") as file:
        return file.read(most_bytes + 1)


def why_unread(error: OSError | UnicodeDecodeError) -> str:
    """Return why a file cannot be read as UTF-8 text, to follow its name in a sentence.

    >>> why_unread(FileNotFoundError(2, "No such file or directory", "a.txt"))
    'does not exist'
    """
    if isinstance(error, FileNotFoundError):
        return "does not exist"
    return (
        f"is not UTF-8 (byte {error.start})" if isinstance(error, UnicodeDecodeError) else f"cannot be read: {error.strerror}"
    )


def _refuse_others(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, NO_FILE, os.fspath(path))
