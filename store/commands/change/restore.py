"""The command `store restore`."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Annotated

from bucketline.command_line import counted, print_json
from bucketline.options import Arg, Positional
from bucketline.store.commands.place import ChangingArguments, StorePlace, shown


@dataclass(frozen=True, kw_only=True)
class Restore(ChangingArguments):
    """Make an earlier generation the newest one again. It has exactly the samples it had; nothing is rewritten.

    Every pack, drop, compact and repair publishes a generation; earlier ones stay until `store compact --gc`. Without
    GENERATION, list those that are there. What was newest until then stays a generation as well, and can be restored.

    Example: store restore photos.store 3
    """

    store: Positional[StorePlace]
    """Path or URL of the store."""
    generation: Annotated[Positional[int | None], Arg(metavar="[GENERATION]")] = None
    """Number of the generation. Default: only list the generations."""
    dry_run: bool = False
    """Check and report without changing the store."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        if self.generation is None:
            return self._list()
        from bucketline.store.change.restore import restore

        before, after = restore(self.path_or_objects(self.store), self.generation, dry_run=self.dry_run)
        is_changed, own = after is not before, self.generation
        if self.json:
            report = {"restored": own, "generation": (before if self.dry_run else after).generation, "is_changed": is_changed}
            print_json({**report, "samples_before": before.samples, "samples": after.samples, "dry_run": self.dry_run})
            return 0
        samples = f"{counted(after.samples, 'sample')} (there {'was' if before.samples == 1 else 'were'} {before.samples})"
        if not is_changed:
            print(f"{shown(self.store)}: nothing to restore, generation {before.generation} already has what {own} had")
        elif self.dry_run:
            print(f"{shown(self.store)}: would restore generation {own}, {samples}")
        else:
            print(f"{shown(self.store)}: generation {own} restored, {samples}; generation {after.generation}")
        return 0

    def _list(self) -> int:
        from bucketline.store.change.restore import earlier_generations

        found = earlier_generations(self.path_or_objects(self.store))
        if self.json:
            listed = [{"generation": one.generation, "samples": one.samples, "published": at} for one, at in found]
            print_json({"generations": listed})
            return 0
        for n, (one, published) in enumerate(found):
            when = dt.datetime.fromtimestamp(published).astimezone().isoformat(" ", "minutes")
            mark = "" if n else ", the newest"
            print(f"generation {one.generation}: {counted(one.samples, 'sample')}, published {when}{mark}")
        return 0
