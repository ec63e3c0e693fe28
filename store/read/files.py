"""A store's files: read by `preadv` where they cannot be mapped, and the check that none is missing or short.

For unreliable media: a file truncated during a read or a failing disk kills a process that uses a memory map (SIGBUS), but
raises an exception here. Sidecars are mapped unless the store was opened with `plain_reads`. Half the map's speed when hot.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from bucketline.command_line import counted
from bucketline.errors import CorruptError, StoreError
from bucketline.store.format.block import CHECKSUM, ID, row_checksum
from bucketline.store.format.manifest import dropped_path, shard_paths
from bucketline.store.remote.generations import listed_generations
from bucketline.store.shard.sidecar import REMEDIES, read_exactly

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from numpy.typing import NDArray

    from bucketline.store.folder import Folder
    from bucketline.store.format.block import BlockSpec, Column
    from bucketline.store.format.manifest import DroppedEntry, FileEntry, Manifest, ShardEntry
    from bucketline.store.shard.reader import SealedShard
    from bucketline.store.shard.row_locator import Located


class ReadableShards(Protocol):
    """The shards to read, and the columns of each bucket."""

    @property
    def specs(self) -> Mapping[str, BlockSpec]:
        """Block specs by bucket name."""

    @property
    def shards(self) -> tuple[SealedShard, ...]:
        """Shards by ordinal."""

    @property
    def files(self) -> tuple[SealedShard, ...]:
        """The shards, then the files of the columns that were added to their rows."""


KEPT_FILES = 64  # per gather: a store may have more shards than a process may have open files


class _KeptFile:
    """A shard's open file, closed when it is not kept any more and no thread reads it."""

    def __init__(self, shard: SealedShard) -> None:
        with shard.opened() as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no readahead of neighbouring megabytes
            try:
                self.path, self.fd = shard.paths.lmdb, os.dup(fd)
            except OSError as error:
                raise StoreError(f"{shard.paths.lmdb}: {error.strerror}{REMEDIES.get(error.errno or 0, '')}") from error
        weakref.finalize(self, os.close, self.fd).atexit = False


