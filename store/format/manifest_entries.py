"""The entries of a manifest's shards: their files and groups of blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from bucketline.store.format.text_block import is_bucket
from bucketline.typed_json import decode

SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
SHARD_ID = re.compile(r"[0-9a-f]{32}")
COLUMN_SHARD_NAME = re.compile(rf"({SHARD_NAME.pattern})\.({SHARD_ID.pattern})")  # of an added column's files


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file's length and digest."""

    num_bytes: int
    digest: str  # XXH3, 128 bits, hexadecimal


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedEntry:
    """A shard's list of dropped rows; its file name contains `generation`."""

    generation: int
    num_bytes: int
    digest: str


class GroupEntry(NamedTuple):
    """A shard's share of one bucket (or of the captions): rows, and the position of its blocks in the extents.

    A manifest has it as four numbers, about 30 bytes: 2,900 shards of 1,026 buckets take 87 MiB, by name 311 MiB.
    """

    rows: int
    blocks: int
    first_block: int
    dropped: int

    @property
    def live(self) -> int:
        """Rows that are not dropped."""
        return self.rows - self.dropped


def group_entry(place: object) -> GroupEntry:
    """Return the entry of a group without dropped rows, as the metadata of a shard's extents has it."""
    found = place if isinstance(place, Mapping) else {}  # and each number is named as missing
    return decode(GroupEntry, [found.get(name) for name in GroupEntry._fields[:3]] + [0])


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedTotals:
    """The tokens of a shard's entries of a ragged group: of all of them, and of the longest."""

    tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnShardEntry:
    """The file with an added column's values of a shard's rows, and its extents."""

    shard_id: str  # 32 random hexadecimal digits, also stored in its files, and part of their names
    lmdb: FileEntry
    extents: FileEntry
    groups: dict[str, GroupEntry]  # by bucket name; as many rows as the shard has

    def __post_init__(self) -> None:
        if not SHARD_ID.fullmatch(self.shard_id):
            raise ValueError(f"{self.shard_id!r} is not a shard id")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """A sealed shard: its files and their contents."""

    name: str
    shard_id: str  # 32 random hexadecimal digits per shard, also stored in its files
    lmdb: FileEntry
    extents: FileEntry
    index: FileEntry
    dropped: DroppedEntry | None
    groups: dict[str, GroupEntry]  # by bucket name, `text`, and `ragged/NAME` where the shard has such entries
    samples: int  # rows of all buckets, including dropped ones
    record_bytes: int  # of the live rows' sample records
    caption_bytes: int  # of the caption embeddings
    max_tokens: int  # of the longest caption
    ragged: dict[str, RaggedTotals] = field(default_factory=dict)  # by name, of the groups of which it has entries
    added: dict[str, ColumnShardEntry] = field(default_factory=dict)  # by column, of the added columns that its rows have

    def __post_init__(self) -> None:
        if not (COLUMN_SHARD_NAME if self.is_of_column else SHARD_NAME).fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not a shard name")
        if not SHARD_ID.fullmatch(self.shard_id):
            raise ValueError(f"{self.shard_id!r} is not a shard id")

    @property
    def is_of_column(self) -> bool:
        """True for what `column_shard` returns, which no manifest lists as a shard."""
        return self.name.endswith(f".{self.shard_id}")

    def column_shard(self, column: str) -> ShardEntry:
        """Return the file of an added column as a shard: of the same rows, without captions, records and index."""
        own = self.added[column]
        return ShardEntry(
            name=f"{self.name}.{own.shard_id}",
            shard_id=own.shard_id,
            lmdb=own.lmdb,
            extents=own.extents,
            index=own.extents,
            dropped=None,
            groups=own.groups,
            samples=self.samples,
            record_bytes=0,
            caption_bytes=0,
            max_tokens=0,
        )

    @property
    def data_bytes(self) -> int:
        """Bytes of its own file, and of those of added columns."""
        return self.lmdb.num_bytes + sum(own.lmdb.num_bytes for own in self.added.values())

    @property
    def live(self) -> dict[str, int]:
        """Live rows by bucket."""
        return {name: group.live for name, group in self.groups.items() if is_bucket(name)}

    @property
    def live_samples(self) -> int:
        """Live rows of all buckets."""
        return sum(self.live.values())
