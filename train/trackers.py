"""Accelerate's trackers (TensorBoard, wandb and others): they get the lines of `metrics.jsonl` as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType

from bucketline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from accelerate import Accelerator

    from bucketline.store.typed_json import Json

FOLDER = "tracked"  # in the run's folder, for those that write files


def expect_trackers(names: Sequence[str]) -> None:
    """Check that each tracker is one, and installed: Accelerate would leave one that is not out, and say nothing.

    Raises:
        UsageError: naming it.
    """
    known = sorted(str(kind) for kind in LoggerType if kind is not LoggerType.ALL)
    available = {str(kind) for kind in get_available_trackers()}
    for name in names:
        if name not in known:
            raise UsageError(f"--track-with is {name}, expected one of {', '.join(known)}")
        if name not in available:
            package = "'bucketline[tensorboard]'" if name == "tensorboard" else name
            raise UsageError(f"--track-with is {name}, whose package is not installed; pip install {package}, or leave it out")


def begin_tracking(accelerator: Accelerator, name: str, config: Mapping[str, Json]) -> None:
    """Start the trackers on the main process, with the run's configuration."""
    plain = {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in config.items()}
    accelerator.init_trackers(name, config=plain)


def track(accelerator: Accelerator, line: Mapping[str, Json]) -> None:
    """Hand a line of the metrics to the trackers, its numbers by name, at the steps done by then."""
    values = dict(_numbers(line))
    done = int(values.pop("step")) + (0 if "val_loss" in line else 1)
    accelerator.log(values, step=done)


def _numbers(line: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield prefix + name, value
