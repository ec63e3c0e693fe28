"""Export samples to files that other tools can read: completely or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.errors import StoreError, UsageError
from bucketline.files.atomic_folder import refuse_existing, staged_folder
from bucketline.files.disk_space import refuse_too_little_disk
from bucketline.files.paths import Overlap, overlap
from bucketline.store.export.exporter import EXPORTERS, ExportedSample
from bucketline.store.export.sample_file import sample_file
from bucketline.store.format.columns import RAGGED_PREFIX, EntriesOf
from bucketline.store.format.safetensors_header import DTYPES
from bucketline.store.format.text_block import TEXT_GROUP
from bucketline.store.read.iter_samples import buckets_of, live_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bucketline.store.export.exporter import Exporter, ExportRequest
    from bucketline.store.format.manifest import ShardEntry
    from bucketline.store.read.store import Store

BYTES_A_SAMPLE = 4096  # of headers, and of the disk beyond a file's length


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSize:
    """The size of an export."""

    num_samples: int
    num_files: int | None  # None: not known before it is written
    num_bytes: int  # before it is written: about, and rather more


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


def plan_export(exporter: Exporter, on_sample: Callable[[], None]) -> ExportSize:
    """Let an exporter check each sample, and return about how large the export will be, without reading values.

    Captions are counted for each sample, as exports have them: a store has each once. `on_sample` reports progress.
    """
    captions = 0
    for listed in live_samples(exporter.store, exporter.request.selection):
        exporter.check(listed.record)
        captions += min(max(1, len(listed.record.captions)), exporter.most_captions)
        on_sample()
    store, names = exporter.store, buckets_of(exporter.store, exporter.request.selection)
    rows = sum(store.bucket(name).num_rows for name in names)
    own = sum(
        store.bucket(name).num_rows * column.row_bytes * max(1, exporter.value_bytes // DTYPES[column.dtype].itemsize)
        for name in names
        for column in store.bucket(name).columns
    )
    widening = max(2 if store.text.is_quantised else 1, exporter.value_bytes // 2)  # quantised text is written as F16
    each = _record_bytes(store) + _entry_bytes(store, captions / rows) * widening + BYTES_A_SAMPLE
    return ExportSize(num_samples=rows, num_files=None, num_bytes=own + round(rows * each))


def _record_bytes(store: Store) -> float:
    """Return the mean bytes of what exports say of a sample, in at most three places."""
    shards = store.manifest.shards
    return 3 * sum(shard.record_bytes for shard in shards) / max(1, store.manifest.samples)


def _entry_bytes(store: Store, captions: float) -> float:
    """Return the mean bytes of a sample's captions, so many of them in the mean, and ragged entries."""
    shards = store.manifest.shards

    def mean(group: str, num_bytes: int) -> float:
        return num_bytes / max(1, sum(shard.groups[group].rows for shard in shards if group in shard.groups))

    found = captions * sum(map(_caption_bytes, shards)) / max(1, store.manifest.samples)
    for name, group in store.ragged.items():
        spec = store.groups[RAGGED_PREFIX + name]
        tokens = sum(shard.ragged[name].tokens for shard in shards if name in shard.ragged)
        each = mean(spec.group, tokens * spec.token_bytes) + spec.fixed_bytes
        found += each * (captions if group.of is EntriesOf.CAPTIONS else 1)
    return found


def _caption_bytes(shard: ShardEntry) -> float:
    """Return the bytes of a caption for each sample of a shard. Its first is the empty one, which few samples have."""
    others = shard.groups[TEXT_GROUP].rows - 1 if TEXT_GROUP in shard.groups else 0
    return shard.samples * shard.caption_bytes / max(1, others)


def export(exporter: Exporter, planned: ExportSize, on_sample: Callable[[], None]) -> ExportSize:
    """Write the export, verifying every row and caption; `on_sample` reports progress. Return what was written."""
    store, request = exporter.store, exporter.request
    what = f"exporting {counted(planned.num_samples, 'sample')} to {request.output}"
    refuse_too_little_disk(request.output.parent, planned.num_bytes, what, "choose another disk, or one bucket at a time")

    def samples() -> Iterator[ExportedSample]:
        for listed in live_samples(store, request.selection):
            yield ExportedSample(listed.record, sample_file(store, listed.shard, listed.record))
            on_sample()

    with staged_folder(request.output) as folder:
        exporter.write(samples(), folder)
        sizes = [path.stat().st_size for path in _files(folder)]
    return ExportSize(num_samples=planned.num_samples, num_files=len(sizes), num_bytes=sum(sizes))


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
