"""Export as a folder of safetensors files: one per sample, in one folder per bucket, indexed by `samples.jsonl`.

Files are named by the digest of the sample id: an id never becomes a path.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TextIO

from bucketline.store.export.sample_file import record_as_json
from bucketline.store.format.hashing import sample_digest

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from bucketline.store.format.sample_record import SampleRecord

_SAMPLES = "samples.jsonl"


class FolderPlan:
    """Size of the folder."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.num_files = 1
        self.num_bytes = 0

    def add(self, record: SampleRecord, file_bytes: int) -> None:
        """Count a sample whose file has `file_bytes` bytes."""
        self.num_samples += 1
        self.num_files += 1
        self.num_bytes += file_bytes + len(_line(record))


class FolderWriter:
    """Writes the folder. Use it in a `with` block."""

    _samples: TextIO

    def __init__(self, folder: Path) -> None:
        self.plan = FolderPlan()
        self._folder = folder
        self._made: set[str] = set()

    def add(self, record: SampleRecord, data: bytes) -> None:
        """Write a sample's file and its line."""
        if record.bucket not in self._made:
            (self._folder / record.bucket).mkdir(parents=True)
            self._made.add(record.bucket)
        (self._folder / _file(record)).write_bytes(data)
        self._samples.write(_line(record))
        self.plan.add(record, len(data))

    def __enter__(self) -> FolderWriter:
        self._samples = (self._folder / _SAMPLES).open("w", encoding="ascii")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._samples.close()


def _file(record: SampleRecord) -> str:
    return f"{record.bucket}/{sample_digest(record.id).hex()}.safetensors"


def _line(record: SampleRecord) -> str:
    return json.dumps({"file": _file(record), **record_as_json(record)}) + "\n"
