"""Stores of millions of rows without their payload, to see what opening costs.

Each shard begins as a real one of one row, written and published by the store's own writer. Its sidecars are then written
anew for as many rows as wanted, its file is extended by a hole, and the manifest says so. Every row can be located and every
sample found by its digest; the first row of each shard reads as it was written. The rest are holes, so that `store verify`
would rightly name the files' digests.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.bench.synthetic_store import StoreShape, make_store
from bucketline.store.digests import DIGEST_BYTES, bytes_digest
from bucketline.store.manifest import FileEntry, GroupEntry, read_manifest, write_manifest
from bucketline.store.paged_file import PAGE_CHECKSUM, encode_paged
from bucketline.store.sealed_shard import KEY, SealedShard
from bucketline.store.tensor_file import DTYPES, read_header

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.block import BlockSpec
    from bucketline.store.manifest import ShardEntry

LATENT_SHAPE = (4, 32, 32)  # 8 KiB a row
PAGE = 4096
VALUE_AT = 16  # a large value's begin in its first page

_Tensors = dict[str, tuple[str, "NDArray[Any]"]]  # name → dtype, values


def kept_sparse_store(folder: Path, num_shards: int, num_rows: int) -> Path:
    """Give a sparse store in `folder`, made unless it is there already."""
    path = folder / f"sparse-{num_shards}x{num_rows}.store"
    if not path.exists():
        print(f"making {path.name}", file=sys.stderr)
        make_sparse_store(path, num_shards, num_rows)
    return path


def make_sparse_store(path: Path, num_shards: int, num_rows: int) -> None:
    """Make a store of `num_rows` rows in `num_shards` shards; at least one row in each."""
    shape = StoreShape(num_shards=num_shards, rows_per_shard=1, latent_shape=LATENT_SHAPE, tokens=None)
    making = path.with_suffix(".making")
    make_store(making, shape)
    manifest = read_manifest(making)
    cuts = [num_rows * n // num_shards for n in range(num_shards + 1)]
    random = np.random.default_rng(0)
    shards = [
        _inflate(SealedShard(making, entry), shape.spec, max(1, end - begin), random)
        for entry, (begin, end) in zip(manifest.shards, pairwise(cuts), strict=True)
    ]
    write_manifest(making, dataclasses.replace(manifest, generation=manifest.generation + 1, shards=tuple(shards)))
    making.rename(path)


def _inflate(shard: SealedShard, spec: BlockSpec, num_rows: int, random: np.random.Generator) -> ShardEntry:
    """Give a shard of one row more rows, without their payload; give its new entry."""
    entry = shard.entry
    group = entry.groups[spec.bucket]
    num_blocks = 1 + -(-(num_rows - 1) // spec.rows_per_block)
    stride = -(-(VALUE_AT + spec.block_bytes(spec.rows_per_block)) // PAGE) * PAGE
    end_of_file = -(-entry.lmdb.num_bytes // PAGE) * PAGE
    grown = GroupEntry(rows=num_rows, blocks=num_blocks, first_block=group.first_block, dropped=0)
    extents = _inflate_extents(shard.paths.extents, spec, grown, end_of_file + VALUE_AT, stride)
    index = _inflate_index(shard.paths.index, num_rows, random)
    num_bytes = end_of_file + (num_blocks - 1) * stride
    os.truncate(shard.paths.lmdb, num_bytes)
    return dataclasses.replace(
        entry,
        lmdb=FileEntry(num_bytes=num_bytes, digest=entry.lmdb.digest),
        extents=extents,
        index=index,
        groups={**entry.groups, spec.bucket: grown},
        samples=num_rows,
        record_bytes=entry.record_bytes * num_rows,
    )


def _inflate_extents(path: Path, spec: BlockSpec, group: GroupEntry, first_offset: int, stride: int) -> FileEntry:
    tensors, metadata = _read(path)
    assert all(len(values) == group.first_block + 1 for _, values in tensors.values()), "the bucket's block is the last"
    block = np.arange(group.blocks - 1)
    rows = np.full(group.blocks - 1, spec.rows_per_block)
    if group.blocks > 1:
        rows[-1] = group.rows - 1 - spec.rows_per_block * (group.blocks - 2)
    more = {
        "offset": first_offset + block * stride,
        "length": spec.header_bytes + rows * spec.row_bytes,
        "first_row": 1 + block * spec.rows_per_block,
        "rows": rows,
    }
    grown = {name: (dtype, np.append(values, more[name].astype(values.dtype))) for name, (dtype, values) in tensors.items()}
    metadata["groups"][spec.bucket] |= {"blocks": group.blocks, "rows": group.rows}
    return _write(path, grown, metadata)


def _inflate_index(path: Path, num_rows: int, random: np.random.Generator) -> FileEntry:
    """Repeat the one sample's entry, with row numbers and, but for its own, digests drawn at random."""
    tensors, metadata = _read(path)
    own = tensors["digest"][1].tobytes()
    drawn = random.integers(0, 256, (num_rows - 1, DIGEST_BYTES), dtype=np.uint8).reshape(-1).view(KEY)
    keys = np.append(drawn, np.frombuffer(own, dtype=KEY))
    order = np.argsort(keys)
    rows = np.append(np.arange(1, num_rows), 0)
    grown: _Tensors = {}
    for name, (dtype, values) in tensors.items():
        if name.startswith("caption_"):
            grown[name] = (dtype, values)
        elif name == "digest":
            grown[name] = (dtype, keys[order].view(np.uint8).reshape(-1, DIGEST_BYTES))
        elif name == "row":
            grown[name] = (dtype, rows[order])
        else:
            grown[name] = (dtype, np.repeat(values, num_rows, axis=0))
    return _write(path, grown, metadata)


def _read(path: Path) -> tuple[_Tensors, dict[str, Any]]:
    """Read a sidecar's tensors in file order, its pages' checksums left out, and its metadata."""
    data = path.read_bytes()
    tensors, texts, header_bytes = read_header(data, len(data), str(path))
    values: _Tensors = {
        tensor.name: (
            tensor.dtype,
            np.frombuffer(data[header_bytes + tensor.begin : header_bytes + tensor.end], DTYPES[tensor.dtype]).reshape(
                tensor.shape
            ),
        )
        for tensor in tensors
        if tensor.name != PAGE_CHECKSUM
    }
    return values, {name: json.loads(text) for name, text in texts.items()}


def _write(path: Path, tensors: _Tensors, metadata: dict[str, Any]) -> FileEntry:
    data = encode_paged([(name, dtype, values) for name, (dtype, values) in tensors.items()], metadata)
    path.write_bytes(data)
    return FileEntry(num_bytes=len(data), digest=bytes_digest(data))
