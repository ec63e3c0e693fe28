"""The command `store merge`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bucketline.command_line import counted, human_bytes, print_json
from bucketline.store.commands.place import ChangingArguments, OutPlace, StorePlace, shown


@dataclass(frozen=True, kw_only=True)
class Merge(ChangingArguments):
    """Create a new store from all samples of several stores. They must share the same encoders and rules.

    Stores given by URL are pulled to a temporary folder first; a new one at a URL is made there and pushed.

    Example: store merge all.store photos.store more.store
    """

    out: tyro.conf.Positional[OutPlace]
    """Path or URL of the new store; must not exist yet."""
    stores: Annotated[tyro.conf.Positional[tuple[StorePlace, ...]], tyro.conf.arg(metavar="STORE [STORE …]")]
    """Paths or URLs of the input stores, opened read-only."""
    replace: bool = False
    """If two stores have the same sample id, keep the later store's sample instead of failing."""
    dry_run: bool = False
    """Check and report without writing."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        from bucketline.store.change.merge import merge
        from bucketline.store.commands.progress import byte_progress

        with byte_progress("merge") as on_bytes:
            if any(isinstance(place, str) for place in (self.out, *self.stores)):
                from bucketline.store.sync.merge import merge_places

                places = [self.objects(place) if isinstance(place, str) else place for place in (self.out, *self.stores)]
                done = merge_places(places[0], places[1:], replace=self.replace, dry_run=self.dry_run, on_bytes=on_bytes)
            else:
                paths = [Path(place) for place in self.stores]
                done = merge(Path(self.out), paths, replace=self.replace, dry_run=self.dry_run, on_bytes=on_bytes)
        if self.json:
            print_json({**asdict(done), "dry_run": self.dry_run})
            return 0
        verb = "would get" if self.dry_run else "has"
        what = f"{counted(done.samples, 'sample')} in {counted(done.shards, 'shard')}"
        print(f"{shown(self.out)} {verb} {what}, {human_bytes(done.num_bytes)} copied")
        if done.replaced:
            print(f"  {counted(done.replaced, 'sample')} of earlier stores replaced by those with the same id in later stores")
        return 0
