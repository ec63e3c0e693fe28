"""Rules of a pack run: what counts as unchanged, how many rejects are too many, which samples are held out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from bucketline.errors import UsageError
from bucketline.store.format.hashing import draw

if TYPE_CHECKING:
    from bucketline.ingest.sources.source import SourceItem


class Check(StrEnum):
    """How to detect unchanged images. Captions are always compared."""

    SIZE_TIME = "size-time"
    CONTENT = "content"


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectLimit:
    """Maximum number of rejected images: a count, a fraction of the images found, or no limit."""

    count: int | None = None
    fraction: float | None = None

    @classmethod
    def parse(cls, text: str | None) -> RejectLimit:
        """Parse `10` as a count and `0.01` as a fraction; None sets no limit.

        Raises:
            UsageError: if it is neither.

        >>> RejectLimit.parse("0.25").allows(1, found=4), RejectLimit.parse("1").allows(2, found=4)
        (True, False)
        """
        if text is None:
            return cls()
        if re.fullmatch(r"[0-9]{1,18}", text):
            return cls(count=int(text))
        if re.fullmatch(r"(0?\.[0-9]{1,18}|1\.0{1,18}|0\.)", text):
            return cls(fraction=float(text))
        raise UsageError(f"--max-rejects is {text!r}, expected a count such as 10 or a fraction such as 0.01")

    def allows(self, rejected: int, *, found: int) -> bool:
        """Return True if this many rejects are within the limit."""
        if self.count is not None:
            return rejected <= self.count
        return self.fraction is None or rejected <= self.fraction * found


class SplitBy(StrEnum):
    """The key that the split hashes: the sample id, or the sample's folder (crops of one photograph stay together)."""

    ID = "id"
    FOLDER = "folder"


def split_of(item: SourceItem, val_fraction: float, by: SplitBy) -> str:
    """Return `val` for an image that its source or the hash holds out, else `train`."""
    return "val" if item.held_out or held_out(item.id, val_fraction, by) else "train"


def held_out(sample_id: str, val_fraction: float, by: SplitBy) -> bool:
    """Return True if a sample belongs to the held-out split.

    The key (the id, or its parent folder, `.` at the source's root) is hashed to 64 bits;
    the lowest `val_fraction` of the range is held out. Adding samples never moves an existing one to the other split.

    >>> held_out("cats/a.png", 0.5, SplitBy.FOLDER) == held_out("cats/b.png", 0.5, SplitBy.FOLDER)
    True
    """
    key = sample_id if by is SplitBy.ID else str(PurePosixPath(sample_id).parent)
    return draw(key, "split") < int(val_fraction * 2**64)
