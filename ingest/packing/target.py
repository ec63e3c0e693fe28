"""The store that is packed into: a folder on a disk, or the folder that stands for a store in object storage."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bucketline.errors import StoreError
from bucketline.store import Store
from bucketline.store.commands.progress import bar_of_bytes
from bucketline.store.folder import LocalFolder
from bucketline.store.read.info import disk_bytes
from bucketline.store.read.lost_files import files_of, refuse_lost_shards
from bucketline.store.remote.generations import find_newest
from bucketline.store.write.newest import newest_manifest
from bucketline.store.write.publish import publish

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bucketline.store.folder import Folder
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.remote.objects import ObjectFolder
    from bucketline.store.sync.working import WorkingStore
    from bucketline.store.transfer.sender import ShardSender
    from bucketline.typed_json import Json


class Placed(Protocol):
    """The options of a command that writes to a store, in a folder or in object storage."""

    @property
    def place(self) -> Path | str:
        """Path or URL of the store."""

    @property
    def store(self) -> Path:
        """Its folder, or the one that stands for it."""

    def objects(self, url: Path | str) -> ObjectFolder:
        """Return the folder at a URL."""


def folder_of(config: Placed) -> Folder:
    """Return the folder where the store is."""
    return LocalFolder(config.store) if isinstance(config.place, Path) else config.objects(config.place)


def newest_whole(folder: Folder) -> Manifest | None:
    """Return the newest generation of the store in a folder; None if there is none.

    Raises:
        CorruptError: if one of its shards has lost a file: by its index, every sample of it would look unchanged.
        StoreError: if it cannot be read.
    """
    if (manifest := find_newest(folder, lists=True)) is not None:
        refuse_lost_shards(folder, manifest)
    return manifest


def newest_store(config: Placed) -> Store | None:
    """Return the newest generation of the store where it is; None if there is none. Raises what `newest_whole` does."""
    folder = folder_of(config)
    manifest = newest_whole(folder)
    return None if manifest is None else Store.at(folder, manifest)


class PackTarget:
    """The store of a pack or an import; `path` is its folder on this machine."""

    def __init__(self, config: Placed) -> None:
        """Read and request nothing yet."""
        self._config, self.path = config, config.store
        self._working: WorkingStore | None = None
        if not isinstance(config.place, Path):
            from bucketline.store.sync.working import WorkingStore

            self._working = WorkingStore(config.objects(config.place), config.store)

    @property
    def is_remote(self) -> bool:
        return self._working is not None

    def held(self) -> AbstractContextManager[None]:
        """Let the folder stand for the store in object storage, for this process only; raises what `WorkingStore.held` does."""
        return nullcontext() if self._working is None else self._working.held()

    def newest(self, *, is_held: bool) -> Store | None:
        """Return the newest generation of the store, from the folder if that `is_held`; None if there is none.

        Raises:
            StoreError: as `newest_store`.
        """
        if self._working is None or not is_held:
            return newest_store(self._config)
        manifest = newest_manifest(self.path)
        return None if manifest is None else self._working.open(manifest)

    def open(self, manifest: Manifest) -> Store:
        """Return a generation of the store."""
        return Store(self.path, manifest) if self._working is None else self._working.open(manifest)

    def send_left(self, manifest: Manifest) -> None:
        """Send the shards that an interrupted run made and did not send."""
        if self._working is not None:
            self._working.send_left(manifest, lambda total: bar_of_bytes("send", total))

    def sender(self, manifest: Manifest, run: str, *, is_first: bool) -> ShardSender | None:
        """Return what sends the shards of this process; None if they stay."""
        return None if self._working is None else self._working.sender(manifest, run, is_first=is_first)

    def publish(
        self, manifest: Manifest, sealed: Iterable[str], dropped: Iterable[bytes] = (), rules: dict[str, Json] | None = None
    ) -> Manifest:
        """Publish a generation after `manifest` in the folder, with sealed shards that it does not list; see `publish`.

        Raises:
            StoreError: if the folder cannot be written.
        """
        try:
            return publish(self.path, manifest, set(sealed) - manifest.known_shards, dropped, rules)
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be written: {error.strerror}; what was packed is kept, rerun the command"
            ) from error

    def commit(self, manifest: Manifest) -> Manifest:
        """Let a published generation be seen where the store is; return the store's newest one."""
        return manifest if self._working is None else self._working.commit(manifest)

    def disk_bytes(self, manifest: Manifest) -> int:
        """Return the size of the store's files."""
        if self._working is None:
            return disk_bytes(self.path)
        return sum(file.num_bytes for entry in manifest.shards for _, file in files_of(self.path, entry))
