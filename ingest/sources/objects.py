"""Images in object storage as a source: those below a folder, or those that a table names. A sample's id is as on a disk."""

from __future__ import annotations

import io
import os
import posixpath
import tempfile
from abc import abstractmethod
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO

from bucketline.errors import SourceError, UsageError
from bucketline.files.paths import IMAGE_SUFFIXES, STATUS, is_status
from bucketline.ingest.images.crop import Reason, RejectedError
from bucketline.ingest.sources.captions.files import MAX_CAPTIONS_BYTES, CaptionFiles, CaptionNames
from bucketline.ingest.sources.captions.table import TableRows, read_rows
from bucketline.ingest.sources.folder import FoundFiles, naming_notes
from bucketline.ingest.sources.object_place import (
    folder_at,
    is_hidden,
    list_place,
    of_one_image,
    of_source,
    split_url,
    stamp_of,
)
from bucketline.ingest.sources.parquet import inside_id, listing_of_rows
from bucketline.ingest.sources.partner_names import FilePartners
from bucketline.ingest.sources.source import Listing, Source, SourceItem, SourceOptions, Stamp, refuse_too_large
from bucketline.store.remote.urls import parse_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from typing_extensions import Buffer

    from bucketline.ingest.sources.captions.files import Captions
    from bucketline.store.folder import ListedFile
    from bucketline.store.remote.objects import ObjectFolder


# ----------------------------------------------------------------------------------------------------------------------- place


def refuse_overlapping_urls(source: str, store: str) -> None:
    one, other = parse_url(source), parse_url(store)
    if (one.kind, one.host) != (other.kind, other.host):
        return
    first, second = f"{one.path}/".lstrip("/"), f"{other.path}/".lstrip("/")
    if first.startswith(second) or second.startswith(first):
        raise UsageError(
            f"the source {source} and the store {store} are the same place, or one is inside the other; "
            "choose a store outside the folder of images"
        )


# ----------------------------------------------------------------------------------------------------------------- object file


