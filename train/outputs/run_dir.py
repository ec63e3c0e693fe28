"""The run folder: claim it, resume from it, write its `status.json` and `config.json`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import subprocess
from dataclasses import asdict
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from bucketline.errors import BucketlineError, StateError, TrainError, UsageError
from bucketline.files.atomic_write import write_durably
from bucketline.files.redact import redacted
from bucketline.files.run_marker import CONFIG, METRICS, STATUS
from bucketline.train.outputs import checkpoint, metrics
from bucketline.train.outputs.checkpoint import Start, describe
from bucketline.train.outputs.output_place import refuse_place
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.loader import WeightedStore
    from bucketline.train.config import TrainConfig
    from bucketline.train.outputs.checkpoint import RunState
    from bucketline.train.parallel import TrainRanks
    from bucketline.typed_json import Json


def find_start(config: TrainConfig) -> Start:
    """Return the start of a run: a fresh folder, or with `--resume` the newest complete checkpoint. Write nothing.

    Raises:
        StateError: if the checkpoint has other adapters.
        UsageError: if the folder holds a run (without `--resume`) or foreign files; if the checkpoint is past `--max-steps`.
        TrainError: if there is nothing to resume.
    """
    return _resume(config) if config.resume else _fresh(config)


def take(config: TrainConfig, start: Start) -> None:
    """Claim the output folder for this run; remove the metrics of an earlier run that recorded no step.

    Raises:
        TrainError: if the folder cannot be written.
    """
    output = config.output_dir
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_status(output, RunStatus.RUNNING, start.steps_done)
        if start.checkpoint is None:  # an earlier validation was of other weights
            (output / METRICS).unlink(missing_ok=True)
    except OSError as error:
        raise TrainError(f"{output} cannot be written: {error.strerror}; choose another --output-dir") from error


def _fresh(config: TrainConfig) -> Start:
    refuse_place(config)
    output = config.output_dir
    is_begun = any((output / checkpoint.CHECKPOINTS).glob("step-*"))
    if is_begun or metrics.has_steps(output):
        on = "continue it with --resume" if is_begun else "it ended before its first checkpoint: remove the folder"
        raise UsageError(f"{output} already has a run; {on}, or choose another --output-dir")
    return Start(checkpoint=None, state=None)


def _resume(config: TrainConfig) -> Start:
    folder = checkpoint.last_whole(config.output_dir)
    state = checkpoint.read_state(folder)
    if state.steps_done > config.max_steps:
        raise UsageError(
            f"--max-steps is {config.max_steps}, and {folder} is already at step {state.steps_done}; use that many or more"
        )
    _refuse_other_adapters(config, folder, state)
    return Start(checkpoint=folder, state=state, takes_new_plan=config.new_plan)


def _refuse_other_adapters(config: TrainConfig, folder: Path, state: RunState) -> None:
    """Compare the options that decide the adapters' shapes, before a model is loaded that does not fit."""
    for name in ("lora_rank", "lora_targets"):
        before, now = state.config.get(name), getattr(config, name)
        if before != now:
            option = "--" + name.replace("_", "-")
            remedy = f"leave out {option}" if before is None else f"use {option} {before}"
            raise StateError(
                f"{option} is {now}, and {folder} was trained with {before}; {remedy}, "
                "or start a new run in another --output-dir"
            )


def write_config(config: TrainConfig, shares: Sequence[WeightedStore], world_size: int) -> None:
    """Write `config.json`: the resolved configuration, versions, commit, stores and encoders."""
    document: dict[str, Json] = {
        "config": config_as_json(config),
        "world_size": world_size,
        "versions": dict(versions()),
        "commit": _commit(),
        "stores": [encode(describe(share)) for share in shares],
        "encoders": shares[0].store.manifest.encoders,
    }
    write_durably(config.output_dir / CONFIG, json.dumps(document, indent=1).encode() + b"\n")


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect a run's results."""
    packages = ("bucketline", "torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "numpy")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}


def config_as_json(config: TrainConfig) -> dict[str, Json]:
    """Return the configuration as JSON values."""
    values = {**asdict(config), "store": [redacted(str(path)) for path in config.store]}
    values |= {name: list(values[name]) for name in ("store_option", "store_weight", "track_with")}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


@cache
def _commit() -> str | None:
    """Return the git commit of this code; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


class RunStatus(StrEnum):
    """The state of a run."""

    RUNNING = "running"
    DONE = "done"  # all steps done
    STOPPED = "stopped"  # by SIGTERM or SIGINT, after a checkpoint
    FAILED = "failed"


def write_status(output_dir: Path, state: RunStatus, step: int, reason: str | None = None) -> None:
    """Replace the status; `step`: optimizer steps done. Between steps, that of a run that continues waits for no disk."""
    text = json.dumps({"state": state, "step": step, "reason": reason})
    write_durably(output_dir / STATUS, text.encode() + b"\n", syncs=state is not RunStatus.RUNNING)


def update_status(output_dir: Path, state: RunStatus, step: int, reason: str | None = None) -> None:
    """Replace the status unless a rank has recorded a failure: later failures only follow from the first."""
    if not _has_failed(output_dir):
        write_status(output_dir, state, step, reason)


def _has_failed(output_dir: Path) -> bool:
    try:
        return bool(json.loads((output_dir / STATUS).read_bytes())["state"] == RunStatus.FAILED)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def record_failure(error: BaseException, config: TrainConfig, ranks: TrainRanks, steps_done: int) -> TrainError | None:
    """Write a failure to `status.json`; return an error that says what to do, or None if the given one already does."""
    output = config.output_dir
    explained: TrainError | None = None
    reason = str(error) if isinstance(error, BucketlineError) else f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        reason = f"{error.filename or output} cannot be read or written: {error.strerror or error}"
        explained = TrainError(f"{reason}; {checkpoint.way_on(output, first='fix that, then ')}")
    elif isinstance(error, metrics.NotFiniteError):
        reason = f"{error}; {checkpoint.way_on(output)}, with a lower --learning-rate"
        explained = TrainError(reason)
    elif ranks.world_size > 1 and _is_lost_peer(error):
        reason = f"rank {ranks.rank} lost another rank: {str(error).splitlines()[0]}"
        explained = TrainError(f"{reason}; the cause is that rank's own message, also in status.json in {output}")
    with contextlib.suppress(OSError):  # on a failing disk, report the first failure
        update_status(output, RunStatus.FAILED, steps_done, reason)
    return explained


def _is_lost_peer(error: BaseException) -> bool:
    """Return whether an error only follows from another rank's failure; gloo's errors have no separate class."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
