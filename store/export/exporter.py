"""Export samples to files that other tools can read: completely or not at all.

The base class of the formats, and these by name: ours, and those of installed packages.
"""

from __future__ import annotations

import json
import tarfile
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from bucketline.errors import StoreError, UsageError
from bucketline.extensions import Extensions
from bucketline.files.atomic_write import refuse_existing, staged_folder
from bucketline.files.paths import Overlap, overlap
from bucketline.store.format.block import sample_digest, text_bytes
from bucketline.store.read.samples import buckets_of, live_samples, record_as_json, sample_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from bucketline.store.format.sample_record import SampleRecord
    from bucketline.store.read.samples import Selection
    from bucketline.store.read.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """The samples to export, the format and the output."""

    output: Path
    format: str  # a name of `EXPORTERS`
    selection: Selection
    shard_bytes: int | None = None  # the most that a file of many samples has; None: the format's default


class ExportedSample(NamedTuple):
    """A sample whose checksums were verified."""

    record: SampleRecord
    data: bytes  # its safetensors file


class Exporter(ABC):
    """Writes samples in one format; an object for each export."""

    shard_bytes: ClassVar[int | None] = None  # the default; None of a format whose files have one sample each
    left_out: tuple[str, ...] = ()  # roles of columns that the format does not have

    def __init__(self, store: Store, request: ExportRequest) -> None:
        self.store, self.request = store, request

    def check(self, record: SampleRecord) -> None:  # noqa: B027 - most formats take every sample
        """Check a sample before anything is written; called in the order of `write`."""

    @abstractmethod
    def write(self, samples: Iterable[ExportedSample], folder: Path) -> None:
        """Write samples to a folder, which is empty and gets its name once this returns."""


EXPORTERS: Extensions[type[Exporter]] = Extensions(
    "an exporter called",
    "bucketline.exporters",
    {
        "webdataset": "bucketline.store.export.exporter:TarExporter",
        "safetensors": "bucketline.store.export.exporter:FolderExporter",
        "kohya": "bucketline.store.export.kohya:KohyaExporter",
        "mds": "bucketline.store.export.mds:MdsExporter",
    },
    lambda found: isinstance(found, type) and issubclass(found, Exporter),
)


class FolderExporter(Exporter):
    """Writes a folder of safetensors files: one per sample, in one folder per bucket, indexed by `samples.jsonl`.

    Files are named by the digest of the sample id: an id never becomes a path.
    """

    def write(self, samples: Iterable[ExportedSample], folder: Path) -> None:
        with (folder / "samples.jsonl").open("w", encoding="ascii") as lines:
            for record, data in samples:
                name = f"{record.bucket}/{sample_digest(record.id).hex()}.safetensors"
                (folder / record.bucket).mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
                lines.write(json.dumps({"file": name, **record_as_json(record)}) + "\n")


class TarExporter(Exporter):
    """Writes tars as of WebDataset, `000000.tar` and so on, with three members per sample.

    KEY.safetensors is the sample's file, KEY.json its record, KEY.txt its first caption. KEY is the digest of the sample id: an
    id never becomes a path. Tars are reproducible: they contain no times or owners.
    """

    shard_bytes = 1 << 30

    def write(self, samples: Iterable[ExportedSample], folder: Path) -> None:
        """Write each sample's members to the last tar if it still fits, else to a new one: that of a large sample is larger."""
        most = self.request.shard_bytes or self.shard_bytes
        tar: tarfile.TarFile | None = None
        number, taken = -1, 0  # of the last tar, and the bytes of its members
        with ExitStack() as last:
            for record, data in samples:
                as_json = json.dumps(record_as_json(record)).encode("ascii")
                text = text_bytes(record.captions[0] if record.captions else "")
                members = {"json": as_json, "safetensors": data, "txt": text}
                own = sum(tarfile.BLOCKSIZE + _rounded(len(member), tarfile.BLOCKSIZE) for member in members.values())
                if tar is None or _tar_bytes(taken + own) > most:
                    last.close()
                    number, taken = number + 1, 0
                    tar = last.enter_context(tarfile.open(folder / f"{number:06d}.tar", "w"))
                for ending, member in members.items():
                    info = tarfile.TarInfo(f"{sample_digest(record.id).hex()}.{ending}")
                    info.size = len(member)
                    tar.addfile(info, BytesIO(member))
                taken += own


def _tar_bytes(members_bytes: int) -> int:
    """Return a tar's length: its members, two zero blocks, and padding to a complete record."""
    return _rounded(members_bytes + 2 * tarfile.BLOCKSIZE, tarfile.RECORDSIZE)


def _rounded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


def open_export(store: Store, request: ExportRequest) -> Exporter:
    """Return the exporter of a request, without reading samples."""
    if how := overlap(request.output, store.path):
        where = "is the store itself" if how is Overlap.SAME else f"overlaps with the store {store.path}"
        raise UsageError(f"{request.output} {where}; choose a folder outside the store")
    refuse_existing(request.output)
    names = buckets_of(store, request.selection)
    if not any(store.bucket(name).num_rows for name in names):
        raise StoreError(f"{store.path} has no sample in that split and bucket; `store info` lists its buckets")
    return EXPORTERS[request.format](store, request)


def check_samples(exporter: Exporter, on_sample: Callable[[], None]) -> None:
    """Let an exporter check each sample without reading values; `on_sample` reports progress."""
    for listed in live_samples(exporter.store, exporter.request.selection):
        exporter.check(listed.record)
        on_sample()


def export(exporter: Exporter, on_sample: Callable[[], None]) -> tuple[int, int]:
    """Write the export, verifying every row and caption; return its files and bytes. `on_sample` reports progress."""
    store, request = exporter.store, exporter.request

    def samples() -> Iterator[ExportedSample]:
        for listed in live_samples(store, request.selection):
            yield ExportedSample(listed.record, sample_file(store, listed.shard, listed.record))
            on_sample()

    with staged_folder(request.output) as folder:
        exporter.write(samples(), folder)
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes)
