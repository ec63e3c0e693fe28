"""`add_column`: a column for rows that are written already, of a store on a disk or at a URL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.files.locks import FileLock
from bucketline.option_types import expect
from bucketline.store.change.add_column import ColumnRequest, add_to_folder, make_column, publish_column
from bucketline.store.format.manifest import read_manifest
from bucketline.store.remote.generations import newest_generation
from bucketline.store.sync.mirror import naming
from bucketline.store.sync.place import WritePlace
from bucketline.store.write.column_shard import ADDING_LOCK
from bucketline.store.write.publish import changing

if TYPE_CHECKING:
    from bucketline.store.change.add_column import ColumnAdded, Values
    from bucketline.store.format.manifest import Manifest
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
    target = WritePlace(place, remote, work)
    if target.objects is None or target.working is None:
        return add_to_folder(target.path, request)
    path, working = target.path, target.working
    newest_generation(target.objects)  # which raises if there is none
    with working.held(), naming(target.objects, path), FileLock(path / "pending" / ADDING_LOCK):
        made = make_column(working.open(read_manifest(path)), request)

        def publish() -> Manifest:
            with changing(path, adopting=False) as manifest:
                return publish_column(path, manifest, made)

        return made.result(working.change(publish))
