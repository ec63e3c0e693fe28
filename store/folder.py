"""A store's folder, on a disk or in object storage: the operations that both have, and what they mean.

Names are relative to the folder, such as `shards/a.lmdb`. Everything that is written appears complete or not at all.
`LocalFolder` is on a disk; `ObjectFolder` (`store/remote/objects.py`) is in object storage.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bucketline.errors import CorruptError, StoreError
from bucketline.files.atomic_write import create_aside, is_aside, sync_folder, write_durably
from bucketline.files.paths import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MAX_READ_BYTES = 1 << 30  # of a file that is read whole, and whose length nothing states


class MissingObjectError(StoreError):
    """A file or an object is not there."""


class NoRangesError(StoreError):
    """A server answers a request of some bytes with the whole object."""


class ExistsError(StoreError):
    """A name is taken by another file or object."""


class DeniedError(StoreError):
    """The credentials, or the lack of any, do not allow a request; without the right to list, what is missing is denied too."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file or an object in a listing."""

    name: str  # relative to the store's folder, such as `shards/a.lmdb`
    num_bytes: int
    modified_s: float  # Unix time, by the clock that dates the folder's files
    e_tag: str | None = None  # another one if the object was replaced; None on a disk


class Folder(Protocol):
    """A store's folder. Safe for several threads.

    Every method raises a StoreError that names the file, what was found and what to do: MissingObjectError if it is not there.
    """

    @property
    def deadline_s(self) -> float:
        """Return for how long a failure may pass by itself, so that it is tried again; 0 on a disk."""
        ...

    @property
    def is_read_only(self) -> bool:
        """True of a web server: nothing can be written, nor its folders listed."""
        ...

    def place(self, name: str) -> str:
        """Return a file's path or URL, without user and password, for messages."""
        ...

    def read(self, name: str, most_bytes: int = MAX_READ_BYTES) -> bytes:
        """Return a whole file; a CorruptError if it is longer than `most_bytes`."""
        ...

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` up to, not including, `end`; fewer if the file ends first.

        The caller compares the length. A StoreError if the file ends at or before `begin`.
        """
        ...

    def look_up(self, name: str) -> ListedFile | None:
        """Return what a file is; None if it is not there."""
        ...

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Return the lengths of some files in bytes; None of those that are not there. As few requests as the place allows."""
        ...

    def names(self, prefix: str = "") -> Iterator[ListedFile]:
        """Yield the files in a subfolder (`shards`) and below, in no particular order."""
        ...

    def create(self, name: str, data: bytes) -> None:
        """Write a file durably if there is none of this name. Of several that create one name at a time, one succeeds.

        A file that holds exactly `data` counts as created: a request may have been repeated that had succeeded.
        """
        ...

    def write(self, name: str, source: bytes) -> None:
        """Write a file durably, replacing one that is there."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove files in the order given; one that is not there is not an error."""
        ...


def as_folder(place: Path | Folder) -> Folder:
    """Return the folder at a path; a folder is returned as it is."""
    return LocalFolder(place) if isinstance(place, Path) else place


def refuse_name(name: str, folder: object) -> None:
    """Check that a name is that of a file in a folder, and cannot lead out of it."""
    if not name or "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise StoreError(f"{name!r:.200} is not the name of a file in {folder}; expected one such as shards/NAME.lmdb")


def folder_time(folder: Folder) -> float:
    """Return the Unix time by the clock that dates a folder's files: the date of one that is written for this, and removed.

    A file server's clock may differ from this machine's, and a client of object storage hands on no `Date` of an answer.
    """
    name = f"pending/clock.{secrets.token_hex(4)}.tmp"  # what a kill leaves on a disk goes with other temporary files
    try:
        folder.write(name, b"1")
        found = folder.look_up(name)
    finally:
        with suppress(DeniedError):  # a bucket that nothing may be removed from keeps an object of a byte
            folder.remove([name])
    if found is None:
        raise StoreError(
            f"{folder.place(name)} was written and is not there, so the age of other files is unknown; rerun the command"
        )
    return found.modified_s


def _link(aside: Path, path: Path) -> None:
    """Move a temporary file to a name that no other file has; its own may stay.

    File systems without hard links (FAT, some network shares) cannot do so in one step; the store's lock keeps others away.
    """
    try:
        os.link(aside, path, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path)) from error
        aside.rename(path)


class LocalFolder:
    """A store's folder on a disk. Links to files are read; nothing is written or removed through a link to a folder."""

    deadline_s = 0.0
    is_read_only = False

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"LocalFolder({str(self.path)!r})"

    def place(self, name: str) -> str:
        return str(self.path / name) if name else str(self.path)

    def read(self, name: str, most_bytes: int = MAX_READ_BYTES) -> bytes:
        with self._explaining("read", name), open(open_regular(self._own(name)), "rb") as file:  # noqa: PTH123 - opens a descriptor
            data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise CorruptError(f"{self.place(name)} has more than {most_bytes} bytes, at most these are accepted")
        return data

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        with self._explaining("read", name), open(open_regular(self._own(name)), "rb") as file:  # noqa: PTH123 - opens a descriptor
            file.seek(begin)
            data = file.read(end - begin)
        if not data:
            raise StoreError(f"{self.place(name)} ends before byte {begin}, from which it was to be read; run `store verify`")
        return data

    def look_up(self, name: str) -> ListedFile | None:
        try:
            with self._explaining("look up", name):
                status = self._own(name).stat()
        except MissingObjectError:
            return None
        return ListedFile(name, status.st_size, status.st_mtime)

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        return [None if (found := self.look_up(name)) is None else found.num_bytes for name in names]

    def names(self, prefix: str = "") -> Iterator[ListedFile]:
        """Yield the files in a subfolder and below, links to files included; no links to folders, no temporary files."""
        prefix = prefix.strip("/")
        with self._explaining("list", prefix):
            folders = [self._own(prefix) if prefix else self.path]
            while folders:
                try:
                    found = list(os.scandir(folders.pop()))
                except (FileNotFoundError, NotADirectoryError):
                    continue
                for entry in found:
                    with suppress(FileNotFoundError):  # removed meanwhile, or a link to nothing
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(Path(entry.path))
                        elif entry.is_file() and not is_aside(entry.name):
                            status = entry.stat()
                            name = Path(entry.path).relative_to(self.path).as_posix()
                            yield ListedFile(name, status.st_size, status.st_mtime)

    def create(self, name: str, data: bytes) -> None:
        """Write a file durably if there is none of this name: write a temporary file, fsync, link, fsync the folder."""
        path = self._to_write(name)
        with self._explaining("create", name):
            aside, fd = create_aside(path)
        try:
            with self._explaining("create", name):
                with open(fd, "wb") as file:  # noqa: PTH123 - opens a descriptor
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                    _link(aside, path)
                sync_folder(path.parent)
        except ExistsError:
            if path.is_symlink() or self.read(name) != data:
                raise
        finally:
            aside.unlink(missing_ok=True)

    def write(self, name: str, source: bytes) -> None:
        """Write a file durably, replacing one that is there; a link in its place is replaced, not followed."""
        path = self._to_write(name)
        with self._explaining("write", name):
            write_durably(path, source)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files in the order given, and fsync their folders; one that is not there is not an error."""
        changed: dict[Path, str] = {}
        for name in names:
            path = self._own(name)
            self._refuse_links(name)
            with self._explaining("remove", name):
                path.unlink(missing_ok=True)
            changed[path.parent] = name
        for folder, name in changed.items():
            with self._explaining("remove", name), suppress(FileNotFoundError):
                sync_folder(folder)

    def _own(self, name: str) -> Path:
        refuse_name(name, self.path)
        return self.path / name

    def _to_write(self, name: str) -> Path:
        """Return the path of a file to write, in a folder that exists and is reached through no link below the store's."""
        path = self._own(name)
        self._refuse_links(name)
        with self._explaining("write", name):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _refuse_links(self, name: str) -> None:
        folder = self.path
        for part in name.split("/")[:-1]:
            folder /= part
            if folder.is_symlink():
                raise StoreError(
                    f"{folder} is a link; a store is changed only where its folders are its own: replace the link by the "
                    "folder, or move all of the store and link to it"
                )

    @contextmanager
    def _explaining(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            raise MissingObjectError(f"{self.place(name)} is missing; restore it, or run `store verify`") from error
        except FileExistsError as error:
            raise ExistsError(f"{self.place(name)} exists and has other content; rerun the command") from error
        except OSError as error:
            raise StoreError(f"cannot {verb} {self.place(name)}: {error.strerror}; fix this and rerun the command") from error
