"""`store export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from bucketline.command_line import counted, human_bytes, parse_bytes, print_json
from bucketline.errors import UsageError
from bucketline.store.commands.place import ReadingArguments, StorePlace, shown

if TYPE_CHECKING:
    from bucketline.store.export.export import ExportPlan, ExportRequest

SHARD_SIZE = "1GiB"
MDS_SHARD_SIZE = "64MiB"  # the default of its own writer


@dataclass(frozen=True, kw_only=True)
class Export(ReadingArguments):
    """Export samples to a folder that other tools can read: WebDataset tars, safetensors files, or another trainer's cache.

    All checksums are verified. The folder appears by an atomic rename when it is complete. File names are digests of the ids,
    but of kohya's cache the ids themselves.

    Example: store export photos.store --format webdataset photos.tars
    """

    store: tyro.conf.Positional[StorePlace]
    """Path or URL of the store."""
    output: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Output folder; must not exist yet."""
    format: Literal["webdataset", "safetensors", "kohya", "mds"]
    """webdataset: 000000.tar, … with KEY.safetensors, KEY.json and KEY.txt; safetensors: a file per sample, samples.jsonl;
    kohya: npz files of sd-scripts, to be copied next to the images; mds: MosaicML Streaming, a folder for each bucket."""
    split: Literal["train", "val"] | None = None
    """Export only this split. Default: both."""
    bucket: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Export only this bucket, such as train/256x192. Default: all."""
    shard_size: Annotated[str | None, tyro.conf.arg(metavar="SIZE")] = None
    """Maximum size of a tar, such as 512MiB, or of a shard of MDS. Default: 1GiB, of MDS 64MiB."""
    columns: Annotated[str | None, tyro.conf.arg(metavar="ROLES")] = None
    """Of kohya and mds: columns to write next to the latents, such as mask,control/depth, or none. Default: all; one that the
    format cannot hold is refused by name."""
    images: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Of kohya: folder of the images, to read sizes that the store does not know. Its scripts look for caches by size."""
    dry_run: bool = False
    """Print the number of samples, files and bytes without writing them."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        from bucketline.store.commands.progress import bar_of_bytes, bar_of_samples
        from bucketline.store.export.export import export, plan_export, refuse_export
        from bucketline.store.read.iter_samples import buckets_of

        request = self._request()
        store = self.open_store(self.store)
        refuse_export(store, request)
        rows = sum(store.bucket(name).num_rows for name in buckets_of(store, request.selection))
        with bar_of_samples("measure", rows) as on_sample:
            plan = plan_export(store, request, on_sample)
        if not self.dry_run:
            with bar_of_bytes("export", plan.num_bytes) as on_bytes:
                plan = export(store, request, plan, on_bytes)
        self._print(plan)
        return 0

    def _request(self) -> ExportRequest:
        from bucketline.store.export.export import ExportFormat, ExportRequest
        from bucketline.store.export.sample_arrays import NO_COLUMNS
        from bucketline.store.read.iter_samples import Selection

        wanted = ExportFormat(self.format)
        if self.shard_size is not None and wanted not in (ExportFormat.WEBDATASET, ExportFormat.MDS):
            raise UsageError(f"--shard-size only applies to tars; leave it out, or use --format {ExportFormat.WEBDATASET}")
        columns: tuple[str, ...] | None = None
        if self.columns is not None:
            if wanted not in (ExportFormat.KOHYA, ExportFormat.MDS):
                raise UsageError(f"--columns {self.columns!r:.80}: --format {wanted} writes all columns; leave it out")
            columns = () if self.columns.strip() == NO_COLUMNS else tuple(role.strip() for role in self.columns.split(","))
        if self.images is not None and wanted is not ExportFormat.KOHYA:
            raise UsageError(f"--images {self.images}: --format {wanted} does not need the images; leave it out")
        if self.images is not None and not self.images.is_dir():
            raise UsageError(f"--images {self.images} is not a folder; name the folder of the images")
        default = MDS_SHARD_SIZE if wanted is ExportFormat.MDS else SHARD_SIZE
        return ExportRequest(
            output=self.output,
            format=wanted,
            selection=Selection(split=self.split, bucket=self.bucket),
            shard_bytes=parse_bytes(self.shard_size or default, "--shard-size"),
            columns=columns,
            images=self.images,
        )

    def _print(self, plan: ExportPlan) -> None:
        if self.json:
            report: dict[str, Any] = {
                "output": str(self.output),
                "format": self.format,
                "samples": plan.num_samples,
                "files": plan.num_files,
                "bytes": plan.num_bytes,
                "dry_run": self.dry_run,
            }
            print_json(report)
            return
        would = "would take" if self.dry_run else "takes"
        what = f"{counted(plan.num_samples, 'sample')}, {counted(plan.num_files, 'file')}"
        print(f"{shown(self.output)}: {what}, {would} {human_bytes(plan.num_bytes)}")
