"""The entries of a shard's captions and rows, by group, verified one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.errors import CorruptError
from bucketline.store.format.columns import EntriesOf
from bucketline.store.format.text_block import TEXT_GROUP

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from bucketline.store.format.text_block import Entry
    from bucketline.store.read.store import OpenShards


def caption_entries(store: OpenShards, shard: int, row: int, digest: bytes | None = None) -> dict[str, Entry]:
    """Return a caption's entries, in `text` and in the ragged groups of captions. `digest` is the caption's, if known."""
    found = {spec.group: store.entry(spec, shard, row) for spec in store.groups.values() if spec.of is EntriesOf.CAPTIONS}
    digest = found[TEXT_GROUP].digest if digest is None else digest
    if other := [group for group, entry in found.items() if entry.digest != digest]:
        raise CorruptError(
            f"shard {store.shards[shard].name}: {store.groups[other[0]].label} {row} is not that of the expected caption; run "
            "`store verify`"
        )
    return found


def row_entries(store: OpenShards, shard: int, row: Mapping[str, Any]) -> dict[str, Entry | None]:
    """Return a row's entries in the groups of rows; None of those of which it may lack one and does.

    `row` has the columns by name, as bytes or as numbers.
    """
    found: dict[str, Entry | None] = {}
    for group, spec in store.groups.items():
        if spec.of is EntriesOf.ROWS:
            own = row[group]
            number = int.from_bytes(own, "little", signed=True) if isinstance(own, bytes) else int(own)
            found[group] = None if number == -1 and spec.optional else store.entry(spec, shard, number)
    return found
