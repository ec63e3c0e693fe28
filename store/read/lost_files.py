"""Check that a manifest's files exist with the right length: one stat per file, nothing is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.errors import CorruptError, StoreError
from bucketline.store.format.layout import shard_paths
from bucketline.store.format.manifest import generations

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.manifest_entries import DroppedEntry, FileEntry, ShardEntry

NAMED_SHARDS = 3  # lost shards that an error lists by name


@dataclass(frozen=True, slots=True, kw_only=True)
class LostFile:
    """A shard's file that is missing or has the wrong length."""

    name: str  # under shards/
    found_bytes: int | None  # None if it is missing
    expected_bytes: int

    def __str__(self) -> str:
        if self.found_bytes is None:
            return f"{self.name} is missing"
        return f"{self.name} has {self.found_bytes} bytes instead of {self.expected_bytes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LostShard:
    """A shard with lost files."""

    shard: str
    samples: int  # live samples
    files: tuple[LostFile, ...]

    def __str__(self) -> str:
        return f"shard {self.shard} ({counted(self.samples, 'sample')}): {', '.join(map(str, self.files))}"


def files_of(store: Path, entry: ShardEntry) -> Iterator[tuple[Path, FileEntry | DroppedEntry]]:
    """Yield a shard's files with their manifest entries: its own file, extents, index, then what it may have."""
    paths = shard_paths(store, entry.name)
    yield from ((paths.lmdb, entry.lmdb), (paths.extents, entry.extents), (paths.index, entry.index))
    if entry.dropped is not None:
        yield paths.dropped(entry.dropped.generation), entry.dropped
    for column in sorted(entry.added):
        yield from files_of_column(store, entry, column)


def files_of_column(store: Path, entry: ShardEntry, column: str) -> Iterator[tuple[Path, FileEntry]]:
    """Yield the files of an added column of a shard's rows: extents, then values."""
    own = entry.column_shard(column)
    paths = shard_paths(store, own.name)
    yield from ((paths.extents, own.extents), (paths.lmdb, own.lmdb))


def lost_shards(store: Path, manifest: Manifest, *, sidecars: bool = True) -> tuple[LostShard, ...]:
    """Return a generation's shards that have lost a file, in order; without `sidecars`, check only `.lmdb` files.

    Raises:
        StoreError: if a stat fails, except for a missing file.
    """
    found = []
    for entry in manifest.shards:
        files = [file for file in files_of(store, entry) if sidecars or file[0].suffix == ".lmdb"]
        lost = tuple(file for path, expected in files if (file := _lost(path, expected.num_bytes)) is not None)
        if lost:
            found.append(LostShard(shard=entry.name, samples=entry.live_samples, files=lost))
    return tuple(found)


def refuse_lost_shards(store: Path, manifest: Manifest, *, sidecars: bool = True) -> None:
    """Check that no shard of a generation has lost a file.

    Raises:
        CorruptError: if one has; the message names the first few and the command that fixes it.
        StoreError: if a stat fails for another reason.
    """
    lost = lost_shards(store, manifest, sidecars=sidecars)
    if not lost:
        return
    more = f", and {counted(len(lost) - NAMED_SHARDS, 'shard')} more" if len(lost) > NAMED_SHARDS else ""
    samples = counted(sum(shard.samples for shard in lost), "sample")
    if (newest := max(generations(store), default=0)) > manifest.generation:
        advice = f"generation {manifest.generation} cannot be read completely; restore the files, or open generation {newest}"
    else:
        advice = (
            f"restore the files, or run `store repair {store}`, which keeps the samples that can still be read and drops the "
            "others; the same `ingest pack` then packs these again"
        )
    raise CorruptError(
        f"{store} has lost files of {counted(len(lost), 'shard')} with {samples}: "
        f"{'; '.join(map(str, lost[:NAMED_SHARDS]))}{more}; {advice}"
    )


def _lost(path: Path, expected_bytes: int) -> LostFile | None:
    try:
        found = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return LostFile(name=path.name, found_bytes=None, expected_bytes=expected_bytes)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}; fix this and rerun the command") from error
    return None if found == expected_bytes else LostFile(name=path.name, found_bytes=found, expected_bytes=expected_bytes)
