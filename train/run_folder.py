"""The run's folder: taken by one run, never overwritten by another."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import TrainError, UsageError
from bucketline.store.durable import write_durably
from bucketline.store.typed_json import encode
from bucketline.train import checkpoint, metrics
from bucketline.train.open_stores import describe
from bucketline.train.status import State, write_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.loader import StoreShare
    from bucketline.store.typed_json import Json
    from bucketline.train.checkpoint import RunState
    from bucketline.train.config import TrainConfig

CONFIG = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run begins: at step 0, or at a checkpoint."""

    checkpoint: Path | None
    state: RunState | None
    takes_new_plan: bool = False  # weights and optimizer go on, on the stores as they are now

    @property
    def steps_done(self) -> int:
        """Optimizer steps done before this start."""
        return 0 if self.state is None else self.state.steps_done


def claim(config: TrainConfig) -> Start:
    """Take the output folder for this run: a fresh one, or with `--resume` one that has a whole checkpoint.

    Raises:
        UsageError: where it holds a run and `--resume` was not given, or that run is already past `--max-steps`.
        TrainError: where there is nothing to resume, or the folder cannot be written.
    """
    output = config.output_dir
    start = _resume(config) if config.resume else _fresh(output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_status(output, State.RUNNING, start.steps_done)
    except OSError as error:
        raise TrainError(f"{output} cannot be written: {error.strerror}; choose another --output-dir") from error
    return start


def _fresh(output: Path) -> Start:
    file = output / metrics.METRICS
    if any((output / checkpoint.CHECKPOINTS).glob("step-*")) or (file.exists() and file.stat().st_size):
        is_begun = any((output / checkpoint.CHECKPOINTS).glob("step-*"))
        on = "go on with it by --resume" if is_begun else "it ended before its first checkpoint: remove the folder"
        raise UsageError(f"{output} holds a run already; {on}, or choose another --output-dir")
    return Start(checkpoint=None, state=None)


def _resume(config: TrainConfig) -> Start:
    folder = checkpoint.last_whole(config.output_dir)
    state = checkpoint.read_state(folder)
    if state.steps_done > config.max_steps:
        raise UsageError(
            f"--max-steps is {config.max_steps}, and {folder} is already at {state.steps_done}; give that many or more"
        )
    return Start(checkpoint=folder, state=state, takes_new_plan=config.new_plan)


def write_config(config: TrainConfig, shares: Sequence[StoreShare], world_size: int) -> None:
    """Write what this run is made of: the resolved configuration, versions, commit, store."""
    document: dict[str, Json] = {
        "config": config_as_json(config),
        "world_size": world_size,
        "versions": dict(versions()),
        "commit": _commit(),
        "stores": [encode(describe(share)) for share in shares],
        "encoders": shares[0].store.manifest.encoders,
    }
    write_durably(config.output_dir / CONFIG, json.dumps(document, indent=1).encode() + b"\n")


def versions() -> dict[str, str]:
    """Give the versions of Python and of the packages that a run's numbers come from."""
    packages = ("bucketline", "torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "numpy")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}


def config_as_json(config: TrainConfig) -> dict[str, Json]:
    """Give the configuration as JSON takes it."""
    values = {**asdict(config), "store": [str(path) for path in config.store], "track_with": list(config.track_with)}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _commit() -> str | None:
    """Give the commit that this code is checked out at, if it is."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
