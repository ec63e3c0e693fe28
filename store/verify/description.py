"""Compare a shard's sidecars and its manifest entry with its file, described again as sealing describes it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import StoreError
from bucketline.store.format.sample_record import decode_record
from bucketline.store.format.text_block import TEXT_GROUP
from bucketline.store.shard.row_locator import LINE_CHECKSUM
from bucketline.store.shard.sidecar import PAGE_CHECKSUM, PagedFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bucketline.store.format.manifest_entries import FileEntry
    from bucketline.store.shard.reader import SealedShard
    from bucketline.store.verify.faults import Faults

OF_LINES = (LINE_CHECKSUM, "line_bytes")
_OTHER_ROW = "the index leads to another row from the row's sample"
_OTHER_RECORD = "the index does not lead to the sample's record"
_OF_INDEX = {  # what an entry says that is another than the file's
    "digest": "the index has no entry for the row's sample",
    "row": _OTHER_ROW,
    "bucket": _OTHER_ROW,
    "record_offset": _OTHER_RECORD,
    "record_bytes": _OTHER_RECORD,
}


def sidecar_differences(listed: PagedFile, again: PagedFile) -> Iterator[tuple[str, int | None, object, object]]:
    """Yield what a sidecar says otherwise than the one that was made again: the name of a field of its metadata or of a
    tensor, the position in the tensor if both have equal forms, and both values.
    """  # noqa: D205
    for name, value in again.metadata.items():
        old = listed.metadata.get(name)
        if old != value:
            yield name, None, old, value
    for name in again.names:
        if name == PAGE_CHECKSUM:
            continue
        new = again.column(name)
        old = listed.column(name) if listed.has(name) else np.empty(0)
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            yield name, None, f"{old.dtype} {list(old.shape)}", f"{new.dtype} {list(new.shape)}"
            continue
        for at in np.flatnonzero((old != new).reshape(len(new), -1).any(axis=1)).tolist():
            yield name, at, old[at].tolist(), new[at].tolist()


def compare_sidecar(shard: SealedShard, listed: FileEntry, again: PagedFile, faults: Faults) -> None:
    """Add what an intact sidecar of a shard, the extents or the index, says otherwise than the one that was made again."""
    if again.digest() == listed.digest:
        return
    path, named = Path(again.path), set()
    for name, at, old, new in sidecar_differences(PagedFile(path, listed.num_bytes, again.metadata["format"]), again):
        if name in OF_LINES:  # compared as the file is read
            continue
        if at is None:
            faults.of_file(f"{path.name}: its {name} is {old!r:.100}, expected {new!r:.100}")
        elif again.has("offset"):
            faults.add(f"the extents give the block's {name} as {old}, expected {new}", *_block_at(again, at))
        elif name.startswith("caption_"):
            faults.add("the index does not lead to this caption", TEXT_GROUP, row=int(again.column("caption_row")[at]))
        elif at not in named:
            named.add(at)
            error = _OF_INDEX.get(name, "the sample's record and its index entry differ")
            bucket, row = again.metadata["groups"][int(again.column("bucket")[at])], int(again.column("row")[at])
            faults.add(error, bucket, row=row, sample=_sample_at(shard, again, at))


def _block_at(extents: PagedFile, at: int) -> tuple[str, int]:
    for group, place in extents.metadata["groups"].items():
        if 0 <= at - place["first_block"] < place["blocks"]:
            return group, at - place["first_block"]
    raise AssertionError(f"no group has block {at}")


def _sample_at(shard: SealedShard, index: PagedFile, at: int) -> str | None:
    with suppress(StoreError):
        offset, num_bytes = (int(index.column(name)[at]) for name in ("record_offset", "record_bytes"))
        return decode_record(shard.read(offset, num_bytes), "").id
    return None
