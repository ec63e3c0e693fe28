"""Change which rows a store has, where it is: on a disk under its lock, in object storage by the commit that comes first."""

from __future__ import annotations

import dataclasses
import secrets
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import BucketlineError, CorruptError, StoreError
from bucketline.store.folder import LocalFolder
from bucketline.store.format.manifest import finished
from bucketline.store.remote.generations import commit, complete_first, newest_generation, refuse_without_put_if_absent
from bucketline.store.transfer.download import Downloader
from bucketline.store.write.change_base import ChangeBase
from bucketline.store.write.newest import existing_manifest
from bucketline.store.write.publish import changing, next_generation, publish_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.remote.objects import ObjectFolder

ATTEMPTS = 50  # of a change that other writers get ahead of each time
_AT_ONCE = 16  # sidecars
FIRST_DRAWN, END_DRAWN = 1 << 32, 1 << 52  # numbers in names of lists of dropped rows; below are generations' numbers


def drawn_number() -> int:
    """Return a number for lists of dropped rows: another writer may be preparing a generation of the same number."""
    return FIRST_DRAWN + secrets.randbelow(END_DRAWN - FIRST_DRAWN)


@contextmanager
def newest_base(place: Path | ObjectFolder) -> Iterator[ChangeBase]:
    """Yield the newest generation, to be looked at only. Of one in object storage, `fetch_indexes` gets what is read.

    Raises:
        StoreError: if there is no store, or it cannot be read. Errors in the block name the URL.
    """
    if isinstance(place, Path):
        yield _local_base(place, existing_manifest(place))
        return
    newest = newest_generation(place, lists=True)
    with tempfile.TemporaryDirectory(prefix="bucketline-", ignore_cleanup_errors=True) as folder:
        path = Path(folder)
        (path / "shards").mkdir()
        try:
            fetch = Downloader(place, jobs=_AT_ONCE).get
            yield ChangeBase(folder=place, manifest=newest, number=drawn_number(), path=path, fetch=fetch)
        except BucketlineError as error:
            raise type(error)(str(error).replace(str(path), place.url)) from error


def commit_change(
    place: Path | ObjectFolder, change: Callable[[ChangeBase], Manifest], *, adopting: bool = True
) -> tuple[Manifest, Manifest]:
    """Commit what `change` makes of the newest generation. Return the generation before, and the newest afterwards.

    `change` returns a manifest with other shards or buckets; the same one changes nothing. It is called again if another writer
    has committed first. On a disk, what an interrupted run left becomes a generation first, if `adopting`. Shards that are no
    longer listed become retired as long as they have files.

    Raises:
        StoreError: if there is no store, or it cannot be changed; what `change` raises.
        LockedError: if another process changes the store on this disk.
    """
    if isinstance(place, Path):
        with changing(place, adopting=adopting) as manifest:
            base = _local_base(place, manifest)
            after = change(base)
            return manifest, manifest if after is manifest else publish_shards(place, after, after.shards, base.number)
    newest_generation(place, lists=True)  # which raises if there is none
    place.refuse_read_only()
    refuse_without_put_if_absent(place)
    for _ in range(ATTEMPTS):
        with newest_base(place) as base:
            before = base.manifest
            complete_first(place, before)
            after = change(base)
            if after is before:
                return before, before
            after, data = finished(_next(place, before, after), place.url)
            if commit(place, after.generation, data, is_first=False):
                return before, after
    raise overtaken(place)


def overtaken(place: ObjectFolder) -> StoreError:
    """Return the error of a change that other writers have got ahead of each time."""
    return StoreError(f"{place.url}: {ATTEMPTS} times another writer committed first; rerun the command when fewer are at work")


def _local_base(place: Path, manifest: Manifest) -> ChangeBase:
    return ChangeBase(folder=LocalFolder(place), manifest=manifest, number=next_generation(place, manifest), path=place)


def _next(place: ObjectFolder, before: Manifest, after: Manifest) -> Manifest:
    """Return the generation after `before` that has the contents of `after`."""
    gone = (before.known_shards | after.known_shards) - {entry.name for entry in after.shards}
    there = {file.name.removeprefix("shards/").partition(".")[0] for file in place.names("shards")} if gone else set[str]()
    try:
        return dataclasses.replace(after, generation=before.generation + 1, retired=tuple(sorted(gone & there)))
    except ValueError as error:
        raise CorruptError(f"{place.place('shards')}: {error}; rerun the command") from error
