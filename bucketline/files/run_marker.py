"""The files of a training run's folder, and how ingest and trainer recognise it: its images must never become samples."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

STATUS = "status.json"  # written first in a run's folder and never removed
CONFIG, METRICS = "config.json", "metrics.jsonl"
CHECKPOINTS = "checkpoints"  # folder of the checkpoints
RUN_FILE = "run.toml"  # the options of CONFIG, to be run again
IMAGES, IMAGES_FOLDER = "images.png", "images"  # the last contact sheet, and what is drawn along the run
LOSS_CURVE = "loss.png"
_FIELDS = frozenset(("state", "step", "reason"))  # of the status
_MAX_BYTES = 1 << 16  # the reason is an error message


def is_run(folder: Path) -> bool:
    """Return True if the folder contains a training run, judged by the fields of its `status.json`."""
    try:
        with (folder / STATUS).open("rb") as file:
            return is_status(file.read(_MAX_BYTES))
    except OSError:
        return False


def is_status(data: bytes) -> bool:
    """Return True if this is the content of a training run's `status.json`."""
    try:
        found = json.loads(data[:_MAX_BYTES])
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.keys() == _FIELDS
