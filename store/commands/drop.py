"""The command `store drop`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bucketline.commands import counted, print_json


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Take samples out of a store. Their bytes stay until `store compact`, and older generations keep them.

    A later pack of a source that still has a picture packs it again.

    Example: store drop photos.store other0/0.png other2/2.png
    """

    store: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="STORE")]
    """The store's folder."""
    ids: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[ID …]")] = ()
    """The samples' ids: their paths in the source, with the extension."""
    from_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A file of more ids, one a line."""
    dry_run: bool = False
    """Check and report, change nothing."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        from bucketline.store.drop import drop, read_ids

        done = drop(self.store, (*self.ids, *(read_ids(self.from_file) if self.from_file else ())), dry_run=self.dry_run)
        if self.json:
            report = {"generation": done.generation, "dropped": list(done.ids), "samples": done.samples}
            print_json({**report, "dry_run": self.dry_run})
        elif self.dry_run:
            print(f"{self.store}: would drop {counted(len(done.ids), 'sample')}, {done.samples} would stay")
        else:
            print(
                f"{self.store}: {counted(len(done.ids), 'sample')} dropped, {done.samples} stay; generation {done.generation}"
            )
        return 0
