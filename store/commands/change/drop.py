"""The command `store drop`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bucketline.command_line import counted, print_json
from bucketline.options import Arg, Positional, Repeated
from bucketline.store.commands.place import ChangingArguments, StorePlace, shown


@dataclass(frozen=True, kw_only=True)
class Drop(ChangingArguments):
    """Drop samples from a store. Their bytes stay until `store compact`; older generations keep them.

    The next pack packs a dropped image again if the source still has it. --shard drops a complete shard, even if its files are
    missing; `store repair` drops only the samples that cannot be read.

    Example: store drop photos.store other0/0.png other2/2.png
    """

    store: Positional[StorePlace]
    """Path or URL of the store."""
    ids: Annotated[Positional[tuple[str, ...]], Arg(metavar="[ID …]")] = ()
    """Sample ids: paths in the source, including the extension."""
    from_file: Annotated[Path | None, Arg(metavar="FILE")] = None
    """Read more ids from this file, one per line."""
    match: Annotated[str | None, Arg(metavar="GLOB")] = None
    """Drop the ids that match a pattern of *, ? and [abc], as for `store ls`; * also matches slashes. See --dry-run."""
    shard: Annotated[Repeated[tuple[str, ...]], Arg(metavar="NAME")] = ()
    """Drop this shard and all its samples, instead of ids. Repeatable. `store info` lists shards with missing files."""
    dry_run: bool = False
    """Check and report without changing the store."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        if self.shard:
            return self._drop_shards()
        from bucketline.store.change.drop import drop, read_ids

        ids = (*self.ids, *(read_ids(self.from_file) if self.from_file else ()))
        done = drop(self.path_or_objects(self.store), ids, match=self.match, dry_run=self.dry_run)
        if self.json:
            report = {"generation": done.generation, "dropped": list(done.ids), "samples": done.samples}
            print_json({**report, "dry_run": self.dry_run})
        elif self.dry_run:
            print(f"{shown(self.store)}: would drop {counted(len(done.ids), 'sample')}, {done.samples} would stay")
        else:
            print(
                f"{shown(self.store)}: {counted(len(done.ids), 'sample')} dropped, {done.samples} stay; "
                f"generation {done.generation}"
            )
        return 0

    def _drop_shards(self) -> int:
        from bucketline.errors import UsageError
        from bucketline.store.change.drop_shards import drop_shards

        if self.ids or self.from_file or self.match is not None:
            raise UsageError("ids and --shard are both given; use one command for each")
        done = drop_shards(self.path_or_objects(self.store), self.shard, dry_run=self.dry_run)
        if self.json:
            report = {"generation": done.generation, "shards": list(done.shards), "dropped": list(done.ids)}
            print_json({**report, "dropped_samples": done.dropped, "samples": done.samples, "dry_run": self.dry_run})
            return 0
        what = f"{counted(len(done.shards), 'shard')} with {counted(done.dropped, 'sample')}"
        if self.dry_run:
            print(f"{shown(self.store)}: would drop {what}, {done.samples} would stay")
        else:
            print(f"{shown(self.store)}: {what} dropped, {done.samples} stay; generation {done.generation}")
        return 0
