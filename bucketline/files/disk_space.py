"""Free-disk check before the work starts."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from bucketline.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path


def refuse_too_little_disk(folder: Path, needed_bytes: int, what: str) -> None:
    """Check that an existing folder's disk has room for what is to be written.

    Raises:
        StoreError: if it does not; the message has `what` and both figures.
    """
    free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        raise StoreError(
            f"{what} needs about {-(-needed_bytes >> 20)} MiB in {folder}, but only {free >> 20} MiB are free; "
            "make room, or choose another disk"
        )
