"""Refusing before the work what the disk cannot hold."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from bucketline.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path


def refuse_too_little_disk(folder: Path, needed_bytes: int, what: str) -> None:
    """Hold what is to be written under a folder that is there against the free disk.

    Raises:
        StoreError: naming `what` needs the room, and both figures.
    """
    free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        raise StoreError(
            f"{what} takes about {-(-needed_bytes >> 20)} MiB in {folder}, {free >> 20} MiB are free; "
            "make room, or choose another disk"
        )
