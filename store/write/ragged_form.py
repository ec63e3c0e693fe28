"""The form of a writer's ragged groups: named arrays of a length of their own, for each caption or each row.

Shape letters: T tokens of an entry (frames, points), which differ from entry to entry.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from bucketline.errors import UsageError
from bucketline.store.format.columns import RAGGED_PREFIX, EntriesOf
from bucketline.store.format.schema import GroupRules, RaggedEntry, column_entries
from bucketline.store.format.text_block import RaggedSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.store.format.block import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedGroup(GroupRules):
    """A group of arrays whose first dimension differs from entry to entry: another encoder's tokens, audio, points.

    `columns` are its token columns: an entry has an array `[T, *shape]` of each, all of the same T, 0 or more. `fixed` are
    columns of which an entry has one array `[*shape]`. With `of="captions"` each caption has an entry, which is given with its
    embedding. With `of="rows"` each row has one; `stored_once` stores those that are equal once per shard, and rows may lack an
    `optional` one. An entry has no mirror image: a loader that flips refuses the group, unless `mirrored` is "same".
    """

    columns: Sequence[Column]
    fixed: Sequence[Column] = ()
    allow_nonfinite: bool = False  # whether NaN and infinite values are stored, not refused

    def __post_init__(self) -> None:
        try:
            self.check(self.spec(""))
        except ValueError as error:
            raise UsageError(str(error)) from error

    def spec(self, name: str) -> RaggedSpec:
        """Return the columns of the blocks of the group of this name."""
        return RaggedSpec(tokens=tuple(self.columns), fixed=tuple(self.fixed), group=RAGGED_PREFIX + name)

    def entry(self, name: str) -> RaggedEntry:
        """Return the group in the manifest's form."""
        spec = self.spec(name)
        return RaggedEntry(
            **{rule.name: getattr(self, rule.name) for rule in fields(GroupRules)} | {"of": EntriesOf(self.of)},
            header_bytes=spec.header_bytes,
            tokens=column_entries(spec.tokens),
            fixed=column_entries(spec.fixed),
        )
