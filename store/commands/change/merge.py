"""The command `store merge`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from bucketline.command_line import counted, human_bytes, print_json
from bucketline.options import Arg, Positional
from bucketline.store.commands.place import ChangingArguments, OutPlace, StorePlace, shown


@dataclass(frozen=True, kw_only=True)
class Merge(ChangingArguments):
    """Create a new store from several. They must share the same encoders and rules.

    Stores given by URL are read there; a new one at a URL is made in a temporary folder and pushed.

    Example: store merge all.store photos.store more.store
    """

    out: Positional[OutPlace]
    """Path or URL of the new store; must not exist yet."""
    stores: Annotated[Positional[tuple[StorePlace, ...]], Arg(metavar="STORE [STORE …]")]
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
            out, *sources = map(self.path_or_objects, (self.out, *self.stores))
            if isinstance(out, Path):
                done = merge(out, sources, replace=self.replace, dry_run=self.dry_run, on_bytes=on_bytes)
            else:
                from bucketline.store.sync.merge import merge_to_url

                done = merge_to_url(out, sources, replace=self.replace, dry_run=self.dry_run, on_bytes=on_bytes)
        if self.json:
            print_json({**asdict(done), "dry_run": self.dry_run})
            return 0
        verb = "would get" if self.dry_run else "has"
        what = f"{counted(done.samples, 'sample')} in {counted(done.shards, 'shard')}"
        print(f"{shown(self.out)} {verb} {what}, {human_bytes(done.num_bytes)} copied")
        if done.replaced:
            print(f"  {counted(done.replaced, 'sample')} of earlier stores replaced by those with the same id in later stores")
        return 0