class FileGather:
    """Gathers rows and captions of one open store. `keep_open`: the files read last, which saves a fifth of a cold batch."""

    def __init__(self, store: ReadableShards, *, keep_open: bool = False) -> None:
        self._store, self._kept = store, lru_cache(KEPT_FILES)(_KeptFile) if keep_open else None

    def rows(self, located: Located, column: Column, out: NDArray[Any]) -> None:
        """Read one column of B rows into `out`, `[B, …]`, C-contiguous.

        Raises:
            StoreError: if a shard's file is missing or its medium fails.
            CorruptError: if a shard's file ends too early or belongs to another shard.
        """
        spec = located.spec or self._store.specs[located.bucket]
        self._read(located.shard, located.offsets(spec, column.name), _rows_of(out, len(located.row), column.row_bytes))

    def read(
        self, shard: NDArray[np.int64], offsets: NDArray[np.int64], num_bytes: NDArray[np.int64] | int, out: NDArray[Any]
    ) -> None:
        """Read byte ranges of shards' files, `[B]`, into the rows of `out`, `[B, …]`, padded with zeros.

        `num_bytes`: length of each range, at most a row of `out`, or one length for all.

        Raises:
            StoreError, CorruptError: as `rows`.
        """
        rows = _rows_of(out, len(shard), out.nbytes // max(1, len(shard)))
        if not isinstance(num_bytes, int) or (rows and num_bytes != len(rows[0])):
            lengths = np.broadcast_to(num_bytes, shard.shape).tolist()
            for row, own in zip(rows, lengths, strict=True):
                if own < len(row):
                    np.frombuffer(row, dtype="u1")[own:] = 0
            rows = [row[:own] for row, own in zip(rows, lengths, strict=True)]
        self._read(shard, offsets, rows)

    def _read(self, shard: NDArray[np.int64], offsets: NDArray[np.int64], outs: list[memoryview]) -> None:
        by_shard: dict[int, list[tuple[int, memoryview]]] = {}
        for ordinal, offset, out in zip(shard.tolist(), offsets.tolist(), outs, strict=True):
            by_shard.setdefault(ordinal, []).append((offset, out))
        for ordinal, ranges in by_shard.items():
            one = self._store.files[ordinal]
            if self._kept is None or one.source is not None:
                one.read_into(*map(list, zip(*ranges, strict=True)))
                continue
            file = self._kept(one)
            for offset, out in ranges:
                read_exactly(file.path, file.fd, offset, out)


def check_rows(store: ReadableShards, located: Located, values: Mapping[str, NDArray[Any]], column: str | None = None) -> None:
    """Verify complete rows, all columns `[B, …]`, against their checksums; or an added column's values, with their ids."""
    spec = (located if column is None else located.added[column]).spec or store.specs[located.bucket]
    flat = {name: _rows_of(own, len(located.row), spec.column(name).row_bytes) for name, own in values.items()}
    for n, stored in enumerate(flat[CHECKSUM]):
        if row_checksum(spec, {name: rows[n] for name, rows in flat.items()}) != int.from_bytes(stored, "little"):
            shard, row = store.shards[int(located.shard[n])], int(located.row[n])
            what, remedy = "its bytes do", "`store drop` it and pack its source again"
            if column is not None:
                what, remedy = f"the bytes of its {column} do", "run `store repair` and add the column again"
            raise CorruptError(f"{shard.describe_row(located.bucket, row)}: {what} not match their checksum; {remedy}")


def check_added(store: ReadableShards, located: Located, column: str, values: NDArray[Any], ids: NDArray[Any]) -> None:
    """Verify the values of an added column, `[B, …]`, against their checksums, and that they are of the rows of these ids.

    `ids`: the digests in the rows, `[B, …]`, 16 bytes each.
    """
    own = located.added[column]
    assert own.spec is not None
    found: dict[str, NDArray[Any]] = {column: values}
    gather = FileGather(store)
    for other in own.spec.columns:
        if other.name != column:
            found[other.name] = np.empty((len(own.row), *other.shape), dtype=other.numpy_dtype)
            gather.rows(own, other, found[other.name])
    check_rows(store, located, found, column)
    wrong = (found[ID].reshape(len(own.row), -1).view("u1") != ids.reshape(len(own.row), -1).view("u1")).any(axis=1)
    if wrong.any():
        n = int(np.argmax(wrong))
        item = store.shards[int(located.shard[n])].describe_row(located.bucket, int(located.row[n]))
        raise CorruptError(f"{item}: its {column} is another sample's; run `store repair` and add the column again")


def _rows_of(out: NDArray[Any], num_rows: int, row_bytes: int) -> list[memoryview]:
    """Return a buffer of B rows as one view of bytes per row."""
    if not out.flags.c_contiguous or out.nbytes != num_rows * row_bytes:
        raise ValueError(f"the buffer has {out.nbytes} bytes, expected {num_rows} rows of {row_bytes} bytes, C-contiguous")
    whole = out.reshape(-1).view("u1").data
    return [whole[at : at + row_bytes] for at in range(0, num_rows * row_bytes, row_bytes)] if row_bytes else [whole] * num_rows


# ------------------------------------------------------------------------------------------------------------------ lost files
# Check that a manifest's files exist with the right length, on a disk or in object storage; nothing is read.

NAMED_SHARDS = 3  # lost shards that an error lists by name


@dataclass(frozen=True, slots=True, kw_only=True)
class LostFile:
    """A file that is not there, or not whole."""

    name: str
    reason: str  # "is missing", or "has 7 bytes instead of 8192"


@dataclass(frozen=True, slots=True, kw_only=True)
class LostShard:
    """A shard with lost files."""

    shard: str
    samples: int  # live samples
    files: tuple[LostFile, ...]

    def __str__(self) -> str:
        lost = ", ".join(f"{one.name} {one.reason}" for one in self.files)
        return f"shard {self.shard} ({counted(self.samples, 'sample')}): {lost}"


def files_of(store: Path, entry: ShardEntry) -> Iterator[tuple[Path, FileEntry]]:
    """Yield a shard's files with their manifest entries: its own file, its sidecar, then those of added columns."""
    paths = shard_paths(store, entry.name)
    yield from ((paths.lmdb, entry.lmdb), (paths.meta, entry.meta))
    for column in sorted(entry.added):
        yield from files_of_column(store, entry, column)


def files_of_column(store: Path, entry: ShardEntry, column: str) -> Iterator[tuple[Path, FileEntry]]:
    """Yield the files of an added column of a shard's rows: sidecar, then values."""
    own = entry.column_shard(column)
    paths = shard_paths(store, own.name)
    yield from ((paths.meta, own.meta), (paths.lmdb, own.lmdb))


def list_of(store: Path, manifest: Manifest) -> list[tuple[Path, FileEntry]]:
    """Return the list of dropped rows with its manifest entry, if there is one."""
    return [] if manifest.dropped is None else [(dropped_path(store, manifest.dropped), manifest.dropped)]


def all_files(store: Path, manifest: Manifest) -> Iterator[tuple[Path, FileEntry]]:
    """Yield the files that a manifest lists, with their entries."""
    yield from list_of(store, manifest)
    for entry in manifest.shards:
        yield from files_of(store, entry)


def lost_shards(
    folder: Folder, shards: Collection[ShardEntry], dropped: DroppedEntry | None = None, *, sidecars: bool = True
) -> tuple[LostShard, ...]:
    """Return those of some shards that have lost a file, in order; without `sidecars`, check only `.lmdb` files.

    A list of `dropped` rows is a file of each of them that has some.
    """
    files = [(entry, path, expected) for entry in shards for path, expected in files_of(Path(), entry)]
    files = [file for file in files if sidecars or file[1].suffix == ".lmdb"]
    if dropped is not None and sidecars:
        path = dropped_path(Path(), dropped)
        files += [(entry, path, dropped) for entry in shards if entry.live_samples < entry.samples]
    names = list(dict.fromkeys(path.as_posix() for _, path, _ in files))
    sizes = dict(zip(names, folder.sizes(names), strict=True))
    lost: dict[str, tuple[ShardEntry, list[LostFile]]] = {}
    for entry, path, expected in files:
        if (found := sizes[path.as_posix()]) != expected.num_bytes:
            how = "is missing" if found is None else f"has {found} bytes instead of {expected.num_bytes}"
            lost.setdefault(entry.name, (entry, []))[1].append(LostFile(name=path.name, reason=how))
    return tuple(LostShard(shard=entry.name, samples=entry.live_samples, files=tuple(own)) for entry, own in lost.values())


def refuse_lost_shards(folder: Folder, manifest: Manifest, *, sidecars: bool = True) -> None:
    """Check that no shard of a generation of a store has lost a file."""
    lost = lost_shards(folder, manifest.shards, manifest.dropped, sidecars=sidecars)
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
