"""Every command and the class of its options."""

from __future__ import annotations

from bucketline.ingest.cli import COMMANDS as INGEST
from bucketline.loader.cli import COMMANDS as LOADER
from bucketline.store.cli import COMMANDS as STORE
from bucketline.train.commands.export_model import ExportModel
from bucketline.train.commands.presets import TrainPresets
from bucketline.train.commands.report import TrainReport
from bucketline.train.config import TrainConfig

COMMANDS_OF: dict[str, type] = {
    **{f"ingest {name}": INGEST[name] for name in INGEST},
    **{f"store {name}": STORE[name] for name in STORE},
    **{f"loader {name}": LOADER[name] for name in LOADER},
    "bucketline train": TrainConfig,
    "bucketline train presets": TrainPresets,
    "bucketline train report": TrainReport,
    "bucketline export-model": ExportModel,
}
