"""Garbage collection in object storage: old generations, what only they list, and what interrupted uploads left.

What a kept generation lists is never removed, nor what is not named as a shard's object. What no generation lists may be
another writer's upload, so it is left alone for a day, and longer while a running process notes that it sends it. A shard's own
object goes first, the generations' manifests last.
"""

from __future__ import annotations

import itertools
import re
import time
from typing import TYPE_CHECKING

from bucketline.errors import StoreError
from bucketline.store.change.garbage_collect import Collected, Waiting
from bucketline.store.folder import folder_time
from bucketline.store.format.manifest import MANIFEST, dump_manifest
from bucketline.store.format.manifest_entries import SHARD_ID, SHARD_NAME
from bucketline.store.read.lost_files import files_of
from bucketline.store.remote.generations import (
    complete_first,
    generation_name,
    listed_generations,
    newest_generation,
    read_generation,
)
from bucketline.store.remote.lines import lines_name
from bucketline.store.sync.transfer.sender import pending_shards
from bucketline.store.sync.transfer.upload import FRESH_S, shard_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.store.folder import ListedFile
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.remote.objects import ObjectFolder

UNLISTED_S = 2 * FRESH_S  # an object that no generation lists is left alone for this time
_OBJECT = re.compile(rf"shards/({SHARD_NAME.pattern})\.({SHARD_ID.pattern}\.)?(lmdb|extents|index|lines|dropped-[0-9]+)")


def collect_objects(objects: ObjectFolder, older_than_s: float, *, dry_run: bool = False) -> Collected:
    """Remove generations superseded more than `older_than_s` ago, and objects of shards that no kept generation lists.

    All times are the server's. A dry run, which writes nothing, cannot find out the server's time and takes this machine's.

    Raises:
        StoreError: if the store cannot be listed, or a generation to keep is damaged: what it lists is unknown.
    """
    newest = newest_generation(objects, lists=True)
    here = time.time()
    now = here if dry_run else folder_time(objects)
    documents = listed_generations(objects)
    old, waiting = _superseded(documents, newest, older_than_s, now, here - now)
    found = [
        entry for entry in objects.names("shards") if _OBJECT.fullmatch(entry.name)
    ]  # before the generations are read: what is committed later is not among them
    newest = newest_generation(objects, lists=True)
    kept = [_read(objects, number, newest) for number in listed_generations(objects) if number not in old]
    listed = _names([newest, *kept])
    known = _names([manifest for number in old if (manifest := _read_if_whole(objects, number, newest)) is not None])
    being_sent, stale = pending_shards(objects, UNLISTED_S, now)
    gone = [
        entry
        for entry in found
        if entry.name not in listed
        and shard_of(entry.name) not in being_sent
        and (entry.name in known or now - entry.modified_s >= UNLISTED_S)
    ]
    gone.sort(key=lambda entry: (not entry.name.endswith(".lmdb"), entry.name))
    if not dry_run:
        if complete_first(objects) < newest.generation:  # else it would go back behind what was committed meanwhile
            objects.write(MANIFEST, dump_manifest(newest))  # readers must not begin at a generation that is removed now
        objects.remove(entry.name for entry in gone)
        objects.remove(stale)
        objects.remove(generation_name(number) for number in old)
    return Collected(
        generations=tuple(old),
        files=tuple(entry.name.removeprefix("shards/") for entry in gone),
        disk_bytes=sum(entry.num_bytes for entry in gone) + sum(documents[number].num_bytes for number in old),
        waiting=waiting,
    )


def _superseded(
    documents: dict[int, ListedFile], newest: Manifest, older_than_s: float, now: float, behind_s: float
) -> tuple[list[int], tuple[Waiting, ...]]:
    """Return the generations whose successor is old enough, and those that wait, until a time of this machine's.

    `now` is the server's time, which is `behind_s` behind this machine's.
    """
    old, waiting = list[int](), list[Waiting]()
    for number, successor in itertools.pairwise(documents):
        if number < newest.generation:
            superseded = min(now, documents[successor].modified_s)
            if now - superseded >= older_than_s:
                old.append(number)
            else:
                waiting.append(Waiting(generation=number, until=superseded + older_than_s + behind_s))
    return old, tuple(waiting)


def _names(manifests: Sequence[Manifest]) -> set[str]:
    """Return the names of all objects that some generations list, and of the checksums of lines that belong to them."""
    from pathlib import Path

    root = Path()
    names = {
        path.relative_to(root).as_posix()
        for manifest in manifests
        for entry in manifest.shards
        for path, _ in files_of(root, entry)
    }
    return names | {lines_name(entry.name) for manifest in manifests for entry in manifest.shards}


def _read(objects: ObjectFolder, number: int, newest: Manifest) -> Manifest:
    try:
        return read_generation(objects, number, newest)
    except StoreError as error:
        raise StoreError(
            f"{objects.place(generation_name(number))} cannot be read, so the objects that it needs are unknown "
            f"({error!s:.200}); nothing was removed; remove it if no run needs it, and rerun the command"
        ) from error


def _read_if_whole(objects: ObjectFolder, number: int, newest: Manifest) -> Manifest | None:
    """Return an outdated generation's manifest; None if damaged: what only it listed goes once it is old."""
    try:
        return read_generation(objects, number, newest)
    except StoreError:
        return None
