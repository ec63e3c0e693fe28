"""Export samples to files that other tools can read: completely or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.errors import StoreError, UsageError
from bucketline.files.atomic_folder import refuse_existing, staged_folder
from bucketline.files.paths import Overlap, overlap
from bucketline.store.export.exporter import EXPORTERS, ExportedSample
from bucketline.store.export.sample_file import sample_file
from bucketline.store.read.iter_samples import buckets_of, live_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bucketline.store.export.exporter import Exporter, ExportRequest
    from bucketline.store.read.store import Store


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
