"""The command `store drop`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bucketline.command_line import counted, print_json
from bucketline.options import Arg, Positional
from bucketline.store.commands.place import ChangingArguments, StorePlace, shown


@dataclass(frozen=True, kw_only=True)
class Drop(ChangingArguments):
    """Drop samples from a store. Their bytes stay until `store compact`; older generations keep them.

    The next pack packs a dropped image again if the source still has it. `store repair` drops the samples that cannot be read.

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
    dry_run: bool = False
    """Check and report without changing the store."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
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
