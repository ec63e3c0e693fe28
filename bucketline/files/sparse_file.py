"""Files of a length and without content, which stand for others."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from bucketline.files.atomic_write import CREATE, FILE_MODE

if TYPE_CHECKING:
    from pathlib import Path


def make_sparse(path: Path, num_bytes: int) -> None:
    """Replace a file by one that has only a length. Who has the former one open reads on."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    fd = os.open(aside, CREATE, FILE_MODE)
    try:
        os.ftruncate(fd, num_bytes)
    finally:
        os.close(fd)
    aside.replace(path)
