"""The file `metrics.jsonl` of a run: a line per window of steps and one per validation; read, and cut back for a resume."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bucketline.files.atomic_write import write_durably
from bucketline.files.run_marker import METRICS

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.train.config import TrainConfig
    from bucketline.typed_json import Json


@dataclass(slots=True, kw_only=True)
class WindowState:
    """A window of steps as far as it has been read back; a checkpoint has the incomplete one, for a resume to continue."""

    first_step: int
    losses: list[float | None] = field(default_factory=list)  # per step, the mean over ranks; None for a skipped step
    grad_norms: list[float | None] = field(default_factory=list)
    buckets: list[str] = field(default_factory=list)  # per step, including those still on the device
    step_s: list[float] = field(default_factory=list)
    wait_s: float = 0.0
    learning_rate: float = 0.0

    @property
    def last_step(self) -> int:
        """The last step so far."""
        return self.first_step + len(self.buckets) - 1


def read_metrics(output_dir: Path) -> list[dict[str, Json]]:
    """Return the lines as objects, up to a truncated or invalid one."""
    lines = []
    for text in (output_dir / METRICS).read_bytes().split(b"\n")[:-1]:
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def has_steps(output_dir: Path) -> bool:
    """Return whether a run's metrics contain a window of steps; validation lines do not count."""
    return (output_dir / METRICS).exists() and any("loss" in line for line in read_metrics(output_dir))


def cut_back(config: TrainConfig, steps_done: int, window: WindowState | None) -> list[int]:
    """Keep only the lines that an uninterrupted run would have written by step `steps_done`; return the validations' steps.

    Remove windows that end later, the line of a partial `window` that continues, later validations, and a validation made only
    because the run ended here.
    """
    path, kept, validated = config.output_dir / METRICS, b"", []
    for line in read_metrics(config.output_dir) if path.exists() else ():
        step = line["step"]
        assert isinstance(step, int)
        if is_window := "loss" in line:
            stays = step < (window.first_step if window else steps_done)
        else:
            is_scheduled = step == 0 or (config.validate_every is not None and step % config.validate_every == 0)
            stays = step < steps_done or (step == steps_done and is_scheduled)
        if stays:
            kept += json.dumps(line).encode() + b"\n"
            validated += [] if is_window else [step]
    write_durably(path, kept)
    return validated
