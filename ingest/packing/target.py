"""The store of a pack or an import: on a disk, or in object storage by way of a folder in which its shards are made."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bucketline.store import Store
from bucketline.store.commands.place import bar_of_bytes
from bucketline.store.folder import LocalFolder
from bucketline.store.read.lost_files import refuse_lost_shards
from bucketline.store.remote.generations import find_newest
from bucketline.store.remote.urls import working_cache
from bucketline.store.write.publish import LocalTarget

if TYPE_CHECKING:
    from bucketline.store.folder import Folder
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.remote.objects import ObjectFolder
    from bucketline.store.write.publish import StoreTarget


class Placed(Protocol):
    """The options of a command that writes to a store, in a folder or in object storage."""

    @property
    def place(self) -> Path | str:
        """Path or URL of the store."""

    @property
    def store(self) -> Path:
        """Its folder, or the one that stands for it."""

    @property
    def work(self) -> Path | None:
        """The folder that was given for `store`."""

    def objects(self, url: Path | str) -> ObjectFolder:
        """Return the folder at a URL."""


def target_of(config: Placed) -> StoreTarget:
    """Return the store, to be written; nothing is requested yet."""
    if isinstance(config.place, Path):
        return LocalTarget(config.store)
    from bucketline.store.sync.working import WorkingStore

    folder, show = config.objects(config.place), partial(bar_of_bytes, "send")
    return WorkingStore(folder, config.store, working_cache(config.work), show)


def newest_whole(folder: Folder) -> Manifest | None:
    """Return the newest generation of the store in a folder; None if there is none."""
    if (manifest := find_newest(folder, lists=True)) is not None:
        refuse_lost_shards(folder, manifest)
    return manifest


def newest_store(config: Placed) -> Store | None:
    """Return the newest generation of the store where it is; None if there is none. Raises what `newest_whole` does."""
    folder = LocalFolder(config.store) if isinstance(config.place, Path) else config.objects(config.place)
    manifest = newest_whole(folder)
    return None if manifest is None else Store.at(folder, manifest, working_cache(config.work))
