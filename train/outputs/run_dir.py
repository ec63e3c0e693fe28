"""The run folder: check, lock and claim it, resume from it, write its `status.json` and `config.json`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import platform
import subprocess
from dataclasses import fields, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from bucketline.errors import BucketlineError, LockedError, NoLocksError, TrainError, UsageError
from bucketline.files.atomic_write import write_durably
from bucketline.files.locks import FileLock
from bucketline.files.run_marker import CONFIG, METRICS, RUN_FILE, STATUS
from bucketline.loader.mixture import StoreId, redacted_store
from bucketline.loader.ranks import OtherRankFailedError
from bucketline.train import checkpoint
from bucketline.train.checkpoint import Start
from bucketline.train.metrics_file import has_steps
from bucketline.train.outputs.metrics import NotFiniteError
from bucketline.train.refusals import refuse_changes, refuse_place, refuse_taken
from bucketline.train.run_file import as_run_file, config_as_json
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bucketline.loader import WeightedStore
    from bucketline.train.config import TrainConfig
    from bucketline.train.parallel import TrainRanks
    from bucketline.typed_json import Json

log = logging.getLogger(__name__)

_LOCK = ".lock"  # in the folder, where it stays


def find_start(config: TrainConfig) -> Start:
    """Return the start of a run: a fresh folder, or with `--resume` the newest complete checkpoint. Write nothing.

    Raises:
        UsageError: if the folder holds a run (without `--resume`), none (with it) or foreign files, or is inside or around a
            store or in the folder of its images; if the checkpoint is past `--max-steps`, or was trained with another
            value of an option that is fixed.
        TrainError: if the run has no complete checkpoint.
        StoreError: if a store cannot be opened.
    """
    output = config.output_dir
    if not config.resume:
        refuse_place(config)
        refuse_taken(config)
        if has_steps(output):
            on = "it ended before its first checkpoint: remove the folder"
            raise UsageError(f"{output} already has a run; {on}, or choose another --output-dir")
        return Start(checkpoint=None, state=None)
    refuse_taken(config)
    folder = checkpoint.last_whole(output)
    state = checkpoint.read_state(folder)
    refuse_changes(config, state, folder)
    return Start(checkpoint=folder, state=state)


class RunLock:
    """Exclusive use of a run's folder, on rank 0: from before it is read, if there is one, until `close`.

    The kernel releases it when the process ends.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._lock: FileLock | None = None

    def find_start(self) -> Start:
        """Return what `find_start` does; hold a folder that a run has used before.

        Raises:
            LockedError: if another run uses it; the message names its process and machine.
        """
        if (self._config.output_dir / _LOCK).exists():
            self._acquire()
        return find_start(self._config)

    def take(self, start: Start) -> bytes:
        """Claim the folder, which is made unless it exists; remove the metrics of an earlier run that recorded no step.

        Return the `status.json` that this replaces, empty if there is none. Checkpoints that the start has skipped as damaged
        are set aside.

        Raises:
            LockedError: if another run uses it by now.
            TrainError: if the folder cannot be made or written.
        """
        output = self._config.output_dir
        try:
            output.mkdir(parents=True, exist_ok=True)
            if self._lock is None:
                self._acquire()
                if not self._config.resume:
                    find_start(self._config)  # another run may have begun and ended there since
            former = (output / STATUS).read_bytes() if (output / STATUS).exists() else b""
            write_status(output, RunStatus.RUNNING, start.steps_done, begins=True)
            if start.checkpoint is None:  # an earlier validation was of other weights
                (output / METRICS).unlink(missing_ok=True)
            else:
                checkpoint.set_aside(start.checkpoint)
        except OSError as error:
            raise TrainError(f"{output} cannot be written: {error.strerror}; choose another --output-dir") from error
        return former

    def _acquire(self) -> None:
        output = self._config.output_dir
        try:
            self._lock = FileLock(output / _LOCK, item=output)
        except LockedError as error:
            raise LockedError(f"{error}, or choose another --output-dir") from error
        except NoLocksError as error:
            log.warning("%s; nothing keeps another run from writing to %s as well", error, output)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()


