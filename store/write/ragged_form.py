"""The form of a writer's ragged groups: named arrays of a length of their own, for each caption or each row.

Shape letters: T tokens of an entry (frames, points), which differ from entry to entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from bucketline.errors import UsageError
from bucketline.store.format.columns import RAGGED_PREFIX, EntriesOf
from bucketline.store.format.hashing import caption_digest
from bucketline.store.format.schema import GroupRules, RaggedEntry, column_entries
from bucketline.store.format.text_block import Entry, RaggedSpec, make_caption
from bucketline.store.write.arrays import checked_arrays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.store.format.block import Column
    from bucketline.store.write.arrays import Arrays


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
            self.check(self.columns, self.fixed)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedForm:
    """A store's ragged groups by name."""

    groups: Mapping[str, RaggedGroup]

    @property
    def stored_once(self) -> frozenset[str]:
        """Names of the groups of rows whose equal entries are stored once per shard."""
        return frozenset(name for name in self.named(EntriesOf.ROWS) if self.groups[name].stored_once)

    def named(self, of: EntriesOf) -> list[str]:
        """Return the names of the groups of captions, or of rows."""
        return [name for name, group in self.groups.items() if group.of == of]

    def split(self, values: Arrays) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a caption's arrays of the text columns, and what it has of the groups of captions."""
        own = self.named(EntriesOf.CAPTIONS)
        return {k: v for k, v in values.items() if k not in own}, {k: v for k, v in values.items() if k in own}

    def of_caption(self, item: str, text: str, given: Mapping[str, Any]) -> dict[str, Entry]:
        """Return a caption's entries of all groups of captions.

        Raises:
            UsageError: if one is missing, or its arrays do not fit the group; the message names the caption and the group.
        """
        item, digest = f"{item}, caption {text!r:.80}", caption_digest(text)
        return {name: self._entry(item, name, given.get(name), digest) for name in self.named(EntriesOf.CAPTIONS)}

    def of_row(self, item: str, given: Mapping[str, Any]) -> dict[str, Entry | None]:
        """Return a row's entries of all groups of rows, None where it has none.

        Raises:
            UsageError: if one is missing or strange, or its arrays do not fit the group; the message names the group.
        """
        own = self.named(EntriesOf.ROWS)
        if strange := sorted(given.keys() - set(own)):
            where = "what belongs to a caption is given with it" if strange[0] in self.groups else "leave it out"
            raise UsageError(f"{item} has the ragged group {strange[0]!r:.80}, the rows of the store have {own}; {where}")
        lacking = {name for name in own if self.groups[name].optional and given.get(name) is None}
        return {name: None if name in lacking else self._entry(item, name, given.get(name), None) for name in own}

    def _entry(self, item: str, name: str, given: Any, digest: bytes | None) -> Entry:  # noqa: ANN401 - arrays, or one of them
        group, item = self.groups[name], f"{item}, ragged group {name!r}"
        columns = (*group.columns, *group.fixed)
        if given is None:
            raise UsageError(f"{item} is missing; give its arrays {[column.name for column in columns]}")
        if not isinstance(given, Mapping):
            if len(columns) > 1:
                names = [column.name for column in columns]
                raise UsageError(f"{item} has the columns {names}, got {type(given).__name__}; give an array for each by name")
            given = {columns[0].name: given}
        finite = set() if group.allow_nonfinite else {column.name for column in columns}
        arrays = checked_arrays(item, [(column.name, column.dtype) for column in columns], given, finite)
        try:
            return make_caption(group.spec(name), digest, arrays, arrays)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{item}: {error}; convert it, or write to a store whose columns it fits") from error
