"""`store get`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bucketline.command_line import counted, one_line, print_json
from bucketline.options import Arg, Positional
from bucketline.store.commands.place import ReadingArguments, StorePlace, shown


@dataclass(frozen=True, kw_only=True)
class Get(ReadingArguments):
    """Write one sample to a safetensors file: its columns and caption embeddings.

    Example: store get photos.store coffee/whole.png -o coffee.safetensors
    """

    store: Positional[StorePlace]
    """Path or URL of the store."""
    id: Annotated[Positional[str], Arg(metavar="ID")]
    """Sample id: the path in the source, including the extension."""
    output: Annotated[Path, Arg(aliases=("-o",), metavar="FILE")]
    """Output file; must not exist yet."""
    json: bool = False
    """Print the sample's record as one JSON object."""

    def run(self) -> int:
        from bucketline.files.atomic_folder import refuse_existing
        from bucketline.store.export.sample_file import write_sample

        refuse_existing(self.output, "file")
        report = write_sample(self.open_store(self.store), self.id, self.output)
        if self.json:
            print_json(report)
        else:
            captions = counted(len(report["captions"]), "caption")
            print(f"{shown(self.output)}: {one_line(report['id'])} of {report['bucket']}, {captions}")
        return 0
