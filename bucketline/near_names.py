"""What a path that is not there may have been meant to be."""

from __future__ import annotations

import difflib
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_LOOKED_AT = 10_000  # names in a folder


def why_not_there(path: Path) -> str:
    """Say how far a path leads where there is nothing, and a name there that is nearly the one asked for.

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
    return f"{above} has no {wanted!r}" + (f", but {near[0]!r}" if near else "")
