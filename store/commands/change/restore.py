"""The command `store restore`."""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict, dataclass
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

        done = restore(self.path_or_objects(self.store), self.generation, dry_run=self.dry_run)
        if self.json:
            print_json({**asdict(done), "dry_run": self.dry_run})
            return 0
        samples = (
            f"{counted(done.samples, 'sample')} (there {'was' if done.samples_before == 1 else 'were'} {done.samples_before})"
        )
        if not done.is_changed:
            print(f"{shown(self.store)}: nothing to restore, generation {done.generation} already has what {done.restored} had")
        elif self.dry_run:
            print(f"{shown(self.store)}: would restore generation {done.restored}, {samples}")
        else:
            print(f"{shown(self.store)}: generation {done.restored} restored, {samples}; generation {done.generation}")
        return 0

    def _list(self) -> int:
        from bucketline.store.change.restore import earlier_generations

        newest, found = earlier_generations(self.path_or_objects(self.store))
        if self.json:
            print_json({"generation": newest, "generations": [asdict(earlier) for earlier in found]})
            return 0
        for earlier in found:
            when = dt.datetime.fromtimestamp(earlier.published).astimezone().isoformat(" ", "minutes")
            mark = ", the newest" if earlier.generation == newest else ""
            print(f"generation {earlier.generation}: {counted(earlier.samples, 'sample')}, published {when}{mark}")
        return 0
