"""Damaged captions of a shard and the samples that use them: captions have no names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bucketline.command_line import counted
from bucketline.store.format.text_block import TEXT_GROUP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bucketline.store.verify.extents import BlockPlace
    from bucketline.store.verify.faults import Faults


@dataclass(slots=True, kw_only=True)
class _Damage:
    error: str
    place: BlockPlace
    caption: int | None  # None if none of the block's captions are readable
    rows: int = 0  # that use it
    samples: list[str] = field(default_factory=list)  # ids of these rows, if known


class CaptionUsers:
    """Collects damaged captions, then the rows that use them, and reports both at the end.

    A shard's text blocks precede its buckets' blocks in key order.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._found: list[_Damage] = []

    def add(self, error: str, place: BlockPlace, caption: int | None) -> None:
        """Add a damaged caption by its row in the shard, or a complete text block (None)."""
        self._found.append(_Damage(error=error, place=place, caption=caption))

    def rows(self, captions: NDArray[np.int32]) -> list[int]:
        """Return the indices of rows that use a damaged caption, given their captions `[K, V]`."""
        uses = np.zeros(len(captions), dtype=bool)
        for damage in self._found:
            uses |= _uses(captions, damage)
        found: list[int] = np.flatnonzero(uses).tolist()
        return found

    def note(self, captions: NDArray[np.int32], names: Sequence[str | None]) -> None:
        """Add rows as users, given their captions `[K, V]` and their sample ids, None if unknown."""
        for damage in self._found:
            for k in np.flatnonzero(_uses(captions, damage)).tolist():
                damage.rows += 1
                if (name := names[k]) is not None:
                    damage.samples.append(name)

    def report(self, faults: Faults) -> None:
        """Add a fault for each damaged caption."""
        for damage in self._found:
            verb = "uses" if damage.rows == 1 else "use"
            what = "its captions" if damage.caption is None else "it"
            error = f"{damage.error}; {counted(damage.rows, 'sample')} {verb} {what}"
            faults.add(error, TEXT_GROUP, damage.place.block, damage.caption, samples=tuple(damage.samples))


def _uses(captions: NDArray[np.int32], damage: _Damage) -> NDArray[np.bool_]:
    first, count = (damage.place.first_row, damage.place.rows) if damage.caption is None else (damage.caption, 1)
    found: NDArray[np.bool_] = np.any((captions >= first) & (captions < first + count), axis=1)
    return found
