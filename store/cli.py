"""The command `store`: look into a store, check it, take a sample out of it."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from bucketline.commands import human_bytes, print_json, run_one_of
from bucketline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class Info:
    """Say what a store holds: samples, buckets, columns, encoders, sizes.

    Example: store info photos.store --json
    """

    store: tyro.conf.Positional[Path]
    """The store's folder."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        from bucketline.store.info import info
        from bucketline.store.reader import Store

        report = info(Store.open(self.store))
        if self.json:
            print_json(report)
        else:
            _print_info(report)
        return 0


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Read everything once and name every fault. Exit 1 if there is any.

    Example: store verify photos.store
    """

    store: tyro.conf.Positional[Path]
    """The store's folder."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        from bucketline.errors import CorruptError
        from bucketline.store.reader import Store
        from bucketline.store.verify import Fault, Verified, verify

        try:
            store = Store.open(self.store)
        except CorruptError as error:
            fault = Fault(shard=None, bucket=None, block=None, row=None, sample=None, error=str(error))
            result = Verified(blocks=0, rows=0, corrupt=(fault,))
        else:
            total = sum(shard.lmdb.num_bytes for shard in store.manifest.shards)
            bar = (
                "verify",
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            with Progress(*bar, console=Console(stderr=True), transient=True) as progress:
                task = progress.add_task("verify", total=total)
                result = verify(store, lambda num_bytes: progress.advance(task, num_bytes))
        if self.json:
            print_json(asdict(result))
        else:
            for fault in result.corrupt:
                named = {name: value for name, value in asdict(fault).items() if name != "error" and value is not None}
                print(f"corrupt: {', '.join(f'{name} {value}' for name, value in named.items()) or 'the store'}: {fault.error}")
            print(f"{result.blocks} blocks and {result.rows} rows read, {len(result.corrupt)} faults")
        return 1 if result.corrupt else 0


@dataclass(frozen=True, kw_only=True)
class Get:
    """Write one sample's columns and its captions' tokens to a safetensors file.

    Example: store get photos.store coffee/whole.png -o coffee.safetensors
    """

    store: tyro.conf.Positional[Path]
    """The store's folder."""
    id: tyro.conf.Positional[str]
    """The sample's id: its path in the source, with the extension."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """The file to write; it must not exist yet."""
    json: bool = False
    """Print the sample's record as one JSON object."""

    def run(self) -> int:
        from bucketline.store.export_sample import write_sample
        from bucketline.store.reader import Store

        if self.output.exists():
            raise UsageError(f"{self.output} exists; name a file that does not, or delete it")
        report = write_sample(Store.open(self.store), self.id, self.output)
        if self.json:
            print_json(report)
        else:
            print(f"{self.output}: {report['id']} of {report['bucket']}, {len(report['captions'])} captions")
        return 0


def _print_info(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    ratio = report["disk_bytes"] / max(1, report["payload_bytes"])
    console.print(
        f"{report['samples']} samples, generation {report['generation']}, {report['shards']} shards, "
        f"{human_bytes(report['disk_bytes'])} on disk ({ratio:.3f} of the payload)"
    )
    for name, encoder in report["encoders"].items():
        shown = {key: " + ".join(value) if isinstance(value, dict) else value for key, value in encoder.items()}
        about = ", ".join(f"{key} {value}" for key, value in shown.items() if not key.endswith("hash"))
        console.print(f"{name}: {about}", highlight=False, soft_wrap=True)
    table = Table("bucket", "rows", "latent", "dtype")
    for bucket in report["buckets"]:
        latent = bucket["columns"].get("latent", {"shape": [], "dtype": ""})
        table.add_row(bucket["name"], str(bucket["rows"]), "x".join(map(str, latent["shape"])), latent["dtype"])
    console.print(table)


def main(args: Sequence[str] | None = None, prog: str = "store") -> int:
    """Run the command `store`."""
    commands = {"info": Info, "verify": Verify, "get": Get}
    return run_one_of(prog, __doc__ or "", commands, args)


if __name__ == "__main__":
    sys.exit(main())
