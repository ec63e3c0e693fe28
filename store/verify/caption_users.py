"""Damaged captions and ragged entries of a shard, and the samples that use them: they have no names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bucketline.command_line import counted
from bucketline.store.format.text_block import TEXT_GROUP

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from bucketline.store.verify.extents import BlockPlace
    from bucketline.store.verify.faults import Faults

    Numbers = Mapping[str, NDArray[np.int32]]


@dataclass(slots=True, kw_only=True)
class _Damage:
    error: str
    place: BlockPlace
    caption: int | None  # or another group's entry; None if none of the block's are readable
    rows: int = 0  # that use it
    samples: list[str] = field(default_factory=list)  # ids of these rows, if known


class CaptionUsers:
    """Collects damaged captions and ragged entries, then the rows that use them, and reports both at the end.

    A shard's blocks of these precede its buckets' blocks in key order. A block's numbers say what its rows use: for each group
    the captions, or entries, of its rows, `[K, V]`.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._found: list[_Damage] = []

    @property
    def has_any(self) -> bool:
        """True if a caption or an entry is damaged."""
        return bool(self._found)

    def add(self, error: str, place: BlockPlace, caption: int | None) -> None:
        """Add a damaged caption, or entry, by its number in the shard, or a complete block of them (None)."""
        self._found.append(_Damage(error=error, place=place, caption=caption))

    def rows(self, numbers: Numbers) -> list[int]:
        """Return the indices of rows that use a damaged caption or entry, given their numbers."""
        found = {k for damage in self._found for k in np.flatnonzero(_uses(numbers, damage)).tolist()}
        return sorted(found)

    def note(self, numbers: Numbers, names: Sequence[str | None]) -> None:
        """Add rows as users, given their numbers and their sample ids, None if unknown."""
        for damage in self._found:
            for k in np.flatnonzero(_uses(numbers, damage)).tolist():
                damage.rows += 1
                if (name := names[k]) is not None:
                    damage.samples.append(name)

    def report(self, faults: Faults) -> None:
        """Add a fault for each damaged caption and entry."""
        for damage in self._found:
            verb, group = "uses" if damage.rows == 1 else "use", damage.place.group
            what = "it" if damage.caption is not None else "its captions" if group == TEXT_GROUP else "its entries"
            error = f"{damage.error}; {counted(damage.rows, 'sample')} {verb} {what}"
            faults.add(error, group, damage.place.block, damage.caption, samples=tuple(damage.samples))


def _uses(numbers: Numbers, damage: _Damage) -> NDArray[np.bool_]:
    captions = numbers[damage.place.group]
    first, count = (damage.place.first_row, damage.place.rows) if damage.caption is None else (damage.caption, 1)
    found: NDArray[np.bool_] = np.any((captions >= first) & (captions < first + count), axis=1)
    return found
