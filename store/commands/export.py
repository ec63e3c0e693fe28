"""`store export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from bucketline.command_line import counted, human_bytes, one_line, print_json
from bucketline.errors import UsageError
from bucketline.option_value import ByteSize
from bucketline.options import Arg, Positional
from bucketline.store.commands.look import ReadingArguments, StorePlace, shown

if TYPE_CHECKING:
    from bucketline.store.export.exporter import ExportRequest


@dataclass(frozen=True, kw_only=True)
class Export(ReadingArguments):
    """Export samples to a folder that other tools read: WebDataset tars, safetensors files, or another trainer's cache.

    All checksums are verified. The folder appears by an atomic rename when it is complete. File names are digests of the ids,
    but of kohya's cache the ids themselves.

    Example: store export photos.store --format webdataset photos.tars
    """

    store: Positional[StorePlace]
    """Path or URL of the store."""
    output: Annotated[Positional[Path], Arg(metavar="OUT")]
    """Output folder; must not exist yet."""
    format: Annotated[str, Arg(metavar="{webdataset,safetensors,kohya}", words=("webdataset", "safetensors", "kohya"))]
    """Format of the output. webdataset: 000000.tar, … with KEY.safetensors, KEY.json and KEY.txt; safetensors: a file per
    sample, samples.jsonl; kohya: npz files of sd-scripts, to be copied next to the images. Also a format of a package that you
    installed."""
    split: Literal["train", "val"] | None = None
    """Export only this split. Default: both."""
    bucket: Annotated[str | None, Arg(metavar="NAME")] = None
    """Export only this bucket, such as train/256x192. Default: all."""
    shard_size: ByteSize | None = None
    """Maximum size of a tar, such as 512MiB, unless one sample has more. Default: 1GiB."""
    dry_run: bool = False
    """Check the samples, and print their number, without writing them."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        from bucketline.store.commands.look import bar_of_samples
        from bucketline.store.export.exporter import check_samples, export, open_export
        from bucketline.store.read.samples import buckets_of

        request, store = self._request(), self.open_store(self.store)
        exporter = open_export(store, request)
        rows = sum(store.bucket(name).num_rows for name in buckets_of(store, request.selection))
        with bar_of_samples("check", rows) as on_sample:
            check_samples(exporter, on_sample)
        files = num_bytes = None
        if not self.dry_run:
            with bar_of_samples("export", rows) as on_sample:
                files, num_bytes = export(exporter, on_sample)
        if self.json:
            report = {"output": str(self.output), "format": self.format, "samples": rows, "left_out": list(exporter.left_out)}
            print_json({**report, "files": files, "bytes": num_bytes, "dry_run": self.dry_run})
        elif files is None or num_bytes is None:
            print(f"{shown(self.output)}: would have {counted(rows, 'sample')}")
        else:
            print(f"{shown(self.output)}: {counted(rows, 'sample')}, {counted(files, 'file')}, takes {human_bytes(num_bytes)}")
        if exporter.left_out and not self.json:
            print(f"  left out, as {self.format} has no place for them: {', '.join(map(one_line, exporter.left_out))}")
        return 0

    def _request(self) -> ExportRequest:
        from bucketline.store.export.exporter import EXPORTERS, ExportRequest
        from bucketline.store.read.samples import Selection

        if self.format not in EXPORTERS:
            raise UsageError(f"--format is {self.format!r:.80}, expected {', '.join(EXPORTERS)}")
        if self.shard_size is not None and EXPORTERS[self.format].shard_bytes is None:
            raise UsageError(f"--shard-size only applies to tars and shards, --format {self.format} writes none; leave it out")
        return ExportRequest(
            output=self.output,
            format=self.format,
            selection=Selection(split=self.split, bucket=self.bucket),
            shard_bytes=self.shard_size and self.shard_size.num_bytes,
        )
