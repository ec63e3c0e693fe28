"""An export as tars for the webdataset library: `000000.tar` and on, three members a sample.

KEY.safetensors is the sample's file, KEY.json its record, KEY.txt its first caption; KEY is the digest of its id, so that an
id never becomes a path. Nothing in a tar depends on when or by whom it was written.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import tarfile
from typing import TYPE_CHECKING, Any, BinaryIO

from bucketline.errors import StoreError
from bucketline.store.digests import sample_digest
from bucketline.store.sample_file import record_as_json

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from bucketline.store.record import SampleRecord


class TarPlan:
    """Which tar each sample goes to, and what the tars take."""

    def __init__(self, shard_bytes: int) -> None:
        self.num_samples = 0
        self.num_files = 0
        self.largest = 0, ""  # bytes of a tar of one sample alone, and its id
        self._shard_bytes = shard_bytes
        self._full_bytes = 0  # of the tars before the last
        self._members_bytes = 0  # of the last tar

    @property
    def num_bytes(self) -> int:
        return self._full_bytes + (_tar_bytes(self._members_bytes) if self.num_files else 0)

    def add(self, record: SampleRecord, file_bytes: int) -> None:
        """Count a sample whose file has that many bytes: into the last tar where it still fits, else into a new one."""
        sizes = (file_bytes, *(len(member) for member in _small_members(record).values()))
        taken = sum(tarfile.BLOCKSIZE + _rounded(size, tarfile.BLOCKSIZE) for size in sizes)
        self.largest = max(self.largest, (_tar_bytes(taken), record.id))
        if self.num_files == 0 or _tar_bytes(self._members_bytes + taken) > self._shard_bytes:
            self._full_bytes = self.num_bytes
            self._members_bytes = 0
            self.num_files += 1
        self._members_bytes += taken
        self.num_samples += 1


class TarsWriter:
    """Writes the tars, one after the other."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self.plan = TarPlan(shard_bytes)
        self._folder = folder
        self._file: BinaryIO | None = None
        self._tar: Any = None

    def add(self, record: SampleRecord, data: bytes) -> None:
        """Write a sample's members."""
        before = self.plan.num_files
        self.plan.add(record, len(data))
        if self.plan.num_files != before:
            self._close()
            self._open(before)
        self._tar.write({"__key__": sample_digest(record.id).hex(), "safetensors": data, **_small_members(record)})

    def _open(self, number: int) -> None:
        from webdataset import TarWriter

        self._file = (self._folder / f"{number:06d}.tar").open("wb")
        self._tar = TarWriter(self._file, user="", group="", mode=0o644, encoder=False, mtime=0, compress=False)

    def _close(self) -> None:
        if self._file is not None:
            with self._file:
                self._tar.close()
            self._file = None

    def __enter__(self) -> TarsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._close()
            return
        with contextlib.suppress(OSError):  # a full disk is full for the end of the tar as well
            self._close()


def require_webdataset() -> None:
    """Refuse to begin where the library is not installed.

    Raises:
        StoreError: saying how to install it.
    """
    if importlib.util.find_spec("webdataset") is None:
        raise StoreError("the package webdataset is not installed; install it with: pip install 'bucketline[export]'")


def _small_members(record: SampleRecord) -> dict[str, bytes]:
    first = record.captions[0] if record.captions else ""
    return {
        "json": json.dumps(record_as_json(record)).encode("ascii"),
        "txt": first.encode("utf-8", "surrogateescape"),
    }


def _tar_bytes(members_bytes: int) -> int:
    """Give a tar's length: its members, two blocks of zeros, and zeros up to a whole record."""
    return _rounded(members_bytes + 2 * tarfile.BLOCKSIZE, tarfile.RECORDSIZE)


def _rounded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit
