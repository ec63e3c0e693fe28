"""Export as a folder of safetensors files: one per sample, in one folder per bucket, indexed by `samples.jsonl`.

Files are named by the digest of the sample id: an id never becomes a path.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from bucketline.store.export.exporter import Exporter
from bucketline.store.export.sample_file import record_as_json
from bucketline.store.format.hashing import sample_digest

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from bucketline.store.export.exporter import ExportedSample

_SAMPLES = "samples.jsonl"


class FolderExporter(Exporter):
    """Writes the folder."""

    def write(self, samples: Iterable[ExportedSample], folder: Path) -> None:
        """Write each sample's file and its line; see `Exporter`."""
        with (folder / _SAMPLES).open("w", encoding="ascii") as lines:
            for record, data in samples:
                name = f"{record.bucket}/{sample_digest(record.id).hex()}.safetensors"
                (folder / record.bucket).mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
                lines.write(json.dumps({"file": name, **record_as_json(record)}) + "\n")
