"""Where the files of a store lie, and the keys inside a shard."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from bucketline.store.text_block import TEXT_GROUP

if TYPE_CHECKING:
    from pathlib import Path

SAMPLE_PREFIX = b"sample/"
META_KEY = b"meta"
SHARD_ID_BYTES = 16
COPY_PREFIX = "copy-"  # of the names of shards that `store compact` writes: their rows are those of shards it read
ENGINE = "lmdb-0.9"  # py-lmdb's default engine; its other one (1.0) writes files that this one cannot read


class Places(StrEnum):
    """What the offsets in a shard's sidecars are of."""

    FILE = "file"  # bytes of the shard's file, confirmed by reading them back
    KEY = "key"  # bytes of all values, laid end to end in the order of their keys; LMDB is asked for them


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPaths:
    """The files of one sealed shard."""

    folder: Path  # STORE/shards
    name: str

    @property
    def lmdb(self) -> Path:
        return self.folder / f"{self.name}.lmdb"

    @property
    def extents(self) -> Path:
        return self.folder / f"{self.name}.extents"

    @property
    def index(self) -> Path:
        return self.folder / f"{self.name}.index"

    def dropped(self, generation: int) -> Path:
        return self.folder / f"{self.name}.dropped-{generation}"


def shard_paths(store: Path, name: str) -> ShardPaths:
    """Give the files of the sealed shard `name`."""
    return ShardPaths(folder=store / "shards", name=name)


def pending_path(store: Path, name: str) -> Path:
    """Give the file of the shard `name` while it is written."""
    return store / "pending" / f"{name}.lmdb"


def block_key(group: str, block: int) -> bytes:
    """Give a block's key, `train/256x192/00000042`; the captions' blocks are `text/00000042`."""
    return f"{group}/{block:08d}".encode("ascii")


def split_block_key(key: bytes) -> tuple[str, int] | None:
    """Give a block key's group and number; None for any other key."""
    group, _, number = key.rpartition(b"/")
    if not number.isdigit() or key.startswith(SAMPLE_PREFIX):
        return None
    name = group.decode("ascii", "replace")
    return (name, int(number)) if name == TEXT_GROUP or "/" in name else None


def sample_key(digest: bytes) -> bytes:
    """Give a sample record's key."""
    return SAMPLE_PREFIX + digest
