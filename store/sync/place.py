"""The place of a store that is written by a program: a folder, or a URL by way of a folder in which its shards are made."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import is_url, refuse_misspelt, working_folder
from bucketline.store.sync.working import WorkingStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from typing import TypeAlias

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.remote.urls import RemoteOptions
    from bucketline.store.write.store_writer import StoreWriter

    BarOfBytes: TypeAlias = Callable[[int], AbstractContextManager[Callable[[int], None]]]


def _no_bar(_: int) -> AbstractContextManager[Callable[[int], None]]:
    return nullcontext(lambda _: None)


class WritePlace:
    """The place where a store is written. `path` is its folder, or the one that stands for it on this machine."""

    def __init__(self, place: Path | str, remote: RemoteOptions | None = None, work: Path | str | None = None) -> None:
        """Request nothing yet. `remote` is how to reach a URL, and `work` the folder for it; by default next to the cache.

        Raises:
            UsageError: if it is a URL that cannot be a store's.
        """
        self.objects: ObjectFolder | None = None
        if isinstance(place, str):
            refuse_misspelt(place)
            self.objects = ObjectFolder.open(place, remote) if is_url(place) else None
        self.path = working_folder(place if self.objects else Path(place), work).absolute()
        self.working = WorkingStore(self.objects, self.path) if self.objects is not None else None

    @contextmanager
    def held(self, writer: StoreWriter, progress: BarOfBytes = _no_bar) -> Iterator[None]:
        """Enter the store's writer, and first bring to a URL what an interrupted run had left in the folder.

        `progress` shows the bytes of that, given their number.

        Raises:
            LockedError, FingerprintError, StoreError: as `StoreWriter.__enter__`; or if the URL cannot be read or written.
        """
        with ExitStack() as held:
            if self.working is not None:
                held.enter_context(self.working.held())
            held.enter_context(writer)
            if self.working is not None:
                self.working.send_left(writer.manifest, progress)
            yield

    def publish(self, writer: StoreWriter, sealed: Iterable[str] = ()) -> Manifest:
        """Publish what has been sealed, and sent if the place is a URL. Return the newest generation of the place.

        Raises:
            StoreError, FingerprintError: as `StoreWriter.publish` and `WorkingStore.commit`.
        """
        published = writer.publish(sealed)
        return published if self.working is None else self.working.commit(published)
