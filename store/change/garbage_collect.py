"""Garbage collection: remove old generations, and the files that only they list, on a disk and in object storage.

The order makes every crash harmless: shards' own files go first, their indexes last of theirs, then the generations'
manifests. What is left in between is known to be retired and is never adopted.
"""

from __future__ import annotations

import itertools
import re
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import LockedError, StoreError
from bucketline.files.locks import FileLock
from bucketline.store.folder import as_folder, folder_time
from bucketline.store.format.layout import COPY_PREFIX
from bucketline.store.format.manifest import MANIFEST, SHARD_ID, SHARD_NAME, dump_manifest
from bucketline.store.read.lost_files import files_of
from bucketline.store.remote.generations import (
    complete_first,
    generation_name,
    listed_generations,
    newest_after,
    newest_generation,
    read_generation,
)
from bucketline.store.transfer.files import FRESH_S
from bucketline.store.transfer.sender import pending_shards
from bucketline.store.write.describe import ADDING_LOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bucketline.store.folder import Folder, ListedFile
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.remote.objects import ObjectFolder

UNLISTED_S = 2 * FRESH_S  # an object that no generation lists is left alone for this time
_FILE = re.compile(rf"shards/({SHARD_NAME.pattern})\.(({SHARD_ID.pattern})\.)?(lmdb|extents|index|dropped-[0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Result of a garbage collection or of its dry run."""

    generations: tuple[int, ...]
    files: tuple[str, ...]  # names under shards/
    disk_bytes: int  # of all removed files
    waiting: tuple[int, ...]  # generations superseded too recently; kept, with all files that only they list


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlisted:
    """A file of a shard, or of an added column, that no kept generation lists."""

    file: ListedFile
    shard: str
    is_of_column: bool
    is_live: bool  # a kept generation lists the shard
    is_retired: bool  # a generation that is removed lists the file, or one has retired the shard


def collect(place: Path | ObjectFolder, older_than_s: float, *, dry_run: bool = False) -> Collected:
    """Remove generations superseded more than `older_than_s` ago, then files that no other generation lists.

    Call it under the lock of a store on a disk; a dry run needs none. Ages are by the clock that dates the files; a dry run
    writes nothing, so it goes by this machine's. The newest generation is kept. A reader with a removed generation open gets
    an error at the first file that it has not opened yet.
    """
    folder = as_folder(place)
    newest = newest_generation(folder, lists=True)
    now = time.time() if dry_run else folder_time(folder)
    documents = listed_generations(folder)
    since = {number: min(now, documents[after].modified_s) for number, after in itertools.pairwise(documents)}
    superseded = [number for number in since if number < newest.generation]
    old = [number for number in superseded if now - since[number] >= older_than_s]
    found = list(folder.names("shards"))  # before the generations are read: what is committed later is not among them
    newest = newest_after(folder, newest, lists=True)
    kept = [_read(folder, number, newest) for number in listed_generations(folder) if number not in old]
    kept.append(newest)
    gone = [manifest for number in old if (manifest := _read_if_whole(folder, number, newest)) is not None]
    rule = _unlisted_here(place, dry_run=dry_run) if isinstance(place, Path) else _unlisted_there(place, now, dry_run=dry_run)
    with rule as may_go:
        files = [one.file for one in _unlisted(found, kept, gone) if may_go(one)]
        if not dry_run:
            if complete_first(folder, newest) < newest.generation:  # else it would go back behind what was committed meanwhile
                folder.write(MANIFEST, dump_manifest(newest))  # readers must not begin at a generation that is removed now
            for part in itertools.groupby(files, _turn):
                folder.remove(file.name for file in part[1])
            folder.remove(generation_name(number) for number in old)
    return Collected(
        generations=tuple(old),
        files=tuple(file.name.removeprefix("shards/") for file in files),
        disk_bytes=sum(file.num_bytes for file in files) + sum(documents[number].num_bytes for number in old),
        waiting=tuple(number for number in superseded if number not in old),
    )


def _turn(file: ListedFile) -> int:
    """Return when a file is removed: a shard's own file first, then the others, indexes last."""
    return {"lmdb": 0, "index": 2}.get(file.name.rpartition(".")[2], 1)


def _unlisted(found: Sequence[ListedFile], kept: Sequence[Manifest], gone: Sequence[Manifest]) -> list[Unlisted]:
    """Return the files that no kept generation lists, in the order in which they may be removed."""
    listed, known = _names(kept), _names(gone)
    live, left = ({shard.name for manifest in own for shard in manifest.shards} for own in (kept, gone))
    retired = (left | {name for manifest in (*kept, *gone) for name in manifest.retired}) - live
    unlisted = []
    for file in sorted(found, key=lambda file: (_turn(file), file.name)):
        match = _FILE.fullmatch(file.name)
        if match is not None and file.name not in listed:
            shard, is_of_column = match[1], match[2] is not None
            is_retired = file.name in known or shard in retired
            unlisted.append(
                Unlisted(file=file, shard=shard, is_of_column=is_of_column, is_live=shard in live, is_retired=is_retired)
            )
    return unlisted


def _names(manifests: Sequence[Manifest]) -> set[str]:
    root = Path()
    entries = [entry for manifest in manifests for entry in manifest.shards]
    return {path.as_posix() for entry in entries for path, _ in files_of(root, entry)}


@contextmanager
def _unlisted_here(store: Path, *, dry_run: bool) -> Iterator[Callable[[Unlisted], bool]]:
    """Yield which unlisted files on a disk may go; none of a column that is being added, and let none begin meanwhile.

    Shards that no generation lists yet are kept: the next run may adopt them.
    """
    path, none_is_added = store / "pending" / ADDING_LOCK, True
    with ExitStack() as held:
        if not dry_run and path.exists():
            try:
                held.enter_context(FileLock(path))
            except LockedError:
                none_is_added = False

        def may_go(found: Unlisted) -> bool:
            if not found.is_live:
                return found.is_retired or found.shard.startswith(COPY_PREFIX)
            return none_is_added or not found.is_of_column

        yield may_go


@contextmanager
def _unlisted_there(objects: ObjectFolder, now: float, *, dry_run: bool) -> Iterator[Callable[[Unlisted], bool]]:
    """Yield which unlisted objects may go; `now` is the server's time.

    Any of them may be another writer's upload, so it is left alone for a day, and longer while a running process notes that it
    sends it. Notes of processes that have ended go at the end.
    """
    being_sent, stale = pending_shards(objects, UNLISTED_S, now)

    def may_go(found: Unlisted) -> bool:
        return found.shard not in being_sent and (found.is_retired or now - found.file.modified_s >= UNLISTED_S)

    yield may_go
    if not dry_run:
        objects.remove(stale)


def _read(folder: Folder, number: int, newest: Manifest) -> Manifest:
    try:
        return read_generation(folder, number, newest)
    except StoreError as error:
        raise StoreError(
            f"{folder.place(generation_name(number))} cannot be read, so the files that it needs are unknown "
            f"({error!s:.200}); nothing was removed; move it elsewhere if no run needs it, and rerun the command"
        ) from error


def _read_if_whole(folder: Folder, number: int, newest: Manifest) -> Manifest | None:
    """Return an outdated generation's manifest; None if damaged: its successor's `retired` has what only it listed."""
    try:
        return read_generation(folder, number, newest)
    except StoreError:
        return None
