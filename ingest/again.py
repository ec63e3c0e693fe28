"""Running again over a source: what counts as unchanged, and how many rejects are too many."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from bucketline.errors import UsageError


class Check(StrEnum):
    """What is compared to see whether an image is the one that was packed. Its captions always are."""

    SIZE_TIME = "size-time"
    CONTENT = "content"


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectLimit:
    """How many images may be rejected: a count, a fraction of those found, or any number."""

    count: int | None = None
    fraction: float | None = None

    @classmethod
    def parse(cls, text: str | None) -> RejectLimit:
        """Read `10` as a count and `0.01` as a fraction; no text sets no limit.

        Raises:
            UsageError: where it is neither.

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
        """Say whether so many rejects are not too many."""
        if self.count is not None:
            return rejected <= self.count
        return self.fraction is None or rejected <= self.fraction * found
