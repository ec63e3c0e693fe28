"""Stores that versions 1 to 4 of the format wrote; `make` has made them."""

from __future__ import annotations

import tarfile
from pathlib import Path


def unpacked(name: str, folder: Path) -> Path:
    """Return the store of a version, such as `1`, in a folder."""
    with tarfile.open(Path(__file__).with_name(f"{name}.tar.xz")) as tar:
        tar.extractall(folder, filter="data")
    return folder / name
