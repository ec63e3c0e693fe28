"""The command `store merge`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

from bucketline.command_line import counted, human_bytes, print_json
from bucketline.options import Arg, Positional
from bucketline.store.commands.place import LocalStore, NewStore, shown


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Create a new store from several. They must share the same encoders and rules, and no sample's id.

    Stores at a URL are pulled first, and the new one is pushed.

    Example: store merge all.store photos.store more.store
    """

    out: Positional[NewStore]
    """Path of the new store; must not exist yet."""
    stores: Annotated[Positional[tuple[LocalStore, ...]], Arg(metavar="STORE [STORE …]")]
    """Paths of the input stores, opened read-only."""
    dry_run: bool = False
    """Check and report without writing."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        from bucketline.store.change.merge import merge
        from bucketline.store.commands.progress import byte_progress

        with byte_progress("merge") as on_bytes:
            done = merge(self.out, self.stores, dry_run=self.dry_run, on_bytes=on_bytes)
        if self.json:
            print_json({**asdict(done), "dry_run": self.dry_run})
            return 0
        verb = "would get" if self.dry_run else "has"
        what = f"{counted(done.samples, 'sample')} in {counted(done.shards, 'shard')}"
        print(f"{shown(self.out)} {verb} {what}, {human_bytes(done.num_bytes)} copied")
        return 0
