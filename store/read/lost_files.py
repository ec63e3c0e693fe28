"""Check that a manifest's files exist with the right length, on a disk or in object storage; nothing is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.errors import CorruptError
from bucketline.store.format.layout import shard_paths
from bucketline.store.remote.generations import listed_generations

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bucketline.store.folder import Folder
    from bucketline.store.format.manifest import DroppedEntry, FileEntry, Manifest, ShardEntry

NAMED_SHARDS = 3  # lost shards that an error lists by name


@dataclass(frozen=True, slots=True, kw_only=True)
class LostShard:
    """A shard with lost files."""

    shard: str
    samples: int  # live samples
    files: tuple[str, ...]  # what became of each, such as "g1.lmdb is missing"

    def __str__(self) -> str:
        return f"shard {self.shard} ({counted(self.samples, 'sample')}): {', '.join(self.files)}"


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


def lost_shards(folder: Folder, shards: Iterable[ShardEntry], *, sidecars: bool = True) -> tuple[LostShard, ...]:
    """Return those of some shards that have lost a file, in order; without `sidecars`, check only `.lmdb` files."""
    files = [(entry, path, expected) for entry in shards for path, expected in files_of(Path(), entry)]
    files = [file for file in files if sidecars or file[1].suffix == ".lmdb"]
    sizes = folder.sizes([path.as_posix() for _, path, _ in files])
    lost: dict[str, tuple[ShardEntry, list[str]]] = {}
    for (entry, path, expected), found in zip(files, sizes, strict=True):
        if found != expected.num_bytes:
            how = "is missing" if found is None else f"has {found} bytes instead of {expected.num_bytes}"
            lost.setdefault(entry.name, (entry, []))[1].append(f"{path.name} {how}")
    return tuple(LostShard(shard=entry.name, samples=entry.live_samples, files=tuple(own)) for entry, own in lost.values())


def refuse_lost_shards(folder: Folder, manifest: Manifest, *, sidecars: bool = True) -> None:
    """Check that no shard of a generation of a store has lost a file."""
    lost = lost_shards(folder, manifest.shards, sidecars=sidecars)
    if not lost:
        return
    place = folder.place("")
    more = f", and {counted(len(lost) - NAMED_SHARDS, 'shard')} more" if len(lost) > NAMED_SHARDS else ""
    samples = counted(sum(shard.samples for shard in lost), "sample")
    if (newest := max(listed_generations(folder), default=0)) > manifest.generation:
        advice = f"generation {manifest.generation} cannot be read completely; restore the files, or open generation {newest}"
    else:
        advice = (
            f"restore the files, or run `store repair {place}`, which keeps the samples that can still be read and drops the "
            "others; the same `ingest pack` then packs these again"
        )
    raise CorruptError(
        f"{place} has lost files of {counted(len(lost), 'shard')} with {samples}: "
        f"{'; '.join(map(str, lost[:NAMED_SHARDS]))}{more}; {advice}"
    )
