"""The share of a store's rows that a pass reads, if it is not a whole number of times all of them.

A pass of a bucket has `per_pass` places for such a store. The places of all passes, one after the other, go through all of the
store's rows again and again, each time in another order: so every row comes once before any comes twice, and every pass has
its share. A row's place is a pure function of the seed and the number of the round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bucketline.loader.plan.permutation import extend_key, permute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bucketline.store.read.store import StoreRows

_ROUND = 3  # purpose of the keys derived from a bucket's key


def rows_per_pass(num_rows: int, share: float) -> int:
    """Return how many of a store's rows in a bucket a pass reads; at least one, if it has any.

    >>> rows_per_pass(10, 0.25), rows_per_pass(3, 0.1), rows_per_pass(10, 2.5)
    (3, 1, 25)
    """
    return max(int(num_rows * share + 0.5), min(num_rows, 1))


class PassRows:
    """The rows of a bucket's passes, by the numbers 0 to N - 1 that the order deals with; N rows come in a pass."""

    def __init__(self, parts: Sequence[StoreRows], key: int, *, is_mixed: bool) -> None:
        """`key` is the bucket's. `is_mixed`: rounds are; otherwise neighbouring rows stay together."""
        self._parts, self._key, self._is_mixed = tuple(parts), key, is_mixed
        self._ends = np.cumsum([part.per_pass for part in parts])

    def rows(self, numbers: NDArray[np.int64], pass_number: int) -> NDArray[np.int64]:
        """Return the bucket's row for each number in a pass."""
        part_of = np.searchsorted(self._ends, numbers, side="right")
        rows = np.empty_like(numbers)
        for at, part in enumerate(self._parts):
            own = np.flatnonzero(part_of == at)
            if not len(own):
                continue
            within = numbers[own] - (int(self._ends[at]) - part.per_pass)
            before, begin = divmod(pass_number * part.per_pass, part.num_rows)  # Python's integers: passes may be many
            rounds, places = np.divmod(within + begin, part.num_rows)
            for number in np.unique(rounds).tolist():
                of_round = rounds == number
                places[of_round] = self._mixed(places[of_round], part, at, before + number)
            rows[own] = part.first + places
        return rows

    def _mixed(self, places: NDArray[np.int64], part: StoreRows, at: int, number: int) -> NDArray[np.int64]:
        return permute(places, part.num_rows, self._key_of(at, number)) if self._is_mixed else places

    def _key_of(self, at: int, number: int) -> int:
        return extend_key(extend_key(extend_key(self._key, _ROUND), at), number)
