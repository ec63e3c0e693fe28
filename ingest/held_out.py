"""The held-out samples: a share of all, chosen by a stable hash."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import ClassVar

from bucketline.option_value import A_SHARE, OptionValue
from bucketline.store.format.block import draw


class SplitBy(StrEnum):
    """The key that the split hashes: the sample id, or the sample's folder (crops of one photograph stay together)."""

    ID = "id"
    FOLDER = "folder"


@dataclass(frozen=True, kw_only=True)
class HeldOut(OptionValue):
    """The share of the samples that is held out, and by what it is drawn.

    >>> HeldOut.parse("0.02:folder", "--val-fraction")
    HeldOut(fraction=0.02, by=<SplitBy.FOLDER: 'folder'>)
    """

    FORMS = ("FRACTION[:BY]",)
    EXPECTED = "0 to 1, such as 0.02, or 0.02:folder"
    LIMITS: ClassVar = {"fraction": A_SHARE}

    fraction: float = 0.0
    by: SplitBy = SplitBy.ID


def held_out(sample_id: str, val_fraction: float, by: SplitBy) -> bool:
    """Return True if a sample belongs to the held-out split.

    The key (the id, or its parent folder, `.` at the source's root) is hashed to 64 bits;
    the lowest `val_fraction` of the range is held out. Adding samples never moves an existing one to the other split.
    `hold_out_one` sees to it that a small source holds out at least one.

    >>> held_out("cats/a.png", 0.5, SplitBy.FOLDER) == held_out("cats/b.png", 0.5, SplitBy.FOLDER)
    True
    """
    return split_draw(sample_id, by) < int(val_fraction * 2**64)


def split_draw(sample_id: str, by: SplitBy) -> int:
    """Return the 64-bit hash that determines a sample's split."""
    return draw(sample_id if by is SplitBy.ID else str(PurePosixPath(sample_id).parent), "split")