class ByteWindow(io.RawIOBase):
    """Keeps the position within `num_bytes` bytes; subclasses read at a position. Use it from one thread."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes, self._at = num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence]
        if base + to < 0:
            raise ValueError(f"{base + to} is not a position in a file")
        self._at = base + to
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        num_requested = max(0, min(len(view), self._num_bytes - self._at))
        num_read = self._read_at(self._at, view[:num_requested]) if num_requested else 0
        self._at += num_read
        return num_read

    @abstractmethod
    def _read_at(self, at: int, view: memoryview) -> int:
        """Fill `view`, which is not empty, from position `at`; return how many bytes were read, at least one before the end."""


class FileWindow(ByteWindow):
    """Reads `num_bytes` bytes of a file, starting at `offset`; closing the window closes the file."""

    def __init__(self, file: IO[bytes], offset: int, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self._file, self._offset = file, offset

    def close(self) -> None:
        self._file.close()
        super().close()

    def _read_at(self, at: int, view: memoryview) -> int:
        return os.preadv(self._file.fileno(), [view], self._offset + at)


HEADER_PART_BYTES = 64 << 10  # of an image of which only the header is read
STREAM_PART_BYTES = 4 << 20  # of what is read from one end to the other
STREAM_PARTS_AHEAD = 4


class ObjectFile(ByteWindow):
    """Reads an object of `num_bytes` bytes in parts. Use it from one thread."""

    def __init__(
        self,
        folder: ObjectFolder,
        name: str,
        num_bytes: int,
        *,
        part_bytes: int,
        parts_ahead: int = 0,
        explaining: Callable[[], AbstractContextManager[None]] = of_one_image,
    ) -> None:
        """Request nothing yet; `parts_ahead` are requested while one is read. Requests are made within `explaining`."""
        super().__init__(num_bytes)
        self._folder, self._name = folder, name
        self._part_bytes, self._parts_ahead = part_bytes, parts_ahead
        self._pool = ThreadPoolExecutor(parts_ahead + 1, thread_name_prefix="bucketline-part") if parts_ahead else None
        self._coming: dict[int, Future[bytes]] = {}
        self._number, self._part = -1, b""  # the part that was read last
        self._explaining = explaining

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _read_at(self, at: int, view: memoryview) -> int:
        number, within = divmod(at, self._part_bytes)
        data = self._read_part(number)[within : within + len(view)]
        view[: len(data)] = data
        return len(data)

    def _read_part(self, number: int) -> bytes:
        if number == self._number:
            return self._part
        if self._pool is None:
            part = self._request(number)
        else:
            last = min(number + self._parts_ahead, (self._num_bytes - 1) // self._part_bytes)
            self._coming = {at: future for at, future in self._coming.items() if number <= at}
            for at in range(number, last + 1):
                if at not in self._coming:
                    self._coming[at] = self._pool.submit(self._request, at)
            part = self._coming.pop(number).result()
        self._number, self._part = number, part
        return part

    def _request(self, number: int) -> bytes:
        begin = number * self._part_bytes
        with self._explaining():
            data = self._folder.read_range(self._name, begin, min(begin + self._part_bytes, self._num_bytes))
            return bytes(memoryview(data))


# ---------------------------------------------------------------------------------------------------------------------- source

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
        data, stamp = self.read(item)
        return replace(item, held=data, at=(stamp.num_bytes, stamp.mtime_ns))

    def stamp(self, item: SourceItem) -> Stamp:
        if item.at:
            return Stamp(num_bytes=item.at[0], mtime_ns=item.at[1])
        with of_one_image():
            entry = self._objects.look_up(item.id)
        if entry is None:
            raise RejectedError(Reason.UNREADABLE, f"{self._objects.place(item.id)} is missing")
        return stamp_of(entry)

    def read(self, item: SourceItem) -> tuple[bytes, Stamp]:
        if item.held is not None:
            return item.held, self.stamp(item)
        with of_one_image():
            data, entry = self._objects.fetch(item.id, lambda entry: refuse_too_large(entry.num_bytes))
        # the stamp of the listing: if the object was replaced since, the next run notices it
        return data, self.stamp(item) if item.at else stamp_of(entry)

    def opened(self, item: SourceItem) -> BinaryIO:
        if item.held is not None:
            return io.BytesIO(item.held)
        num_bytes = self.stamp(item).num_bytes
        refuse_too_large(num_bytes)
        file = ObjectFile(self._objects, item.id, num_bytes, part_bytes=HEADER_PART_BYTES)
        return io.BufferedReader(file, HEADER_PART_BYTES)

    @contextmanager
    def _table(self, name: str) -> Iterator[Path]:
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
            options = self.options
            found = FoundFiles(captions, FilePartners(options.partner_rules, lambda place: list_place(place, options)))
            inside = tuple(
                f"{place.rstrip('/').removeprefix(self.url)[1:]}/"
                for place in options.partner_rules.places
                if place.startswith(f"{self.url}/")
            )
            ats: dict[str, tuple[int, ...]] = {}
            with of_source(self.url):
                listed = [entry for entry in self._objects.names(is_bounded=False) if not is_hidden(entry.name)]
            for entry in sorted(listed, key=lambda entry: entry.name.rpartition("/")[::2]):
                folder, slash, name = entry.name.rpartition("/")
                if name == STATUS:
                    self._refuse_run(folder, entry)
                if entry.name.startswith(inside):
                    continue
                found.add(folder + slash, name)
                stamp = stamp_of(entry)
                ats[entry.name] = (stamp.num_bytes, stamp.mtime_ns)
            found.at = ats
            if not found.images:
                kinds = ", ".join(sorted(IMAGE_SUFFIXES))
                what = f"{len(listed)} objects" if listed else "nothing"
                raise SourceError(f"{self.url} has no images; there is {what} below it, searched for {kinds}; check the URL")
            rows = TableRows(folders=(self.url,))
            for table in found.tables:
                with self._table(table) as path:
                    rows.add(table, read_rows(path, table, captions.names, rows.notes, options.partner_rules))
            listing = found.listing(rows, self.url)
        listing.notes += naming_notes(found.images)
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
            rows = read_rows(path, name, CaptionNames.of(self.options), listing.notes, self.options.partner_rules)
            return listing_of_rows(
                rows,
                lambda place, name: inside_id(place, name, (self.folder_url,), lambda _: False),
                self.url,
                self.options,
                listing,
            )


@dataclass(slots=True, kw_only=True)
class CaptionObjects(CaptionFiles):
    """Caption files in object storage, read ahead in the order of the images."""

    objects: ObjectFolder
    pool: ThreadPoolExecutor
    _coming: dict[str, Future[bytes]] = field(default_factory=dict)

    def find_all(self, images: Iterable[str]) -> Iterator[tuple[Captions, str | None]]:
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
