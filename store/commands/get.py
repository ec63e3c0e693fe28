"""`store get`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bucketline.commands import one_line, print_json


@dataclass(frozen=True, kw_only=True)
class Get:
    """Write one sample's columns and its captions' tokens to a safetensors file.

    Example: store get photos.store coffee/whole.png -o coffee.safetensors
    """

    store: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="STORE")]
    """The store's folder."""
    id: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ID")]
    """The sample's id: its path in the source, with the extension."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE")]
    """The file to write; it must not exist yet."""
    json: bool = False
    """Print the sample's record as one JSON object."""

    def run(self) -> int:
        from bucketline.store.reader import Store
        from bucketline.store.sample_file import write_sample
        from bucketline.store.staging import refuse_existing

        refuse_existing(self.output, "file")
        report = write_sample(Store.open(self.store), self.id, self.output)
        if self.json:
            print_json(report)
        else:
            print(f"{self.output}: {one_line(report['id'])} of {report['bucket']}, {len(report['captions'])} captions")
        return 0
