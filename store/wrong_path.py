"""What lies at a path where a store should be, and what to name instead."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from bucketline.near_names import why_not_there

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_PICTURES = frozenset({".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
_LOOKED_AT = 1000  # names in a folder


def why_no_store(path: Path, manifest: str) -> str:
    """Say what is there instead of a folder with a `manifest`, and what to do."""
    above = next((folder for folder in path.absolute().parents if (folder / manifest).is_file()), None)
    if not path.exists():
        return f"{why_not_there(path)}; name a store's folder, or make one with `ingest pack SOURCE {path}`"
    if above is not None:
        return f"it lies in the store {above}; name that folder"
    if not path.is_dir():
        return "it is a file; name a store's folder, which `ingest pack SOURCE STORE` makes"
    children = list(_children(path))
    if inside := next((child for child in children if (child / manifest).is_file()), None):
        return f"it has no {manifest}, but {inside.name} in it has; name {inside}"
    if any(_is_picture(child) or any(map(_is_picture, _children(child))) for child in children):
        return f"it is a folder of pictures; pack it with `ingest pack {path} STORE`, and name that STORE"
    return f"it has no {manifest}; name a store's folder, or make one with `ingest pack SOURCE STORE`"


def _children(folder: Path) -> Iterator[Path]:
    try:
        yield from itertools.islice(folder.iterdir(), _LOOKED_AT)
    except OSError:
        return  # no folder, or one that cannot be listed


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in _PICTURES
