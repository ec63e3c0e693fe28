"""Which samples are held out: a pure function of the sample's id, so that the split never moves."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from pathlib import PurePosixPath


class SplitBy(StrEnum):
    """What is hashed: the sample's id, or the folder that it lies in (crops of one photograph stay together)."""

    ID = "id"
    FOLDER = "folder"


def held_out(sample_id: str, val_fraction: float, by: SplitBy) -> bool:
    """Say whether a sample belongs to the held-out split.

    The key (the id, or its parent folder, `.` at the source's root) is hashed to 64 bits;
    the lowest `val_fraction` of the range is held out. Adding samples never moves one that is there.

    >>> held_out("cats/a.png", 0.5, SplitBy.FOLDER) == held_out("cats/b.png", 0.5, SplitBy.FOLDER)
    True
    """
    key = sample_id if by is SplitBy.ID else str(PurePosixPath(sample_id).parent)
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8, person=b"bucketline.split").digest()
    return int.from_bytes(digest, "little") < int(val_fraction * 2**64)
