"""Refusing a store that lies where the images lie: cached files must never be taken for images, nor the reverse."""

from __future__ import annotations

import os
from pathlib import Path

from bucketline.errors import UsageError


def refuse_overlap(source: Path, store: Path) -> None:
    """Compare two folders after links, `..` and, by inode, after anything else that gives a folder two names.

    Raises:
        UsageError: where they are the same, or one lies in the other.
    """
    real_source, real_store = Path(os.path.realpath(source)), Path(os.path.realpath(store))
    if _same(real_source, real_store):
        found = f"the source {source} and the store {store} are the same folder"
    elif any(_same(real_source, parent) for parent in real_store.parents):
        found = f"the store {store} lies inside the source {source}"
    elif any(_same(real_store, parent) for parent in real_source.parents):
        found = f"the source {source} lies inside the store {store}"
    else:
        return
    raise UsageError(f"{found}; choose a store outside the folder of images")


def _same(one: Path, other: Path) -> bool:
    """Say whether two resolved paths are one place; by inode where both exist, else by name regardless of case."""
    try:
        return one.samefile(other)
    except OSError:
        return os.fsencode(one).lower() == os.fsencode(other).lower()
