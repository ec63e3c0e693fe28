"""Whether two paths are one place, or one lies in the other."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path


class Overlap(StrEnum):
    """How one path lies to another."""

    SAME = "same"
    INSIDE = "inside"
    AROUND = "around"


def overlap(one: Path, other: Path) -> Overlap | None:
    """Say how `one` lies to `other`; None where they have nothing in common.

    They are compared after links, `..` and, by inode, after anything else that gives a folder two names.
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
    """Say whether two resolved paths are one place; by inode where both exist, else by name regardless of case."""
    try:
        return one.samefile(other)
    except OSError:
        return os.fsencode(one).lower() == os.fsencode(other).lower()
