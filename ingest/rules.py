"""Rules of a pack run: what counts as unchanged, how many rejects are too many, what is held out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import ClassVar

from bucketline.errors import UsageError
from bucketline.option_value import A_SHARE, OptionValue
from bucketline.store.format.block import draw


class Check(StrEnum):
    """How to detect unchanged images. Captions are always compared."""

    SIZE_TIME = "size-time"
    CONTENT = "content"


class Phases(StrEnum):
    """How a pack orders its encoders."""

    AUTO = "auto"  # by the weights' sizes and the free memory
    ONE = "one"
    TWO = "two"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Maximum number of rejected or pruned images: a count, a fraction of all, the larger of both, or no limit."""

    count: int | None = None
    fraction: float | None = None

    @classmethod
    def parse(cls, option: str, text: str) -> Limit:
        """Parse `10` as a count and `0.01` as a fraction; the error names `option`.

        >>> Limit.parse("--max-rejects", "0.25").allows(1, of=4), Limit.parse("--max-rejects", "1").allows(2, of=4)
        (True, False)
        """
        if re.fullmatch(r"[0-9]{1,18}", text):
            return cls(count=int(text))
        if re.fullmatch(r"(0?\.[0-9]{1,18}|1\.0{1,18}|0\.)", text):
            return cls(fraction=float(text))
        raise UsageError(f"{option} is {text!r}, expected a count such as 10 or a fraction such as 0.01")

    def allows(self, number: int, *, of: int) -> bool:
        """Return True if this many of all are within the limit.

        >>> [Limit(count=10, fraction=0.1).allows(number, of=200) for number in (10, 20, 21)]
        [True, True, False]
        """
        if self.count is None and self.fraction is None:
            return True
        return number <= max(self.count or 0, (self.fraction or 0.0) * of)

    def __str__(self) -> str:
        limits = [f"{limit:g}" for limit in (self.fraction, self.count) if limit is not None]
        return f"{' or '.join(limits)}{', whichever is more' * (len(limits) > 1)}"


DEFAULT_MAX_PRUNE = Limit(count=10, fraction=0.1)
"""Limit of `--prune` without a value.

A missing disk whose mount point is missing too looks like deleted images, and would cost most of a store. Ten images are
encoded again in seconds, and a small source loses a larger share whenever somebody cleans it up.
"""


PRUNE = "some"
"""The value of `--prune` without one."""


def reject_limit(text: str | None) -> Limit:
    """Return the limit of `--max-rejects`; None sets none."""
    return Limit() if text is None else Limit.parse("--max-rejects", text)


def prune_limit(text: str) -> Limit:
    """Return the limit of `--prune`, of the store's samples; `PRUNE` stands for the usual one."""
    return DEFAULT_MAX_PRUNE if text == PRUNE else Limit.parse("--prune", text)


# -------------------------------------------------------------------------------------------------------------------- held out


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
