"""Free disk space: checked before the work starts, and named when a write has failed."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

from bucketline.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path


FULL_BYTES = 1 << 24  # a disk with less free space counts as full


def refuse_too_little_disk(folder: Path, needed_bytes: int, what: str, remedy: str = "or choose another disk") -> None:
    """Check that an existing folder's disk has room for what is to be written."""
    free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        raise StoreError(
            f"{what} needs about {-(-needed_bytes >> 20)} MiB in {folder}, but only {free >> 20} MiB are free; "
            f"make room, {remedy}"
        )


def failed_write(folder: Path, error: Exception) -> str:
    """Return what an error of writing in a folder says, and that the disk is full if it is: libraries say it in other words."""
    with suppress(OSError):
        free = shutil.disk_usage(folder).free
        if free < FULL_BYTES or os.strerror(errno.ENOSPC) in str(error):  # safetensors' has that, and no errno
            return f"{os.strerror(errno.ENOSPC)}, {free} bytes are free ({error})"
    return str(error)


def remedy_for_failed_write(folder: Path, *, is_full: bool = False) -> str:
    """Return what helps after a failed write in a folder: LMDB reports a short write on a full disk as an I/O error."""
    with suppress(OSError):
        free = shutil.disk_usage(folder).free
        if is_full or free < FULL_BYTES:
            return f"the disk is full ({free >> 10} KiB are free): make room and rerun the command"
    return "fix this and rerun the command"
