"""Images in object storage as a source: those below a folder, or those that a table names. A sample's id is as on a disk."""

from __future__ import annotations

import io
import posixpath
import tempfile
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from bucketline.errors import SourceError
from bucketline.files.paths import IMAGE_SUFFIXES
from bucketline.files.run_marker import STATUS, is_status
from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.ingest.sources.captions.caption_files import CaptionFiles
from bucketline.ingest.sources.captions.caption_text import MAX_CAPTIONS_BYTES, CaptionNames
from bucketline.ingest.sources.captions.metadata_table import TableRows, read_rows
from bucketline.ingest.sources.folder import FoundFiles
from bucketline.ingest.sources.kohya_folders import naming_notes
from bucketline.ingest.sources.local_files import refuse_too_large
from bucketline.ingest.sources.objects.object_file import HEADER_PART_BYTES, ObjectFile
from bucketline.ingest.sources.objects.place import folder_at, of_one_image, of_source, split_url, stamp_of
from bucketline.ingest.sources.options import SourceOptions
from bucketline.ingest.sources.source import Listing, Source, SourceBytes, SourceItem, Stamp
from bucketline.ingest.sources.splits import Splits
from bucketline.ingest.sources.table import inside_id, listing_of_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bucketline.ingest.sources.captions.caption_text import Captions
    from bucketline.store.folder import ListedFile
    from bucketline.store.remote.objects import ObjectFolder

