"""Verification of a filled micro-batch against the checksums of its rows, captions and ragged entries. Letters: B rows."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.loader.collate.buffer_pool import carve
from bucketline.loader.collate.gather import as_bytes
from bucketline.store.format.block import ID
from bucketline.store.format.text_block import delivered
from bucketline.store.read.preadv import check_added, check_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.loader.collate.gather import Gather
    from bucketline.loader.collate.window import CopyPlan, RaggedRows
    from bucketline.store import Bucket
    from bucketline.store.read.store import OpenShards


def verify_batch(store: OpenShards, gather: Gather, copy_plan: CopyPlan, buffer: Tensor) -> None:
    """Verify the gathered contents of a buffer against the store's checksums."""
    tensors = carve(buffer, copy_plan.layout.fields)
    located, spec = copy_plan.batch.located, copy_plan.batch.bucket.spec
    whole = {name: values[copy_plan.begin : copy_plan.end] for name, values in copy_plan.stored.items()}  # [B, row_bytes] each
    for column in spec.columns:  # those that were not requested are read for this check
        if column.name not in whole:
            whole[column.name] = gather.read(located.shard, located.offsets(spec, column.name), column.row_bytes)
    flipped = tensors["flipped"].numpy()
    for requested in copy_plan.columns:
        delivered = as_bytes(tensors[requested.field])
        for name, own in ((requested.name, ~flipped), (requested.mirrored, flipped)):
            if own.any() and name in located.added:  # which has the checksum of its value and of the row's id
                check_added(store, located.where(own), name, delivered[own], whole[ID][own])
            elif own.any() and delivered.size:
                whole[name][own] = delivered[own]
    check_rows(store, located, whole)
    for rows in copy_plan.entries:
        _check_entries(store, copy_plan, rows, tensors)


def _check_entries(store: OpenShards, copy_plan: CopyPlan, rows: RaggedRows, tensors: Mapping[str, Tensor]) -> None:
    """Compare the entries of a group with those read and verified one by one; a row without one has zeros."""
    group, spec = rows.group, rows.group.spec
    tokens = {own.name: as_bytes(tensors[group.token_field(own.name)]) for own in group.shown.tokens}
    fixed = {own.name: as_bytes(tensors[group.fixed_field(own.name)]) for own in group.shown.fixed}
    ordinals, numbers = (
        rows.each_row(own, -1)[copy_plan.begin : copy_plan.end].tolist() for own in (rows.located.shard, rows.located.row)
    )
    for n, (shard, number) in enumerate(zip(ordinals, numbers, strict=True)):
        if number < 0:
            is_same = not any(np.any(found[n]) for found in (*tokens.values(), *fixed.values()))
        else:
            expected = store.entry(spec, shard, number)
            expected = delivered(spec, expected) if group.shown == spec.delivered else expected
            is_same = all(_begins_with(found[n], expected.tokens[name]) for name, found in tokens.items())
            is_same &= all(found[n].tobytes() == expected.fixed[name] for name, found in fixed.items())
        if not is_same:
            where = f"shard {store.shards[shard].name}, " if number >= 0 else ""
            raise CorruptError(f"{where}{spec.label} {number}: it changed while it was read")


def _begins_with(found: NDArray[np.uint8], own: bytes) -> bool:
    """Return whether bytes are a caption's own and then zeros."""
    return found[: len(own)].tobytes() == own and not np.any(found[len(own) :])


def name_sample(store: OpenShards, bucket: Bucket, rows: NDArray[np.int64], read: Callable[[int], object]) -> str:
    """Return a message prefix that names the first of a batch's rows, `[B]`, that cannot be read; "" if all are readable now.

    `read` reads one row, by its index in the batch. A sample's name comes from its record. If the record cannot be read
    either, the prefix names shard and row.
    """
    for n, row in enumerate(rows.tolist()):
        try:
            read(n)
        except StoreError:
            return f"{_name(store, bucket, row)}: "
    return ""


def _name(store: OpenShards, bucket: Bucket, row: int) -> str:
    ordinal, first = bucket.shard_of(row)
    shard = store.shards[ordinal]
    with suppress(StoreError):
        own = int(store.table.live_rows(bucket.name, np.array([ordinal]), np.array([row - first]))[0])
        name = shard.name_of(bucket.name, own)
        return f"row {own} in shard {shard.name}" if name is None else f"sample {name!r:.200}, row {own} in shard {shard.name}"
    return f"live row {row - first} in shard {shard.name}"
