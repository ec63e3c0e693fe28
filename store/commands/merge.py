"""The command `store merge`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bucketline.commands import counted, human_bytes, print_json


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Make a new store of all samples of several. They must have been made with the same encoders and rules.

    Example: store merge all.store photos.store more.store
    """

    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """The new store's folder; it must not exist yet."""
    stores: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="STORE [STORE …]")]
    """The stores; they are only read."""
    replace: bool = False
    """Where two stores have a sample of the same id, take the later store's; else that is refused."""
    dry_run: bool = False
    """Check and report, write nothing."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        from bucketline.store.commands.progress import byte_progress
        from bucketline.store.merge import merge

        with byte_progress("merge") as on_bytes:
            done = merge(self.out, self.stores, replace=self.replace, dry_run=self.dry_run, on_bytes=on_bytes)
        if self.json:
            print_json({**asdict(done), "dry_run": self.dry_run})
            return 0
        verb = "would get" if self.dry_run else "has"
        what = f"{counted(done.samples, 'sample')} in {counted(done.shards, 'shard')}"
        print(f"{self.out} {verb} {what}, {human_bytes(done.num_bytes)} copied")
        if done.replaced:
            print(f"  {done.replaced} samples of earlier stores gave way to later stores' of the same id")
        return 0
