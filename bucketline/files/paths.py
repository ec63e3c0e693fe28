"""Path checks: suggestions for a missing path, overlapping paths, and what a path that is not a store contains."""

from __future__ import annotations

import difflib
import itertools
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOOKED_AT = 10_000  # maximum number of names read from a folder
IMAGE_SUFFIXES = frozenset(
    [
        *(".apng", ".avif", ".bmp", ".cur", ".dib", ".gif", ".heic", ".heif", ".ico", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg"),
        *(".jpg", ".jxl", ".pgm", ".png", ".pnm", ".ppm", ".qoi", ".tga", ".tif", ".tiff", ".webp"),
    ]
)


def can_be_reached(path: Path | str) -> bool:
    """Return whether a path leads to something that can be reached; `Path.exists` raises where it may not be looked at."""
    return os.path.exists(path)  # noqa: PTH110


def why_not_there(path: Path) -> str:
    """Return how much of a missing path exists, and a similar name there.

    >>> from pathlib import Path
    >>> why_not_there(Path("/no-such-folder/photos"))
    "/ has no 'no-such-folder'"
    """
    above, wanted = path.absolute().parent, path.name
    while not above.exists():
        above, wanted = above.parent, above.name
    if not above.is_dir():
        return f"{above} is a file"
    try:
        names = [child.name for child in itertools.islice(above.iterdir(), _LOOKED_AT)]
    except OSError as error:
        return f"{above} cannot be listed ({error.strerror})"
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.7)
    return f"{above} has no {wanted!r}" + (f" (did you mean {near[0]!r}?)" if near else "")


class Overlap(StrEnum):
    """How one path relates to another."""

    SAME = "same"
    INSIDE = "inside"
    AROUND = "around"


def overlap(one: Path, other: Path) -> Overlap | None:
    """Return how `one` relates to `other`; None if they are disjoint.

    Links and `..` are resolved first. Inodes are compared too, for a folder with two names (a bind mount).
    """
    real_one, real_other = Path(os.path.realpath(one)), Path(os.path.realpath(other))
    if _same(real_one, real_other):
        return Overlap.SAME
    if any(_same(real_other, parent) for parent in real_one.parents):
        return Overlap.INSIDE
    if any(_same(real_one, parent) for parent in real_other.parents):
        return Overlap.AROUND
    return None


def _same(one: Path, other: Path) -> bool:
    """Return True if two resolved paths are the same place: by inode if both exist, else by case-insensitive name."""
    try:
        return one.samefile(other)
    except OSError:
        return os.fsencode(one).lower() == os.fsencode(other).lower()


_CHILDREN_LOOKED_AT = 1000  # maximum number of names read from a folder


def why_no_store(path: Path, manifest: str) -> str:
    """Return what the path contains instead of a folder with a `manifest`, and what to do."""
    above = next((folder for folder in path.absolute().parents if (folder / manifest).is_file()), None)
    if not path.exists():
        return f"{why_not_there(path)}; name a store's folder, or make one with `ingest pack SOURCE {path}`"
    if above is not None:
        return f"it is in the store {above}; name that folder"
    if not path.is_dir():
        return "it is a file; name a store's folder, which `ingest pack SOURCE STORE` makes"
    children = list(_children(path))
    if inside := next((child for child in children if (child / manifest).is_file()), None):
        return f"it has no {manifest}, but its subfolder {inside.name} does; name {inside}"
    if is_folder_of_images(path):
        return f"it is a folder of images; pack it with `ingest pack {path} STORE`, and name that STORE"
    return f"it has no {manifest}; name a store's folder, or make one with `ingest pack SOURCE STORE`"


def is_folder_of_images(path: Path) -> bool:
    """Return True if there are images in a folder or in one of its folders, among the first names of each."""
    return any(_is_image(child) or any(map(_is_image, _children(child))) for child in _children(path))


def _children(folder: Path) -> Iterator[Path]:
    try:
        yield from itertools.islice(folder.iterdir(), _CHILDREN_LOOKED_AT)
    except OSError:
        return  # not a folder, or one that cannot be listed


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES


def refuse_overlap(source: Path, store: Path) -> None:
    """Check that source and store are disjoint."""
    found = {
        Overlap.SAME: f"the source {source} and the store {store} are the same folder",
        Overlap.INSIDE: f"the store {store} is inside the source {source}",
        Overlap.AROUND: f"the source {source} is inside the store {store}",
    }
    if how := overlap(store, source):
        raise UsageError(f"{found[how]}; choose a store outside the folder of images")
