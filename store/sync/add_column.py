"""`add_column`: a column for rows that are written already, of a store on a disk or at a URL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.option_types import expect
from bucketline.store.change.add_column import ColumnRequest, add_to
from bucketline.store.sync.working import target_at
from bucketline.store.write.target import LocalTarget

if TYPE_CHECKING:
    from bucketline.store.change.add_column import ColumnAdded, Values
    from bucketline.store.remote.urls import RemoteOptions


def add_column(
    place: Path | str,
    name: str,
    values: Values,
    *,
    fill: Any = None,  # noqa: ANN401 - a number or an array
    ignore_unknown: bool = False,
    remote: RemoteOptions | None = None,
    work: Path | str | None = None,
) -> ColumnAdded:
    """Add a column to the rows of a store, and publish a generation with it; nothing that is there is written again.

    `place` is a folder or a URL. `name` is a role: `mask`, `audio`, `control/NAME`, `reference/NAME`, `features/NAME`, or one
    of these (or `target`) with `/flipped` appended. `values` are pairs of a sample's id and its array or tensor, in any order;
    a mapping of these; or a function that returns the array of an id, or None, which is called shard by shard. All have one
    dtype, and those of a bucket one shape.

    Rows without a value are refused, or get `fill`, a number or an array. Ids that the store lacks are refused, or left out
    with `ignore_unknown`. Rows that have the column keep it, so a second call with the same values changes nothing, and one
    after new rows were packed gives it to these. A killed call leaves the shards that it has finished to the next one of the
    same name.

    `remote` is how to reach a URL, and `work` the folder on this machine in which its files are made.

    Raises:
        UsageError: if the column cannot be added, a value does not fit, or an id is given twice.
        StoreError: if rows have no value, ids are unknown, or something cannot be read or written; nothing is published.
        LockedError: if another process adds a column, or changes the store when the values are to be published.
    """
    expect("a store's place", place or None, str | Path, "a path or a URL, such as 'photos.store'")
    request = ColumnRequest(role=name, values=values, fill=fill, ignore_unknown=ignore_unknown)
    expect("ignore_unknown", ignore_unknown, bool, "True or False")
    target = target_at(place, remote, work)
    if isinstance(target, LocalTarget):
        return add_to(target.path, request)
    with target.held():
        return add_to(target.folder, request, target.work)
