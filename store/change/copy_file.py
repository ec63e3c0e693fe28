"""Copy a sealed file and verify the copy's digest."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from bucketline.errors import CorruptError
from bucketline.files.copy_bytes import copy_some
from bucketline.store.format.hashing import file_digest
from bucketline.store.shard.sidecar import open_listed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.store.format.manifest_entries import FileEntry

_CHUNK_BYTES = 64 << 20  # per system call; progress is reported after each


def copy_file(source: Path, target: Path, expected: FileEntry, on_bytes: Callable[[int], None]) -> None:
    """Copy a file durably; `target` must not exist. Blocks are shared if the file system supports it.

    Raises:
        StoreError: if the source is missing.
        CorruptError: if its length or the copy's digest differs from the manifest's.
    """
    with open_listed(source, expected.num_bytes) as reading, target.open("xb", buffering=0) as writing:
        left = expected.num_bytes
        while left and (count := copy_some(reading, writing.fileno(), min(left, _CHUNK_BYTES))):
            left -= count
            on_bytes(count)
        os.fsync(writing.fileno())
    if file_digest(target) != (expected.num_bytes, expected.digest):
        raise CorruptError(f"{source} is damaged: its digest is not the manifest's; run `store verify`")
