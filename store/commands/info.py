"""`store info`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from bucketline.commands import counted, human_bytes, print_json


@dataclass(frozen=True, kw_only=True)
class Info:
    """Say what a store holds: samples, buckets, columns, encoders, sizes.

    Example: store info photos.store --json
    """

    store: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="STORE")]
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


def _print_info(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    ratio = report["disk_bytes"] / max(1, report["payload_bytes"])
    console.print(
        f"{counted(report['samples'], 'sample')}, generation {report['generation']}, {counted(report['shards'], 'shard')}, "
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