CAPTIONS_AT_ONCE = 32
IMAGES_AHEAD = 64  # of which the captions are read ahead, each of at most MAX_CAPTIONS_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSource(Source):
    """Base of sources whose images are objects below a folder. An item's `at` is its size and time, if they are known."""

    url: str  # of the folder, or of a table in it
    options: SourceOptions = field(default_factory=SourceOptions)

    @property
    def folder_url(self) -> str:
        return self.url

    @property
    def _objects(self) -> ObjectFolder:
        return folder_at(self.folder_url, self.options)

    def known_bytes(self, item: SourceItem) -> int | None:
        """Return the size of an item's file if it is known without a request."""
        return item.at[0] if item.at else None

    def fetched(self, item: SourceItem) -> SourceItem:
        """Return an item with its bytes; raises what `read` does."""
        found = self.read(item)
        return replace(item, held=found.data, at=(found.stamp.num_bytes, found.stamp.mtime_ns))

    def stamp(self, item: SourceItem) -> Stamp:
        if item.at:
            return Stamp(num_bytes=item.at[0], mtime_ns=item.at[1])
        with of_one_image():
            entry = self._objects.look_up(item.id)
        if entry is None:
            raise RejectedError(Reason.UNREADABLE, f"{self._objects.place(item.id)} is missing")
        return stamp_of(entry)

    def read(self, item: SourceItem) -> SourceBytes:
        if item.held is not None:
            return SourceBytes(data=item.held, stamp=self.stamp(item))
        with of_one_image():
            data, entry = self._objects.fetch(item.id, lambda entry: refuse_too_large(entry.num_bytes))
        # the stamp of the listing: if the object was replaced since, the next run notices it
        return SourceBytes(data=data, stamp=self.stamp(item) if item.at else stamp_of(entry))

    def opened(self, item: SourceItem) -> BinaryIO:
        if item.held is not None:
            return io.BytesIO(item.held)
        num_bytes = self.stamp(item).num_bytes
        refuse_too_large(num_bytes)
        file = ObjectFile(self._objects, item.id, num_bytes, part_bytes=HEADER_PART_BYTES)
        return io.BufferedReader(file, HEADER_PART_BYTES)

    @contextmanager
    def _table(self, name: str) -> Iterator[Path]:
        """Get a table into a temporary folder; yield its path."""
        with tempfile.TemporaryDirectory(prefix="bucketline-", ignore_cleanup_errors=True) as folder:
            path = Path(folder) / posixpath.basename(name)
            with of_source(name):
                self._objects.download(name, path)
            yield path


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectFolderSource(ObjectSource):
    """The images of a folder and its subfolders."""

    def listing(self) -> Listing:
        """List the folder in pages, as `list_folder` lists one on a disk."""
        with ThreadPoolExecutor(CAPTIONS_AT_ONCE, thread_name_prefix="bucketline-captions") as pool:
            captions = CaptionObjects(folder=Path(), options=self.options, objects=self._objects, pool=pool)
            found = FoundFiles(captions)
            entries: dict[str, ListedFile] = {}
            with of_source(self.url):
                listed = [entry for entry in self._objects.names(is_bounded=False) if not _is_hidden(entry.name)]
            for entry in sorted(listed, key=lambda entry: entry.name.rpartition("/")[::2]):
                folder, slash, name = entry.name.rpartition("/")
                if name == STATUS:
                    self._refuse_run(folder, entry)
                found.add(folder + slash, name)
                entries[entry.name] = entry
            if not found.images:
                kinds = ", ".join(sorted(IMAGE_SUFFIXES))
                what = f"{len(listed)} objects" if listed else "nothing"
                raise SourceError(f"{self.url} has no images; there is {what} below it, searched for {kinds}; check the URL")
            rows = TableRows(folders=(self.url,))
            for table in found.tables:
                with self._table(table) as path:
                    rows.add(table, read_rows(path, table, captions.names, rows.notes))
            listing = found.listing(rows, self.url)
        listing.notes += naming_notes(found.images)
        for at, item in enumerate(listing.items):
            stamp = stamp_of(entries[item.id])
            listing.items[at] = replace(item, at=(stamp.num_bytes, stamp.mtime_ns))
        return listing

    def _refuse_run(self, folder: str, entry: ListedFile) -> None:
        with of_source(self.url):
            is_run = is_status(self._objects.fetch(entry.name)[0])
        if is_run:
            raise SourceError(
                f"{self._objects.place(folder)} has a training run ({STATUS}), whose images would be packed as samples; "
                "move it out of the source and rerun the command"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectTableSource(ObjectSource):
    """The images that a table names, in its folder or below. No other objects are read, and none is listed."""

    @property
    def folder_url(self) -> str:
        return split_url(self.url)[0]

    def listing(self) -> Listing:
        """Read the table; see `TableSource.listing`."""
        name, listing = split_url(self.url)[1], Listing()
        with self._table(name) as path:
            rows = read_rows(path, name, CaptionNames.of(self.options), listing.notes)
            return listing_of_rows(
                rows,
                lambda row: inside_id(row, (self.folder_url,), lambda _: False),
                self.url,
                Splits(self.options.dataset_splits),
                listing,
            )


def _is_hidden(name: str) -> bool:
    """Return whether an object is hidden, as a file on a disk would be, or only marks a folder."""
    return name.endswith("/") or any(part.startswith(".") for part in name.split("/"))


@dataclass(slots=True, kw_only=True)
class CaptionObjects(CaptionFiles):
    """Caption files in object storage, read ahead in the order of the images."""

    objects: ObjectFolder
    pool: ThreadPoolExecutor
    _coming: dict[str, Future[bytes]] = field(default_factory=dict)

    def find_all(self, images: Iterable[str]) -> Iterator[tuple[Captions, str | None]]:
        """Yield what `find` returns for each image, in order."""
        waiting: deque[str] = deque()
        for image in images:
            waiting.append(image)
            for path in self.candidates(image):
                if path not in self._coming:
                    self._coming[path] = self.pool.submit(self._get, path)
            if len(waiting) > IMAGES_AHEAD:
                yield self._found(waiting.popleft())
        while waiting:
            yield self._found(waiting.popleft())

    def _found(self, image: str) -> tuple[Captions, str | None]:
        found = self.find(image)
        for path in self.candidates(image):
            self._coming.pop(path, None)
        return found

    def load(self, path: str) -> bytes:
        """Return a file's content; see `CaptionFiles.load`."""
        coming = self._coming.get(path)
        return self._get(path) if coming is None else coming.result()

    def _get(self, path: str) -> bytes:
        with of_one_image():
            return self.objects.fetch(path, lambda entry: refuse_too_large(entry.num_bytes, MAX_CAPTIONS_BYTES))[0]
