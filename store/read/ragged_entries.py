"""The ragged entries of a shard's captions and rows, verified one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.errors import CorruptError
from bucketline.store.format.columns import RAGGED_PREFIX, EntriesOf

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from bucketline.store.format.text_block import Entry
    from bucketline.store.read.store import Store


def caption_entries(store: Store, shard: int, row: int, digest: bytes) -> dict[str, Entry]:
    """Return a caption's entries in the ragged groups of captions, by name. `digest` is the caption's.

    Raises:
        CorruptError: if one does not match its checksum, or is another caption's.
    """
    found = {name: store.entry(store.ragged_specs[name], shard, row) for name in groups_of(store, EntriesOf.CAPTIONS)}
    if other := [name for name, entry in found.items() if entry.digest != digest]:
        raise CorruptError(
            f"shard {store.shards[shard].name}: entry {row} of {other[0]} is not that of caption {row}; run `store verify`"
        )
    return found


def row_entries(store: Store, shard: int, row: Mapping[str, Any]) -> dict[str, Entry | None]:
    """Return a row's entries in the ragged groups of rows, by name; None of those of which it has none.

    Raises:
        CorruptError: if one does not match its checksum, or the shard does not have it.
    """
    numbers = entry_numbers(store, row)
    return {name: n if n is None else store.entry(store.ragged_specs[name], shard, n) for name, n in numbers.items()}


def entry_numbers(store: Store, row: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the numbers of a row's entries in the ragged groups of rows, by name; None if it may and does lack one.

    `row` has the columns by name, as bytes or as numbers.
    """
    found: dict[str, int | None] = {}
    for name in groups_of(store, EntriesOf.ROWS):
        own = row[RAGGED_PREFIX + name]
        number = int.from_bytes(own, "little", signed=True) if isinstance(own, bytes) else int(own)
        found[name] = None if number == -1 and store.ragged[name].optional else number
    return found


def groups_of(store: Store, of: EntriesOf) -> list[str]:
    """Return the names of the ragged groups of captions, or of rows."""
    return [name for name, group in store.ragged.items() if group.of is of]
