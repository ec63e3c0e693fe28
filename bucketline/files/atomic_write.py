"""Atomic file writes: after a crash the old or the new file is there, complete. Links are never written through."""

from __future__ import annotations

import os
import re
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bucketline.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


_ASIDE = re.compile(r".+\.([0-9a-f]{8}|[0-9]+)\.tmp", re.DOTALL)  # decimal: the process id, in earlier versions
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_MODE = 0o666  # before umask


def is_aside(name: str) -> bool:
    """Return True if the name is that of a temporary file of `write_durably`."""
    return _ASIDE.fullmatch(name) is not None


def write_durably(path: Path, data: bytes, *, syncs: bool = True) -> None:
    """Replace `path` with `data`: write to an unpredictable temporary name, fsync, rename, fsync the folder.

    Without `syncs`, it is complete for every process, but not after a power failure; it then waits for no disk.
    """
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    fd = os.open(aside, CREATE, FILE_MODE)
    try:
        with open(fd, "wb") as file:  # noqa: PTH123 - opens a descriptor
            file.write(data)
            file.flush()
            if syncs:
                os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    if syncs:
        sync_folder(path.parent)


def write_or_explain(path: Path, data: bytes) -> None:
    """Replace `path` with `data`, like `write_durably`.

    Raises:
        StoreError: if it cannot be written; the previous content is kept.
    """
    try:
        write_durably(path, data)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}; fix that and rerun the command") from error


@contextmanager
def explaining(item: Path) -> Iterator[None]:
    """Convert an OSError in this block to a StoreError that names the file, or else `item`.

    Raises:
        StoreError: if the block raises an OSError.
    """
    try:
        yield
    except OSError as error:
        what = f"{error.filename or item} cannot be read or changed: {error.strerror or error}"
        raise StoreError(f"{what}; fix that and rerun the command") from error


def move_durably(source: Path, target: Path) -> None:
    """Move a file within a file system: fsync it, rename, fsync both folders."""
    with source.open("rb") as file:
        os.fsync(file.fileno())
    source.replace(target)
    sync_folder(target.parent)
    sync_folder(source.parent)


def sync_folder(folder: Path) -> None:
    """Fsync a folder's entries."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
