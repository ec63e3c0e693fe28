"""`store info`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bucketline.command_line import counted, human_bytes, human_number, printable
from bucketline.errors import UsageError
from bucketline.options import ALONE, Arg, Positional
from bucketline.pack_options import as_settings
from bucketline.store.commands.place import ReadingArguments, StorePlace, show_each, shown
from bucketline.store.format.columns import LATENT
from bucketline.store.remote.urls import is_url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.store.read.lost_files import LostShard

MAX_SHOWN = 100  # beyond this disk-to-payload ratio, the number is not informative


@dataclass(frozen=True, kw_only=True)
class Info(ReadingArguments):
    """Show what a store holds: samples, buckets, columns, sizes, encoders, and the options that made it.

    Exit 1 if a shard file is missing or has the wrong length.

    Example: store info photos.store --json
    """

    store: Positional[StorePlace]
    """Path or URL of the store, or the folder of a data set's stores."""
    rules: Annotated[str | None, Arg(metavar="SOURCE")] = field(default=None, metadata={ALONE: "."})
    """Print a data set file instead, from which `ingest pack` packs an equal store; with the path of its source, or `.`."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        if self.rules is None:
            return show_each(self)
        from bucketline.store.format.mixture_file import read_mixture
        from bucketline.store.read.dataset_rules import dataset_file, dataset_file_of

        if self.json:
            raise UsageError("--rules prints a data set file, and --json an object; leave one out")
        members = read_mixture(self.store) if isinstance(self.store, Path) else None
        if members is None:
            print(dataset_file(self.open_store(self.store).manifest, shown(self.store), self.rules), end="")
            return 0
        assert isinstance(self.store, Path)
        each = [(one.name, one.repeats, self.open_store(self.store / one.name).manifest) for one in members]
        print(dataset_file_of(each, shown(self.store), self.rules), end="")
        return 0

    def look(self) -> tuple[dict[str, Any], int]:
        from bucketline.store.read.info import info
        from bucketline.store.read.lost_files import lost_shards

        store = self.open_store(self.store)
        lost = lost_shards(store.folder, store.manifest.shards)
        if lost:
            _print_lost(shown(self.store), lost)
        return info(store, lost), 1 if lost else 0

    def show(self, found: dict[str, Any]) -> None:
        _print_info(found)


def _print_lost(store: str, lost: Sequence[LostShard]) -> None:
    for shard in lost:
        print(f"lost: {printable(str(shard))}", file=sys.stderr)
    if lost:
        samples = counted(sum(shard.samples for shard in lost), "sample")
        advice = f"`store repair {store}` keeps the samples that can still be read and drops the others"
        if is_url(store):
            advice = f"push the store again from a copy that has them, or {advice}"
        print(
            f"error: files of {counted(len(lost), 'shard')} with {samples} are lost; {advice}; the same `ingest pack` then "
            "packs these again",
            file=sys.stderr,
        )


def _print_info(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from bucketline.store.format.text_error import TextError

    console = Console()
    disk, payload = report["disk_bytes"], report["payload_bytes"]
    share = f" ({human_number(disk / payload)} times as much on disk)" if 0 < disk < MAX_SHOWN * payload else ""
    console.print(
        f"{counted(report['samples'], 'sample')}, generation {report['generation']}, {counted(report['shards'], 'shard')}, "
        f"{human_bytes(disk)} on disk, payload {human_bytes(payload)}{share}",
        soft_wrap=True,
    )
    for name, encoder in report["encoders"].items():
        shown = {key: " + ".join(value) if isinstance(value, dict) else value for key, value in encoder.items()}
        about = ", ".join(f"{key} {value}" for key, value in shown.items() if not key.endswith("hash"))
        console.print(printable(f"{name}: {about}"), highlight=False, soft_wrap=True, markup=False)
    if isinstance(imported := report["rules"].get("import"), dict):
        about = ", ".join(f"{key} {value}" for key, value in imported.items() if key != "split")
        console.print(printable(f"imported: {about}"), highlight=False, soft_wrap=True, markup=False)
    elif report["pack_options"]:
        settings = ", ".join(f"{name} = {value}" for name, value in as_settings(report["pack_options"]).items())
        console.print(printable(f"options: {settings}"), highlight=False, soft_wrap=True, markup=False)
    if report["text_error"] is not None:
        error = TextError(**report["text_error"])
        about = f"error of the quantised text, {counted(error.captions, 'caption')}: {error}"
        console.print(about, highlight=False, soft_wrap=True)
    for name, group in report["ragged"].items():
        columns = [
            *(f"{column} {own['dtype']} {['T', *own['shape']]}" for column, own in group["tokens"].items()),
            *(f"{column} {own['dtype']} {list(own['shape'])}" for column, own in group["fixed"].items()),
        ]
        about = (
            f"ragged {name}: {group['entries']} entries of {group['of']}, {', '.join(columns)}, T at most {group['max_tokens']}"
        )
        console.print(printable(about.replace("'", "")), highlight=False, soft_wrap=True, markup=False)
    for name, column in report["added"].items():
        about = f"added {name}: {column['rows']} of {counted(report['samples'], 'row')}"
        lacking = "" if column["rows"] == report["samples"] else "; `add_column` gives it to the others"
        console.print(printable(f"{about}{lacking}"), highlight=False, soft_wrap=True, markup=False)
    table = Table("bucket", "rows", "column", "shape", "dtype")
    for bucket in report["buckets"]:
        first = [bucket["name"], str(bucket["rows"])]
        for name, column in sorted(bucket["columns"].items()):
            if "role" in column or name == LATENT:
                role = column.get("role", name) + (" (optional)" if column.get("optional") else "")
                table.add_row(*first, role, "x".join(map(str, column["shape"])), column["dtype"])
                first = ["", ""]
    console.print(table)
