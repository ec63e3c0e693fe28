"""Taking samples out of a store into files that other tools read: measured first, then written whole or not at all."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, Self

from bucketline.commands import human_bytes
from bucketline.errors import StoreError, UsageError
from bucketline.store.checked_read import caption_rows, caption_tokens, check_record
from bucketline.store.listing import buckets_of, live_samples
from bucketline.store.overlap import Overlap, overlap
from bucketline.store.safetensors_folder import FolderPlan, FolderWriter
from bucketline.store.sample_file import sample_file, sample_file_bytes
from bucketline.store.staging import refuse_existing, staged_folder
from bucketline.store.webdataset_tars import TarPlan, TarsWriter, require_webdataset

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from bucketline.store.listing import Selection
    from bucketline.store.reader import Store
    from bucketline.store.record import SampleRecord

FILE_ROUNDING_BYTES = 4096  # what a file may take on the disk beyond its length


class ExportFormat(StrEnum):
    """What an export is made of."""

    WEBDATASET = "webdataset"
    SAFETENSORS = "safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What is to be taken out, and to where."""

    output: Path
    format: ExportFormat
    selection: Selection
    shard_bytes: int  # of a tar at most


class ExportPlan(Protocol):
    """What an export takes: counted from the samples' sizes, or from what was written."""

    num_samples: int
    num_files: int

    @property
    def num_bytes(self) -> int:
        """The lengths of all files."""

    def add(self, record: SampleRecord, file_bytes: int) -> None:
        """Count a sample."""


class ExportWriter(Protocol):
    """Writes samples in one format."""

    @property
    def plan(self) -> ExportPlan:
        """What was written so far."""

    def add(self, record: SampleRecord, data: bytes) -> None:
        """Write a sample; `data` is its safetensors file."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def refuse_export(store: Store, request: ExportRequest) -> None:
    """Refuse what cannot be carried out, before the store is read.

    Raises:
        UsageError: where the output exists, lies in the store, or has no folder to lie in.
        StoreError: where the format's library is not installed, or the bucket is not the store's.
    """
    if how := overlap(request.output, store.path):
        where = "is the store itself" if how is Overlap.SAME else f"and the store {store.path} lie one in the other"
        raise UsageError(f"{request.output} {where}; choose a folder outside the store")
    refuse_existing(request.output)
    if request.format is ExportFormat.WEBDATASET:
        require_webdataset()
    buckets_of(store, request.selection)


def plan_export(store: Store, request: ExportRequest, on_sample: Callable[[], None]) -> ExportPlan:
    """Count the samples, files and bytes of an export: exactly, without reading the values. `on_sample` is told of progress.

    Raises:
        UsageError: where a tar of one sample is larger than tars are to be.
        StoreError: where no sample is selected.
        CorruptError: where an index or a record is damaged.
    """
    plan: ExportPlan = FolderPlan() if request.format is ExportFormat.SAFETENSORS else TarPlan(request.shard_bytes)
    for listed in live_samples(store, request.selection):
        tokens = caption_tokens(store, listed.shard, caption_rows(listed.record))
        plan.add(listed.record, sample_file_bytes(store, listed.record, tokens))
        on_sample()
    if plan.num_samples == 0:
        raise StoreError(f"{store.path} has no sample of that split and bucket; `store info` says which it has")
    if isinstance(plan, TarPlan) and plan.largest[0] > request.shard_bytes:
        num_bytes, sample_id = plan.largest
        raise UsageError(
            f"--shard-size is {human_bytes(request.shard_bytes)}, a tar of the sample {sample_id[:80]!r} alone has {num_bytes} "
            f"bytes; give --shard-size {num_bytes} or more"
        )
    return plan


def export(store: Store, request: ExportRequest, plan: ExportPlan, on_bytes: Callable[[int], None]) -> ExportPlan:
    """Write the export, every row's and caption's checksum compared; `on_bytes` is told of progress. Give what was written.

    Raises:
        UsageError: where the output exists.
        StoreError: where it does not fit the disk, or cannot be written; nothing is left then.
        CorruptError: naming the first sample whose bytes are not those that were stored; nothing is left then.
        LockedError: where another process writes the same output.
    """
    _refuse_too_little_disk(request.output, plan)
    with staged_folder(request.output) as folder, _writer(folder, request) as writer:
        for listed in live_samples(store, request.selection):
            check_record(listed.entry, listed.record)
            before = writer.plan.num_bytes
            writer.add(listed.record, sample_file(store, listed.shard, listed.record))
            on_bytes(writer.plan.num_bytes - before)
    return writer.plan


def _writer(folder: Path, request: ExportRequest) -> ExportWriter:
    if request.format is ExportFormat.SAFETENSORS:
        return FolderWriter(folder)
    return TarsWriter(folder, request.shard_bytes)


def _refuse_too_little_disk(output: Path, plan: ExportPlan) -> None:
    needed = plan.num_bytes + plan.num_files * FILE_ROUNDING_BYTES
    free = shutil.disk_usage(output.parent).free
    if needed > free:
        raise StoreError(
            f"{output} will take about {needed >> 20} MiB for {plan.num_samples} samples, {free >> 20} MiB are free; "
            "make room, choose another disk, or one bucket at a time"
        )
