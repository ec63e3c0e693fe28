"""Sample ids from the image paths that a cache records, which may be those of another machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def ids_of_paths(paths: Sequence[str]) -> dict[str, str]:
    """Return an id for each path: the path from the folder that all of them are in.

    >>> ids_of_paths(["/data/photos/cats/a.png", "/data/photos/b.png"])
    {'/data/photos/cats/a.png': 'cats/a.png', '/data/photos/b.png': 'b.png'}
    """
    plain = {path: path.replace("\\", "/") for path in paths}
    folders = {os.path.dirname(path) for path in plain.values()}  # noqa: PTH120 - a path of any machine
    try:
        shared = os.path.commonpath(folders) if folders else ""
    except ValueError:  # some absolute, some not
        shared = ""
    start = f"{shared.rstrip('/')}/" if shared else ""
    return {path: own.removeprefix(start).lstrip("/") for path, own in plain.items()}
