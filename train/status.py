"""`status.json`: how a run stands, for whoever started it (torchrun hides a worker's exit code)."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING

from bucketline.store.durable import write_durably

if TYPE_CHECKING:
    from pathlib import Path

STATUS = "status.json"


class State(StrEnum):
    """How a run stands."""

    RUNNING = "running"
    DONE = "done"  # all steps taken
    STOPPED = "stopped"  # by SIGTERM or SIGINT, after a checkpoint
    FAILED = "failed"


def write_status(output_dir: Path, state: State, step: int, reason: str | None = None) -> None:
    """Replace the status; `step`: optimizer steps done."""
    text = json.dumps({"state": state, "step": step, "reason": reason})
    write_durably(output_dir / STATUS, text.encode() + b"\n")


def write_running(output_dir: Path, step: int) -> None:
    """Note how far the run is, unless a rank has noted a failure."""
    if not _has_failed(output_dir):
        write_status(output_dir, State.RUNNING, step)


def write_failure(output_dir: Path, step: int, reason: str) -> None:
    """Note a failure, unless another rank has noted the first one: what follows it says only that a rank was lost."""
    if not _has_failed(output_dir):
        write_status(output_dir, State.FAILED, step, reason)


def _has_failed(output_dir: Path) -> bool:
    try:
        return bool(json.loads((output_dir / STATUS).read_bytes())["state"] == State.FAILED)
    except (OSError, ValueError, KeyError, TypeError):
        return False
