"""Export as WebDataset tars: `000000.tar` and so on, three members per sample.

KEY.safetensors is the sample's file, KEY.json its record, KEY.txt its first caption. KEY is the digest of the sample id: an
id never becomes a path. Tars are reproducible: they contain no times or owners.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import tarfile
from typing import TYPE_CHECKING, Any, BinaryIO

from bucketline.errors import StoreError
from bucketline.store.export.sample_file import record_as_json
from bucketline.store.format.hashing import sample_digest, text_bytes

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from bucketline.store.format.sample_record import SampleRecord


class TarPlan:
    """Assigns samples to tars and counts their sizes."""

    def __init__(self, shard_bytes: int) -> None:
        self.num_samples = 0
        self.num_files = 0
        self.largest = 0, ""  # bytes of the largest single-sample tar, and the sample's id
        self._shard_bytes = shard_bytes
        self._full_bytes = 0  # of all tars except the last
        self._members_bytes = 0  # of the last tar

    @property
    def num_bytes(self) -> int:
        return self._full_bytes + (_tar_bytes(self._members_bytes) if self.num_files else 0)

    def add(self, record: SampleRecord, file_bytes: int) -> None:
        """Count a sample whose file has `file_bytes` bytes: in the last tar if it still fits, else in a new one."""
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
    """Writes the tars, one after another."""

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
        with contextlib.suppress(OSError):  # on a full disk, writing the end of the tar fails too
            self._close()


def require_webdataset() -> None:
    """Check that the webdataset library is installed.

    Raises:
        StoreError: if it is not; the message has the install command.
    """
    if importlib.util.find_spec("webdataset") is None:
        raise StoreError("the package webdataset is not installed; install it with: pip install 'bucketline[export]'")


def _small_members(record: SampleRecord) -> dict[str, bytes]:
    first = record.captions[0] if record.captions else ""
    return {
        "json": json.dumps(record_as_json(record)).encode("ascii"),
        "txt": text_bytes(first),
    }


def _tar_bytes(members_bytes: int) -> int:
    """Return a tar's length: its members, two zero blocks, and padding to a complete record."""
    return _rounded(members_bytes + 2 * tarfile.BLOCKSIZE, tarfile.RECORDSIZE)


def _rounded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit
