"""The report of `store info`."""

from __future__ import annotations

import stat
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bucketline.store.format.block import RAGGED_PREFIX
from bucketline.store.read.files import files_of
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bucketline.store.read.files import LostShard
    from bucketline.store.read.store import Store


def info(store: Store, lost: Sequence[LostShard] = ()) -> dict[str, Any]:
    """Return the JSON report of `store info` for a store and its lost shards."""
    manifest = store.manifest
    roles = {name: asdict(column) for name, column in manifest.columns.items()}
    roles |= {name: {"role": column.role, "encoder": None, "optional": False} for name, column in manifest.added.items()}
    return {
        "format_version": manifest.format_version,
        "generation": manifest.generation,
        "samples": manifest.samples,
        "payload_bytes": manifest.payload_bytes,
        "disk_bytes": _stored_bytes(store),
        "shards": len(manifest.shards),
        "lost_shards": [asdict(shard) for shard in lost],
        "encoders": manifest.encoders,
        "rules": manifest.rules,
        "max_captions": manifest.max_captions,
        "text": {
            name: {"dtype": c.dtype, "shape": list(c.shape)}
            for name, c in sorted({**manifest.text.tokens, **manifest.text.fixed}.items())
        },
        "text_error": encode(manifest.text_error),
        "ragged": {
            name: {
                **{key: value for key, value in asdict(group).items() if key != "header_bytes"},
                "entries": sum(own.rows for shard in manifest.shards if (own := shard.groups.get(RAGGED_PREFIX + name))),
                "max_tokens": store.max_entry_tokens[name],
            }
            for name, group in manifest.ragged.items()
        },
        "added": {
            name: {"role": column.role, "rows": sum(one.live_samples for one in manifest.shards if name in one.added)}
            for name, column in manifest.added.items()
        },
        "buckets": [
            {
                "name": bucket.name,
                **bucket.axes,
                "axes": list(bucket.axes),
                "split": bucket.split,
                "rows": bucket.num_rows,
                "columns": {
                    c.name: {"dtype": c.dtype, "shape": list(c.shape), **roles.get(c.name, {})} for c in bucket.columns
                },
            }
            for bucket in store.buckets()
        ],
    }


def _stored_bytes(store: Store) -> int:
    """Return the bytes that a store takes: of a disk's allocated ones, of a web server's, which lists nothing, the shards'."""
    if store.source is None:
        return disk_bytes(store.path)
    if store.folder.is_read_only:
        return sum(expected.num_bytes for entry in store.manifest.shards for _, expected in files_of(store.path, entry))
    return sum(file.num_bytes for file in store.folder.names())


def disk_bytes(store: Path) -> int:
    """Return the disk space allocated to a store's files, in bytes (512 per block).

    Lock files are excluded: they are non-empty only while held, so a packing run would count its own.
    """
    total = 0
    for path in store.rglob("*"):
        try:
            status = path.lstat()
        except FileNotFoundError:  # a concurrent pack has removed the file
            continue
        if stat.S_ISREG(status.st_mode) and path.suffix != ".lock":
            total += status.st_blocks * 512
    return total
