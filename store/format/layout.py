"""The file layout of a store, and the keys in a shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.store.format.text_block import TEXT_GROUP

if TYPE_CHECKING:
    from pathlib import Path

FORMAT_VERSION = 1
SAMPLE_PREFIX = b"sample/"
META_KEY = b"meta"
TEXT_ERROR = "text_error"  # in the value of META_KEY: what quantising the shard's captions cost
SHARD_ID_BYTES = 16
COPY_PREFIX = "copy-"  # prefix of shards written by `store compact`, which hold the rows of existing shards
IN_FILE = "file"  # what the offsets in a shard's sidecars refer to: bytes of its file, which sealing has read back
ENGINE = "lmdb-0.9"  # py-lmdb's default engine, which cannot read files of its other one (1.0)


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
    """Return the paths of the sealed shard `name`."""
    return ShardPaths(folder=store / "shards", name=name)


def pending_path(store: Path, name: str) -> Path:
    """Return the path of the shard `name` while it is being written."""
    return store / "pending" / f"{name}.lmdb"


def block_key(group: str, block: int) -> bytes:
    """Return a block's key, `train/256x192/00000042`; caption blocks are `text/00000042`."""
    return f"{group}/{block:08d}".encode("ascii")


def split_block_key(key: bytes) -> tuple[str, int] | None:
    """Return a block key's group and number; None for other keys."""
    group, _, number = key.rpartition(b"/")
    if not number.isdigit() or key.startswith(SAMPLE_PREFIX):
        return None
    name = group.decode("ascii", "replace")
    return (name, int(number)) if name == TEXT_GROUP or "/" in name else None


def sample_key(digest: bytes) -> bytes:
    return SAMPLE_PREFIX + digest
