"""Folders named as kohya's trainers have them: `10_sks dog` is read ten times per pass, `reg` is for prior preservation."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_REPEATED = re.compile(r"([1-9][0-9]{0,2})_(.+)")  # not 2019_summer
_REGULARIZATION = re.compile(r"([0-9]+_)?reg(ulari[sz]ation)?([ _-].*)?", re.IGNORECASE)


def repeats_and_subject(folder: str) -> tuple[int, str] | None:
    """Return the repeats and the rest of a folder's name; None if it is not named so.

    >>> repeats_and_subject("10_sks dog"), repeats_and_subject("2019_summer")
    ((10, 'sks dog'), None)
    """
    found = _REPEATED.fullmatch(folder)
    return None if found is None else (int(found[1]), found[2].strip())


def is_regularization(folder: str) -> bool:
    """Return True if a folder's name says that its images are for prior preservation.

    >>> is_regularization("1_reg"), is_regularization("reg"), is_regularization("region")
    (True, True, False)
    """
    return _REGULARIZATION.fullmatch(folder) is not None


def naming_notes(images: Iterable[str]) -> list[str]:
    """Return what packing a folder as it is does to images (paths in the folder) in subfolders that are named so."""
    folders = sorted({image.partition("/")[0] for image in images if "/" in image})
    notes = []
    if repeated := [name for name in folders if repeats_and_subject(name) and not is_regularization(name)]:
        notes.append(
            f"{_some(repeated)}: no repeats are read from folder names here; "
            "if they are meant, pack a data set file with `kohya_folders = true` instead"
        )
    if regularization := list(filter(is_regularization, folders)):
        notes.append(
            f"{_some(regularization)}: packed as ordinary training images; to weigh regularization images less, move them out "
            "of the source, pack them into a store of their own, and train with a weight (--store NAME@0.5)"
        )
    return notes


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
