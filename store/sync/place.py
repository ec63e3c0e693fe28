"""The place of a store that is written by a program: a folder, or a URL by way of a folder in which its shards are made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import is_url, refuse_misspelt, working_cache, working_folder
from bucketline.store.sync.working import WorkingStore, no_bar
from bucketline.store.write.target import LocalTarget

if TYPE_CHECKING:
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.remote.urls import RemoteOptions
    from bucketline.store.sync.working import BarOfBytes
    from bucketline.store.transfer.sender import ShardSender
    from bucketline.store.write.target import StoreTarget


def target_at(
    place: Path | str, remote: RemoteOptions | None = None, work: Path | str | None = None, show: BarOfBytes = no_bar
) -> LocalTarget | WorkingStore:
    """Return the store at a path or URL, to be written; nothing is requested yet.

    `remote` is how to reach a URL, and `work` the folder for it; by default next to the cache. `show`: see `WorkingStore`.
    """
    if isinstance(place, str):
        refuse_misspelt(place)
    if not is_url(place):
        return LocalTarget(Path(place).absolute())
    path = working_folder(place, work).absolute()
    return WorkingStore(ObjectFolder.open(str(place), remote), path, working_cache(work), show)


def sender_to(target: StoreTarget, manifest: Manifest, run: str, *, is_first: bool) -> ShardSender | None:
    """Return what sends the shards that a process makes; None if they stay on the disk; see `WorkingStore.sender`."""
    return target.sender(manifest, run, is_first=is_first) if isinstance(target, WorkingStore) else None
