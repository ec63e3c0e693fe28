"""Rules of a pack run: what counts as unchanged, how many rejects are too many, the split of an image."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from bucketline.errors import UsageError
from bucketline.ingest.held_out import HeldOut, held_out

if TYPE_CHECKING:
    from bucketline.ingest.sources.source import SourceItem


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


def split_of(item: SourceItem, rule: HeldOut) -> str:
    """Return `val` for an image that its source or the hash holds out, else `train`."""
    return "val" if item.held_out or held_out(item.id, rule.fraction, rule.by) else "train"
