"""Files of a length and without content, which stand for others."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from bucketline.files.atomic_write import create_aside

if TYPE_CHECKING:
    from pathlib import Path


def make_sparse(path: Path, num_bytes: int) -> None:
    """Replace a file by one that has only a length. Who has the former one open reads on."""
    aside, fd = create_aside(path)
    try:
        os.ftruncate(fd, num_bytes)
        aside.replace(path)
    finally:
        os.close(fd)
