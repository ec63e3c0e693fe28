"""Writing a file so that after a crash either the old one or the new one is there, whole."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bucketline.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def write_durably(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: write aside, fsync, rename, fsync the folder."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_or_explain(path: Path, data: bytes) -> None:
    """Replace `path` by `data` as `write_durably` does.

    Raises:
        StoreError: where it cannot be written; what was there before still is.
    """
    try:
        write_durably(path, data)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}; mend that and run the same command again") from error


@contextmanager
def explaining(item: Path) -> Iterator[None]:
    """Have what the system refuses in this block be an error of ours that names the file, or else the item.

    Raises:
        StoreError: in the place of an OSError.
    """
    try:
        yield
    except OSError as error:
        what = f"{error.filename or item} cannot be read or changed: {error.strerror or error}"
        raise StoreError(f"{what}; mend that and run the same command again") from error


def move_durably(source: Path, target: Path) -> None:
    """Move a file within a file system: fsync it, rename, fsync both folders."""
    with source.open("rb") as file:
        os.fsync(file.fileno())
    source.replace(target)
    sync_folder(target.parent)
    sync_folder(source.parent)


def sync_folder(folder: Path) -> None:
    """Make a folder's entries durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
