"""An exporter: each sample's latent as `NUMBER.npy`, [C, h, w], and its first caption in `NUMBER.txt`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import load

from bucketline.store.export.exporter import ExportedSample, Exporter

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


class NpyExporter(Exporter):
    """Writes the folder."""

    def write(self, samples: Iterable[ExportedSample], folder: Path) -> None:
        """Write the files; see `Exporter`. The folder appears under its name once this returns."""
        for number, (record, data) in enumerate(samples):
            np.save(folder / f"{number}.npy", load(data)["latent"])
            (folder / f"{number}.txt").write_text(record.captions[0] if record.captions else "", encoding="utf-8")
