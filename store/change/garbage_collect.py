"""Garbage collection: remove old generations, and the shards and lists that only they list.

The order makes every crash harmless: a shard's own file goes first, its sidecars next, the generations' manifests last. What
is left in between is known to be retired and is never adopted.
"""

from __future__ import annotations

import itertools
import os
import re
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.errors import LockedError, StoreError
from bucketline.files.atomic_write import sync_folder
from bucketline.files.locks import FileLock
from bucketline.store.format.layout import COPY_PREFIX
from bucketline.store.format.manifest import generation_path, generations, read_manifest
from bucketline.store.format.manifest_entries import SHARD_ID, SHARD_NAME
from bucketline.store.read.lost_files import files_of
from bucketline.store.write.column_shard import ADDING_LOCK

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from bucketline.store.format.manifest import Manifest

_FILE = re.compile(rf"({SHARD_NAME.pattern})\.(({SHARD_ID.pattern})\.)?(lmdb|extents|index|dropped-[0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A generation superseded too recently."""

    generation: int
    until: float  # Unix time from which it can be removed


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Result of a garbage collection or of its dry run."""

    generations: tuple[int, ...]
    files: tuple[str, ...]  # names under shards/
    disk_bytes: int  # of all removed files
    waiting: tuple[Waiting, ...]  # kept, with all files that only they list


def collect(store: Path, newest: Manifest, older_than_s: float, *, dry_run: bool = False) -> Collected:
    """Remove generations superseded more than `older_than_s` ago, then files that no other generation lists.

    Call under the store's lock. A dry run needs none, and may fail if another process collects at the same time; it writes
    nothing, so it goes by this machine's clock, and otherwise ages are by the clock that dates the files. The newest
    generation is kept, and so are shards that no generation lists yet, which the next run may adopt. A reader with a removed
    generation open gets an error at the first file that it has not mapped yet.

    Raises:
        StoreError: if a generation to keep is damaged: its files are unknown.
    """
    here = time.time()
    now = here if dry_run else _disk_time(store)
    old, waiting = _superseded(store, newest, older_than_s, now, here - now)
    kept = [newest, *(_read(store, n) for n in generations(store) if n not in old and n != newest.generation)]
    gone = [manifest for n in old if (manifest := _read_if_whole(store, n)) is not None]
    live = {shard.name for manifest in kept for shard in manifest.shards}
    known = {name for manifest in (*kept, *gone) for name in manifest.retired}
    known |= {shard.name for manifest in gone for shard in manifest.shards}
    listed = {path.name for manifest in kept for shard in manifest.shards for path, _ in files_of(store, shard)}
    paths = sorted((store / "shards").iterdir())  # before the lock: what a column is made of from now on is not among them
    with _column_lock(store, dry_run=dry_run) as none_is_added:
        files = [path for path in paths if _is_stale(path, listed, live, known, none_is_added=none_is_added)]
        documents = [generation_path(store, n) for n in old]
        num_bytes = sum(_disk_bytes(path) for path in (*files, *documents))
        if not dry_run:
            _remove(path for path in files if path.suffix == ".lmdb")
            _remove(path for path in files if path.suffix not in (".lmdb", ".index"))
            _remove(path for path in files if path.suffix == ".index")
            _remove(documents)
    return Collected(generations=tuple(old), files=tuple(path.name for path in files), disk_bytes=num_bytes, waiting=waiting)


def _is_stale(path: Path, listed: set[str], live: set[str], known: set[str], *, none_is_added: bool) -> bool:
    """Return whether a file is of a shard that no kept generation lists, or a list or a column that none of them lists.

    `known`: shards that a generation listed, or has retired.
    """
    if (match := _FILE.fullmatch(path.name)) is None:
        return False
    name, is_of_column = match[1], match[2] is not None
    if name not in live:
        return name in known or name.startswith(COPY_PREFIX)
    is_list = path.name.startswith(f"{name}.dropped-")
    return path.name not in listed and (is_list or (is_of_column and none_is_added))


@contextmanager
def _column_lock(store: Path, *, dry_run: bool) -> Iterator[bool]:
    """Yield whether no column is being added, so that what a killed call left can go; let none begin meanwhile."""
    path = store / "pending" / ADDING_LOCK
    if dry_run or not path.exists():
        yield True
        return
    try:
        held = FileLock(path)
    except LockedError:
        yield False
        return
    with held:
        yield True


def _disk_bytes(path: Path) -> int:
    """Return a file's disk usage; 0 if another process has just removed it (dry run)."""
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _disk_time(store: Path) -> float:
    """Return the Unix time by the clock that dates a store's files, which may be a file server's."""
    with tempfile.TemporaryFile(dir=store / "pending") as file:
        return os.fstat(file.fileno()).st_mtime


def _superseded(
    store: Path, newest: Manifest, older_than_s: float, now: float, behind_s: float
) -> tuple[list[int], tuple[Waiting, ...]]:
    """Return the generations whose successor is old enough, and those that wait, until a time of this machine's.

    `now` is the time of the disk, which is `behind_s` behind this machine's.
    """
    old, waiting = list[int](), list[Waiting]()
    for number, successor in itertools.pairwise(generations(store)):
        if number < newest.generation:
            superseded = min(now, generation_path(store, successor).stat().st_mtime)
            if now - superseded >= older_than_s:
                old.append(number)
            else:
                waiting.append(Waiting(generation=number, until=superseded + older_than_s + behind_s))
    return old, tuple(waiting)


def _read(store: Path, generation: int) -> Manifest:
    try:
        return read_manifest(store, generation)
    except StoreError as error:
        path = generation_path(store, generation)
        raise StoreError(
            f"{path} cannot be read, so the files that it needs are unknown ({error!s:.200}); nothing was removed; "
            "move it elsewhere if no run needs it, and rerun the command"
        ) from error


def _read_if_whole(store: Path, generation: int) -> Manifest | None:
    """Return an outdated generation's manifest; None if damaged: its successor's `retired` has what only it listed."""
    try:
        return read_manifest(store, generation)
    except StoreError:
        return None


def _remove(paths: Iterable[Path]) -> None:
    folders = set()
    for path in paths:
        path.unlink(missing_ok=True)
        folders.add(path.parent)
    for folder in folders:
        sync_folder(folder)