def write_config(config: TrainConfig, given: TrainConfig, shares: Sequence[WeightedStore], world_size: int) -> None:
    """Write `config.json`: the resolved configuration, versions, commit, stores and encoders; and `run.toml`, to run it again.

    `given`: the configuration before it was resolved.
    """
    document: dict[str, Json] = {
        "config": config_as_json(config),
        "started_in": str(Path.cwd()),
        "world_size": world_size,
        "versions": dict(versions()),
        "commit": _commit(),
        "stores": [encode(StoreId.of(share)) for share in shares],
        "encoders": shares[0].store.manifest.encoders,
    }
    write_durably(config.output_dir / CONFIG, json.dumps(document, indent=1).encode() + b"\n")
    derived = {
        one.name: f"chosen by the run; given: {getattr(given, one.name)}"
        for one in fields(config)
        if getattr(config, one.name) != getattr(given, one.name)
    }
    shown = replace(config, store=tuple(redacted_store(str(path)) for path in config.store))
    title = f"The run in {config.output_dir}, started in {Path.cwd()}, with all options as they were resolved."
    again = as_run_file(shown, title, derived=derived)
    write_durably(config.output_dir / RUN_FILE, again.encode(errors="backslashreplace"))


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect a run's results."""
    packages = ("bucketline", "torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "numpy")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}


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


def write_status(output_dir: Path, state: RunStatus, step: int, reason: str | None = None, *, begins: bool = False) -> None:
    """Replace the status, unless a rank has recorded a failure of this run: later ones only follow from the first.

    `step`: optimizer steps done; `begins`: a recorded failure is of an earlier run. While a run continues, this waits for no
    disk.
    """
    path = output_dir / STATUS
    if not begins and _state(path) == RunStatus.FAILED:
        return
    text = json.dumps({"state": state, "step": step, "reason": reason})
    write_durably(path, text.encode() + b"\n", syncs=state is not RunStatus.RUNNING)


def _state(path: Path) -> object:
    """Return the state that a `status.json` has; None if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads(path.read_bytes())["state"]
    return None


@contextlib.contextmanager
def failures_recorded(
    config: TrainConfig, ranks: TrainRanks, start: Start, former: bytes, steps_done: Callable[[], int | None]
) -> Iterator[None]:
    """Record a failure of the body in `status.json`, except what only follows from another rank's.

    A run that the body refuses to resume keeps its `former` status. `steps_done`: None until all checks have passed.

    Raises:
        TrainError: instead of an error that does not say what to do.
    """
    output = config.output_dir
    try:
        yield
    except OtherRankFailedError:
        raise
    except BaseException as error:
        reason = str(error) if isinstance(error, BucketlineError) else f"{type(error).__name__}: {error}"
        explained = ""
        is_gloos = isinstance(error, RuntimeError) and "gloo" in str(error)  # which has no class of its own
        is_lost_peer = ranks.world_size > 1 and (is_gloos or isinstance(error, dist.DistError))
        if isinstance(error, OSError):
            reason = f"{error.filename or output} cannot be read or written: {error.strerror or error}"
            explained = f"{reason}; {checkpoint.way_on(output, first='fix that, then ')}"
        elif isinstance(error, NotFiniteError):
            reason = explained = f"{error}; {checkpoint.way_on(output)}, with a lower --learning-rate"
        elif is_lost_peer:
            reason = f"rank {ranks.rank} lost another rank: {str(error).splitlines()[0]}"
            explained = f"{reason}; the cause is that rank's own message, also in status.json in {output}"
        is_refusal = isinstance(error, BucketlineError | KeyboardInterrupt) or is_lost_peer
        with contextlib.suppress(OSError):  # on a failing disk, report the first failure
            if (done := steps_done()) is None and start.checkpoint is not None and is_refusal:
                if _state(output / STATUS) == RunStatus.RUNNING:  # no rank has recorded a failure, or undone it already
                    write_durably(output / STATUS, former) if former else (output / STATUS).unlink()
            else:
                write_status(output, RunStatus.FAILED, start.steps_done if done is None else done, reason)
        if explained:
            raise TrainError(explained) from error
        raise
