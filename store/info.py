"""What a store holds, as `store info` reports it."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.store.reader import Store


def info(store: Store) -> dict[str, Any]:
    """Give what `store info --json` prints."""
    manifest = store.manifest
    return {
        "format_version": manifest.format_version,
        "generation": manifest.generation,
        "samples": manifest.samples,
        "payload_bytes": manifest.payload_bytes,
        "disk_bytes": disk_bytes(store.path),
        "shards": len(manifest.shards),
        "encoders": manifest.encoders,
        "rules": manifest.rules,
        "max_captions": manifest.max_captions,
        "buckets": [
            {
                "name": bucket.name,
                "height_px": bucket.height_px,
                "width_px": bucket.width_px,
                "split": bucket.split,
                "rows": bucket.num_rows,
                "columns": {c.name: {"dtype": c.dtype, "shape": list(c.shape)} for c in bucket.columns},
            }
            for bucket in store.buckets()
        ],
    }


def disk_bytes(store: Path) -> int:
    """Give the bytes that all files of a store's folder take on the disk: blocks allocated, of 512 bytes each.

    Locks are left out: they hold their holder's name only while it writes, so that a packing run would count its own.
    """
    total = 0
    for path in store.rglob("*"):
        try:
            status = path.lstat()
        except FileNotFoundError:  # a file of a pack that is under way
            continue
        if stat.S_ISREG(status.st_mode) and path.suffix != ".lock":
            total += status.st_blocks * 512
    return total
