"""A store as those who write it see it: hold it, enter it, publish in it. `LocalTarget` is on a disk.

`store/sync/working.py` has the one for a store in object storage, whose shards are made in a folder on a disk and sent.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

from bucketline.errors import StoreError
from bucketline.store.folder import Folder, LocalFolder
from bucketline.store.format.manifest import MANIFEST, check_fingerprint, newest_intact, write_manifest
from bucketline.store.read.info import disk_bytes
from bucketline.store.read.store import Store
from bucketline.store.write.change_base import is_published, newest_manifest
from bucketline.store.write.publish import FOLDERS, adopt, lock_store, new_manifest, prepare_store, publish

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.schema import Schema
    from bucketline.typed_json import Json


class StoreTarget(Protocol):
    """A store that is written, on a disk or in object storage. Can be pickled."""

    path: Path  # of the folder, laid out as a store, in which shards are made: on a disk the store's own

    @property
    def folder(self) -> Folder:
        """The store's folder, where readers find it."""
        ...

    def held(self) -> AbstractContextManager[None]:
        """Prepare to write, for this process only. Enter it before `newest`."""
        ...

    def newest(self) -> Manifest | None:
        """Return the newest generation; None if there is no store yet."""
        ...

    def writing(self, schema: Schema) -> AbstractContextManager[Manifest]:
        """Lock the store, creating it if needed, and yield its newest generation after adopting what a killed writer left."""
        ...

    def open(self, manifest: Manifest) -> Store:
        """Return a generation of the store."""
        ...

    def publish(
        self, manifest: Manifest, sealed: Iterable[str], dropped: Iterable[bytes] = (), rules: dict[str, Json] | None = None
    ) -> Manifest:
        """Publish sealed shards that `manifest`, the newest generation known here, does not list; see `with_shards`."""
        ...

    def send_lists(self) -> None:
        """Let what the packer notes next to a store be found where the store is."""
        ...

    def disk_bytes(self, manifest: Manifest) -> int:
        """Return the size of the store's files."""
        ...


class LocalTarget:
    """A store on a disk; see `StoreTarget`."""

    def __init__(self, path: Path) -> None:
        """Read nothing yet."""
        self.path = path

    @property
    def folder(self) -> Folder:
        """The store's folder."""
        return LocalFolder(self.path)

    def held(self) -> AbstractContextManager[None]:
        """Do nothing: `writing` locks the store."""
        return nullcontext()

    def newest(self) -> Manifest | None:
        return newest_manifest(self.path)

    @contextmanager
    def writing(self, schema: Schema) -> Iterator[Manifest]:
        store = self.path
        stored_manifest(store, schema)  # before the folder is touched
        prepare_store(store)
        with lock_store(store):
            manifest = stored_manifest(store, schema)  # read again under the lock
            if manifest is None or not is_published(store, manifest):  # new, or a crash between two writes
                manifest = write_manifest(store, manifest or new_manifest(schema))
            yield publish(store, manifest, adopt(store, manifest), ())

    def open(self, manifest: Manifest) -> Store:
        """Return a generation of the store."""
        return Store(self.path, manifest)

    def publish(
        self, manifest: Manifest, sealed: Iterable[str], dropped: Iterable[bytes] = (), rules: dict[str, Json] | None = None
    ) -> Manifest:
        return publish(self.path, manifest, set(sealed) - {entry.name for entry in manifest.shards}, dropped, rules)

    def send_lists(self) -> None:
        """Do nothing: they are in the store's folder."""

    def disk_bytes(self, manifest: Manifest) -> int:  # noqa: ARG002 - as of `StoreTarget`
        """Return the disk space of the store's files."""
        return disk_bytes(self.path)


def stored_manifest(store: Path, schema: Schema) -> Manifest | None:
    """Return the newest generation of the store that is to be continued; None if there is no store yet."""
    if store.exists() and not store.is_dir():
        raise StoreError(f"{store} is a file; expected a store's folder, or a path where there is nothing")
    if store.is_dir() and not (store / MANIFEST).exists():
        strange = sorted(path.name for path in store.iterdir() if path.name not in FOLDERS and path.suffix != ".tmp")
        if strange and newest_intact(store) is None:
            raise StoreError(
                f"{store} is not a store and not empty (it has {strange[0]!r}); choose a path where there is nothing"
            )
    manifest = newest_manifest(store)
    if manifest is not None:
        check_fingerprint(manifest, schema)
    return manifest
