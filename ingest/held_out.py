"""The held-out samples: a share of all, chosen by a stable hash."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from bucketline.errors import UsageError
from bucketline.store.format.hashing import draw

if TYPE_CHECKING:
    from bucketline.typed_json import Json


class SplitBy(StrEnum):
    """The key that the split hashes: the sample id, or the sample's folder (crops of one photograph stay together)."""

    ID = "id"
    FOLDER = "folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The share of the samples that is held out, and by what it is drawn."""

    fraction: float = 0.0
    by: SplitBy = SplitBy.ID

    @classmethod
    def parse(cls, text: str) -> HeldOut:
        """Return what `--val-fraction` names: `0.02`, or `0.02:folder`.

        >>> HeldOut.parse("0.02:folder")
        HeldOut(fraction=0.02, by=<SplitBy.FOLDER: 'folder'>)

        Raises:
            UsageError: if it is not a fraction, or is drawn by something else.
        """
        number, colon, by = text.partition(":")
        try:
            fraction = float(number)
        except ValueError:
            fraction = -1.0
        if not 0.0 <= fraction <= 1.0:
            raise UsageError(f"--val-fraction is {text}, expected 0 to 1, such as 0.02, or 0.02:folder")
        if colon and by not in set(SplitBy):
            raise UsageError(f"--val-fraction is {text}, expected {' or '.join(f'{number}:{one}' for one in SplitBy)}")
        return cls(fraction=fraction, by=SplitBy(by) if colon else SplitBy.ID)

    def as_json(self) -> dict[str, Json]:
        """Return what a manifest records of it."""
        return {"val_fraction": self.fraction, "by": self.by.value}

    def __str__(self) -> str:
        return f"{self.fraction}" if self.by is SplitBy.ID else f"{self.fraction}:{self.by}"


def held_out(sample_id: str, val_fraction: float, by: SplitBy) -> bool:
    """Return True if a sample belongs to the held-out split.

    The key (the id, or its parent folder, `.` at the source's root) is hashed to 64 bits;
    the lowest `val_fraction` of the range is held out. Adding samples never moves an existing one to the other split.

    >>> held_out("cats/a.png", 0.5, SplitBy.FOLDER) == held_out("cats/b.png", 0.5, SplitBy.FOLDER)
    True
    """
    key = sample_id if by is SplitBy.ID else str(PurePosixPath(sample_id).parent)
    return draw(key, "split") < int(val_fraction * 2**64)
