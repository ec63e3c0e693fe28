"""Export samples to files that other tools can read: planned first, then written completely or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, Self

from bucketline.command_line import counted, human_bytes
from bucketline.errors import StoreError, UsageError
from bucketline.files.atomic_folder import refuse_existing, staged_folder
from bucketline.files.disk_space import refuse_too_little_disk
from bucketline.files.paths import Overlap, overlap
from bucketline.store.export.kohya_npz import KohyaForm, KohyaPlan, KohyaWriter
from bucketline.store.export.mds_shards import MdsForm, MdsPlan, MdsWriter
from bucketline.store.export.safetensors_folder import FolderPlan, FolderWriter
from bucketline.store.export.sample_file import NO_ENTRIES, RaggedTokens, sample_file, sample_file_bytes
from bucketline.store.export.webdataset_tars import TarPlan, TarsWriter, require_webdataset
from bucketline.store.format.columns import EntriesOf
from bucketline.store.read.iter_samples import buckets_of, live_samples
from bucketline.store.read.ragged_entries import entry_numbers, groups_of
from bucketline.store.read.verified_sample import caption_rows, entry_tokens, row_values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from bucketline.store.format.sample_record import SampleRecord
    from bucketline.store.read.iter_samples import Listed, Selection
    from bucketline.store.read.store import Store

FILE_ROUNDING_BYTES = 4096  # disk space that a file may use beyond its length


class ExportFormat(StrEnum):
    """The output formats of an export."""

    WEBDATASET = "webdataset"
    SAFETENSORS = "safetensors"
    KOHYA = "kohya"
    MDS = "mds"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """The samples to export, the format and the output."""

    output: Path
    format: ExportFormat
    selection: Selection
    shard_bytes: int  # maximum size of a tar or a shard of MDS
    columns: tuple[str, ...] | None = None  # of a trainer's cache: roles to write next to the latents; None: all
    images: Path | None = None  # of kohya's: folder of the images, for sizes that the store does not know


class ExportPlan(Protocol):
    """Size of an export: counted from the samples' sizes, or from what was written."""

    num_samples: int

    @property
    def num_files(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """Total length of all files."""

    def add(self, record: SampleRecord, file_bytes: int) -> None:
        """Count a sample."""


class ExportWriter(Protocol):
    """Writes samples in one format."""

    @property
    def plan(self) -> ExportPlan:
        """The size of the export so far."""

    def add(self, record: SampleRecord, data: bytes) -> None:
        """Write a sample; `data` is its safetensors file."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def refuse_export(store: Store, request: ExportRequest) -> None:
    """Check a request before reading the store.

    Raises:
        UsageError: if the output exists, is in the store, or has no parent folder.
        StoreError: if the format's library is not installed, or the store has no such bucket.
    """
    if how := overlap(request.output, store.path):
        where = "is the store itself" if how is Overlap.SAME else f"overlaps with the store {store.path}"
        raise UsageError(f"{request.output} {where}; choose a folder outside the store")
    refuse_existing(request.output)
    if request.format is ExportFormat.WEBDATASET:
        require_webdataset()
    buckets_of(store, request.selection)


def plan_export(store: Store, request: ExportRequest, on_sample: Callable[[], None]) -> ExportPlan:
    """Return the exact number of samples, files and bytes of an export, without reading values. `on_sample` reports progress.

    Raises:
        UsageError: if a single sample exceeds the maximum tar size.
        StoreError: if no sample is selected.
        CorruptError: if an index or a record is damaged.
    """
    plan, num_bytes_of = _plan(store, request)
    for listed in live_samples(store, request.selection):
        tokens = entry_tokens(store, store.text, listed.shard, caption_rows(listed.record))
        plan.add(listed.record, num_bytes_of(listed, tokens))
        on_sample()
    if plan.num_samples == 0:
        raise StoreError(f"{store.path} has no sample in that split and bucket; `store info` lists its buckets")
    if isinstance(plan, TarPlan) and plan.largest[0] > request.shard_bytes:
        num_bytes, sample_id = plan.largest
        raise UsageError(
            f"--shard-size is {human_bytes(request.shard_bytes)}, a tar with only the sample {sample_id[:80]!r} has "
            f"{num_bytes} bytes; give --shard-size {num_bytes} or more"
        )
    return plan


def export(store: Store, request: ExportRequest, plan: ExportPlan, on_bytes: Callable[[int], None]) -> ExportPlan:
    """Write the export, verifying every row and caption; `on_bytes` reports progress. Return what was written.

    Raises:
        UsageError: if the output exists.
        StoreError: if the disk is too small, or writing fails; nothing is left behind.
        CorruptError: if a sample's bytes do not match their checksum, naming the first; nothing is left behind.
        LockedError: if another process writes the same output.
    """
    needed = plan.num_bytes + plan.num_files * FILE_ROUNDING_BYTES
    what = f"exporting {counted(plan.num_samples, 'sample')} to {request.output}"
    refuse_too_little_disk(request.output.parent, needed, what, "choose another disk, or one bucket at a time")
    with staged_folder(request.output) as folder, _writer(folder, store, request) as writer:
        for listed in live_samples(store, request.selection):
            before = writer.plan.num_bytes
            writer.add(listed.record, sample_file(store, listed.shard, listed.record))
            on_bytes(writer.plan.num_bytes - before)
    return writer.plan


def _plan(store: Store, request: ExportRequest) -> tuple[ExportPlan, Callable[[Listed, Sequence[int]], int]]:
    """Return an empty plan, and the function that tells what it counts: bytes by a sample and its captions' token counts."""
    if request.format is ExportFormat.KOHYA:
        kohya = KohyaForm(store, request.columns, request.images)
        return KohyaPlan(kohya), kohya.num_bytes
    if request.format is ExportFormat.MDS:
        mds = MdsForm(store, request.shard_bytes, request.columns)
        return MdsPlan(mds), mds.num_bytes
    plan: ExportPlan = FolderPlan() if request.format is ExportFormat.SAFETENSORS else TarPlan(request.shard_bytes)
    return plan, lambda listed, tokens: sample_file_bytes(store, listed.record, tokens, _ragged_tokens(store, listed))


def _ragged_tokens(store: Store, listed: Listed) -> RaggedTokens:
    """Return the token counts of a sample's ragged entries, without reading values."""
    if not store.ragged:
        return NO_ENTRIES
    record, specs = listed.record, store.ragged_specs
    columns = [specs[name].group for name in groups_of(store, EntriesOf.ROWS)]
    numbers = entry_numbers(store, row_values(store, listed.shard, record, columns))
    return RaggedTokens(
        of_captions={
            name: entry_tokens(store, specs[name], listed.shard, caption_rows(record))
            for name in groups_of(store, EntriesOf.CAPTIONS)
        },
        of_row={
            name: entry_tokens(store, specs[name], listed.shard, [number])[0]
            for name, number in numbers.items()
            if number is not None
        },
    )


def _writer(folder: Path, store: Store, request: ExportRequest) -> ExportWriter:
    if request.format is ExportFormat.KOHYA:
        return KohyaWriter(folder, KohyaForm(store, request.columns, request.images))
    if request.format is ExportFormat.MDS:
        return MdsWriter(folder, store, request.shard_bytes, request.columns)
    if request.format is ExportFormat.SAFETENSORS:
        return FolderWriter(folder)
    return TarsWriter(folder, request.shard_bytes)
