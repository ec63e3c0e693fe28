"""The formats that `ingest import` knows, ours and those of other packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.errors import SourceError, UsageError
from bucketline.extensions import Extensions
from bucketline.files.paths import refuse_overlap
from bucketline.ingest.encoders.model_folder import local_model
from bucketline.ingest.importers.cache import Importer

if TYPE_CHECKING:
    from bucketline.ingest.importers.config import ImportConfig

_OURS = ("kohya", "musubi", "simpletuner", "onetrainer", "ai-toolkit", "diffusion-pipe", "mds")
IMPORTERS: Extensions[Importer] = Extensions(
    "an importer called",
    "bucketline.importers",
    {name: f"bucketline.ingest.importers.formats.{name.replace('-', '_')}:IMPORTER" for name in _OURS},
    lambda found: isinstance(found, Importer),
)


def expect_inputs(config: ImportConfig) -> None:
    """Refuse inputs that are not there or overlap, before anything heavy is imported."""
    if config.kind not in tuple(IMPORTERS):
        known = f"{', '.join(IMPORTERS)}; another package's is known once it is installed"
        raise UsageError(f"KIND is {config.kind!r:.80}, expected {known}")
    if not config.source.is_dir():
        raise SourceError(f"{config.source} is not a folder; expected the folder of a cache")
    for path in (config.source, config.captions):
        if path is not None:
            refuse_overlap(path, config.store)
    if config.model is not None:
        local_model(config.model, config.model_config)


def importer_of(kind: str) -> Importer:
    """Return the importer of a kind."""
    importer = IMPORTERS[kind]
    if importer.kind != kind:
        raise UsageError(f"an importer called {kind!r} has the kind {importer.kind!r}, expected the same; update its package")
    return importer
