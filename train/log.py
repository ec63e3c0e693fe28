"""The record of a run in its folder: lock, `status.json`, `config.json`, `metrics.jsonl`; trackers, and progress on stderr.

`metrics.jsonl` has a line for each window of steps, which a checkpoint ends too, and one for each validation. A window's losses
are read from the device when the *next* window ends, so that in the steady state nothing waits for them.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.metadata
import json
import logging
import math
import platform
import statistics
import subprocess
import time
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from enum import StrEnum
from functools import cache
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch._dynamo.utils import counters

from bucketline.command_line import counted, per_second, stderr_console, wrapped
from bucketline.errors import LockedError, NoLocksError, TrainError, UsageError
from bucketline.files.atomic_write import FileLock, write_durably
from bucketline.files.paths import CONFIG, METRICS, RUN_FILE, STATUS, is_status
from bucketline.loader.mixture import StoreId, redacted_store
from bucketline.train.run_file import as_run_file, config_as_json
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from accelerate import Accelerator
    from torch import Tensor

    from bucketline.loader import WeightedStore
    from bucketline.train.config import TrainConfig
    from bucketline.train.step import StepOutcome
    from bucketline.typed_json import Json

log = logging.getLogger(__name__)

TRACKED = "tracked"  # folder in the run's, for trackers that write files
STATUS_EVERY_S = 5.0
SKIPPED_IN_A_ROW = 5
"""Consecutive non-finite steps that end a run: a single one may come from a bad sample, several mean bad weights."""
_LOCK = ".lock"  # in the folder, where it stays


# ---------------------------------------------------------------------------------------------- the folder


def lock_folder(output: Path, *, is_new: bool = False) -> Callable[[], None]:
    """Take exclusive use of a run's folder; return what releases it, as the kernel does when the process ends.

    `is_new`: the run has made the folder, and removes it if it was refused before it wrote anything.
    """
    try:
        lock = FileLock(output / _LOCK, item=output)
    except LockedError as error:
        found = json.loads((output / _LOCK).read_bytes() or b"null")
        holder = f"process {found['pid']} on {found['host']}" if found else "another process"
        raise LockedError(f"{output} is being trained by {holder}; wait, stop it, or choose another --output-dir") from error
    except NoLocksError as error:
        log.warning("%s; nothing keeps another run from writing to %s as well", error, output)
        return lambda: None

    def release() -> None:
        with contextlib.suppress(OSError):
            if is_new and [path.name for path in output.iterdir()] == [_LOCK]:
                (output / _LOCK).unlink()
                output.rmdir()
        lock.release()

    return release


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
    if not begins and read_status(output_dir) == RunStatus.FAILED:
        return
    text = json.dumps({"state": state, "step": step, "reason": reason})
    write_durably(path, text.encode() + b"\n", syncs=state is not RunStatus.RUNNING)


def read_status(output_dir: Path) -> str | None:
    """Return the recorded state of a run; None if there is none."""
    path = output_dir / STATUS
    recorded = path.read_bytes() if path.exists() else b""
    return str(json.loads(recorded)["state"]) if is_status(recorded) else None


def chosen_options(config: TrainConfig, given: TrainConfig) -> dict[str, object]:
    """Return the options that were not given, as the run has resolved them in `config`."""
    pairs = {one.name: (getattr(config, one.name), getattr(given, one.name)) for one in fields(config)}
    return {name: value for name, (value, before) in pairs.items() if value != before}


def write_config(config: TrainConfig, given: TrainConfig, stores: Sequence[WeightedStore], world_size: int) -> None:
    """Write `config.json`: the resolved configuration, versions, commit, stores, encoders; and `run.toml`, what was `given`."""
    document: dict[str, Json] = {
        "config": config_as_json(config),
        "world_size": world_size,
        "versions": dict(versions()),
        "commit": _commit(),
        "stores": [encode(StoreId.of(weighted)) for weighted in stores],
        "encoders": stores[0].store.manifest.encoders,
    }
    write_durably(config.output_dir / CONFIG, json.dumps(document, indent=1).encode() + b"\n")
    shown = replace(given, store=tuple(redacted_store(str(path)) for path in given.store))
    text = as_run_file(shown, f"The run in {config.output_dir}.")
    write_durably(config.output_dir / RUN_FILE, text.encode(errors="backslashreplace"))


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect a run's results."""
    packages = ("bucketline", "torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "numpy")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}


@cache
def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


# ---------------------------------------------------------------------------------------------- metrics.jsonl

Mark = float | torch.cuda.Event
"""A point in time: the host's clock, or a CUDA event, recorded without a sync."""


def mark(device: torch.device) -> Mark:
    """Record the current time; on CUDA, the time at which the device reaches this point."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    """Return the seconds between two marks of the same kind; wait until the device has reached the second."""
    if isinstance(end, float):
        return end - cast("float", begin)
    end.synchronize()
    return float(cast("torch.cuda.Event", begin).elapsed_time(end)) / 1e3


def graphs_compiled() -> int:
    return int(counters["stats"]["unique_graphs"])


class NotFiniteError(TrainError):
    """A loss, gradient or weight is NaN or infinite; a lower learning rate may help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Samples and FLOPs per step, to compute a window's throughput; buckets are added as a run takes them up."""

    num_devices: int
    peak_flops: float | None  # of one device; None: unknown
    samples: dict[str, int] = field(default_factory=dict)  # per step of each bucket, over all devices
    flops: dict[str, float] = field(default_factory=dict)  # likewise, forward and backward; {}: not counted
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the batches that the run is compiled for, by bucket


@dataclass(slots=True, kw_only=True)
class Window:
    """A window of steps: what is known on the host, and losses and gradient norms that are still on the device."""

    first_step: int
    buckets: list[str] = field(default_factory=list)  # per step
    on_device: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # likewise: its loss and its gradient's norm
    took: list[tuple[Mark, Mark]] = field(default_factory=list)  # likewise
    samples: int = 0  # of the steps, over all devices
    flops: float = 0.0  # likewise
    wait_s: float = 0.0
    learning_rate: float = 0.0


class WindowRecorder:
    """Collect steps into windows; a window's line is returned when the next one ends, so that nothing waits for the device."""

    def __init__(self, *, log_every: int, work: StepWork, gather: Callable[[Tensor], Tensor]) -> None:
        """`gather` concatenates the ranks' [n] tensors into [W · n], in rank order."""
        self._log_every, self._work, self._gather = log_every, work, gather
        self._open: Window | None = None
        self._pending: Callable[[], dict[str, Json]] | None = None  # reads back the last complete window
        self.skipped: list[str] = []  # the last steps read back, if they were skipped, possibly because of bad weights

    def add(self, step: int, outcome: StepOutcome, *, took: tuple[Mark, Mark], wait_s: float) -> list[dict[str, Json]]:
        """Add a step with its begin and end marks; if it completes a window, return the previous window's line, if any."""
        window = self._open = self._open or Window(first_step=step)
        window.on_device.append((outcome.loss, outcome.grad_norm))
        window.took.append(took)
        window.buckets.append(outcome.bucket)
        window.samples += self._work.samples[outcome.bucket]
        window.flops += self._work.flops[outcome.bucket] if self._work.flops else 0.0
        window.wait_s += wait_s
        window.learning_rate = outcome.learning_rate
        return [] if (step + 1) % self._log_every else self._complete()

    def flush(self) -> list[dict[str, Json]]:
        """Return the line of the last complete window now, if it has not been returned yet."""
        read, self._pending = self._pending, None
        return [] if read is None else [read()]

    def end(self) -> list[dict[str, Json]]:
        """End the open window here, as a checkpoint does; return every line that has not been returned yet."""
        return [*(self._complete() if self._open else ()), *self.flush()]

    def _complete(self) -> list[dict[str, Json]]:
        """Start copying the open window's values from the device to the host; return the line of the window before it."""
        window, self._open = self._open, None
        assert window is not None
        losses, norms = map(torch.stack, zip(*window.on_device, strict=True))
        # [1 + W, n] float32: gradient norms, then each rank's losses; into pinned memory
        values = torch.cat([norms, self._gather(losses)]).view(-1, len(window.buckets))
        on_host = values.to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream(values.device).record_event() if values.is_cuda else None

        def read() -> dict[str, Json]:
            if copied is not None:
                copied.synchronize()
            pairs = list(zip(on_host[1:].double().mean(0).tolist(), on_host[0].tolist(), strict=True))
            return self._line(window, [pair for n, pair in enumerate(pairs) if self._is_taken(window, n, *pair)])

        lines = self.flush()
        self._pending = read
        return lines

    def _line(self, window: Window, taken: list[tuple[float, float]]) -> dict[str, Json]:
        """Return a window's line; `taken`: losses and norms of the steps that were not skipped, of which are the means."""
        step_s = [seconds_between(begin, end) for begin, end in window.took]
        seconds, num_devices = max(sum(step_s), 1e-9), self._work.num_devices
        p50, p99 = np.percentile(step_s, (50, 99), method="inverted_cdf").tolist()
        loss, norm = map(statistics.fmean, zip(*taken, strict=True)) if taken else (None, None)
        line: dict[str, Json] = {
            "step": window.first_step + len(window.buckets) - 1,
            "loss": loss,
            "skipped_steps": len(window.buckets) - len(taken),
            "samples": window.samples,
            "samples_per_s": window.samples / seconds,
            "samples_per_s_per_device": window.samples / seconds / num_devices,
            "data_wait_fraction": min(1.0, window.wait_s / seconds),
            "step_s_p50": p50,
            "step_s_p99": p99,
            "lr": window.learning_rate,
            "grad_norm": norm,
            "buckets": dict(sorted(collections.Counter(window.buckets).items())),
        }
        if self._work.flops:
            rate = window.flops / seconds / num_devices
            line["tflops_per_s_per_device"] = rate / 1e12
            if self._work.peak_flops is not None:
                line["mfu"] = rate / self._work.peak_flops
        return line

    def _is_taken(self, window: Window, number: int, loss: float, norm: float) -> bool:
        """Return whether a window's step changed the weights: one with a non-finite gradient was skipped."""
        if math.isfinite(norm) and math.isfinite(loss):
            self.skipped.clear()
            return True
        step, bucket = window.first_step + number, window.buckets[number]
        found = f"the loss is {loss} and the gradient's norm {norm}, expected finite numbers"
        if math.isfinite(norm):
            last = window.first_step + len(window.buckets) - 1
            raise NotFiniteError(
                f"step {step} (in the window of steps {window.first_step} to {last}), bucket {bucket}: {found}; checkpoints "
                "only hold earlier weights"
            )
        self.skipped.append(f"step {step} (bucket {bucket}): {found}")
        log.warning("%s; the step was skipped", self.skipped[-1])
        if len(self.skipped) == SKIPPED_IN_A_ROW:
            raise NotFiniteError(
                f"{self.skipped[0]}; this step and the next ones, {SKIPPED_IN_A_ROW} in a row, were skipped: the weights are "
                "no longer usable; checkpoints only hold earlier weights"
            )
        return False


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


def cut_back(config: TrainConfig, steps_done: int) -> list[int]:
    """Keep only the lines that an uninterrupted run would have by step `steps_done`; return the steps of its validations."""
    path, kept, validated = config.output_dir / METRICS, b"", []
    for line in read_metrics(config.output_dir) if path.exists() else ():
        step = line["step"]
        assert isinstance(step, int)
        is_window = "loss" in line
        is_scheduled = step == 0 or (config.validate_every is not None and step % config.validate_every == 0)
        if step < steps_done or (step == steps_done and is_scheduled and not is_window):
            kept += json.dumps(line).encode() + b"\n"
            validated += [] if is_window else [step]
    write_durably(path, kept)
    return validated


# ---------------------------------------------------------------------------------------------- on stderr, and to trackers


def expect_trackers(names: Sequence[str]) -> None:
    """Check that each tracker is known and installed: Accelerate silently ignores one that is not installed."""
    available = {str(kind) for kind in get_available_trackers()}
    for name in names:
        if name not in available:
            known = ", ".join(sorted(str(kind) for kind in LoggerType if kind is not LoggerType.ALL))
            raise UsageError(f"--track-with is {name}, expected one of {known}, whose package is installed; pip install it")


def against_zero(loss: float, zero_loss: float) -> str:
    """Return a validation loss as a share of the zero baseline: the loss of a model that predicts zero."""
    return f"loss {loss:.4f}, {100 * loss / zero_loss:.1f} % of the zero baseline"


class ProgressLine(logging.Handler):
    """Print the progress of a run and its log messages, each warning once; silent on all ranks but 0."""

    def __init__(self, *, talks: bool) -> None:
        """`talks`: True on rank 0."""
        super().__init__(logging.WARNING)
        self.console = stderr_console(quiet=not talks, highlight=False, soft_wrap=True)
        self._max_steps = 0  # until `begin`
        self._told = set[str]()
        self._began = (0, time.monotonic())
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[news]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=None, news="")

    def __enter__(self) -> ProgressLine:
        """Print the trainer's log messages from now on."""
        logging.getLogger("bucketline.train").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("bucketline.train").removeHandler(self)
        self.close()

    def begin(self, steps_done: int, max_steps: int) -> None:
        self._began, self._max_steps = (steps_done, time.monotonic()), max_steps
        self._bar.reset(self._task, completed=steps_done, total=max_steps)
        self._bar.start()

    def emit(self, record: logging.LogRecord) -> None:
        if (text := f"{record.levelname.lower()}: {record.getMessage()}") not in self._told:
            self._told.add(text)
            self.say(text)

    def say(self, text: str) -> None:
        """Print a line above the bar; on a terminal, one that is too long continues indented."""
        self.console.print(wrapped(text, self.console.width) if self.console.is_terminal else text, markup=False)

    def step(self, steps_done: int) -> None:
        self._bar.update(self._task, completed=steps_done)

    def window(self, line: dict[str, Json]) -> None:
        if "val_loss" in line:
            after = counted(cast("int", line["step"]), "step")
            score = against_zero(cast("float", line["val_loss"]), cast("float", line["val_zero_loss"]))
            self.say(f"validation after {after}: {score}")
            return
        news = "no loss" if line["loss"] is None else f"loss {line['loss']:.4f}"
        since, began_s = self._began
        if (passed_s := time.monotonic() - began_s) >= 1:  # else a rate says nothing
            wait = 100 * cast("float", line["data_wait_fraction"])
            news += f"  {per_second(cast('float', line['samples_per_s']), 'sample')}  data wait {wait:.1f} %"
        if skipped := cast("int", line.get("skipped_steps", 0)):
            news += f"  {counted(skipped, 'step')} skipped: gradients not finite"
        if "mfu" in line and passed_s >= 1:
            news += f"  MFU {100 * cast('float', line['mfu']):.1f} %"
        self._bar.update(self._task, news=news)
        if not self.console.is_terminal:
            done = cast("int", line["step"]) + 1
            # by all steps since the start, including pauses between them
            left_s = round(passed_s / max(1, done - since) * (self._max_steps - done))
            left = f"  {timedelta(seconds=left_s)} left" if passed_s >= 1 and done < self._max_steps else ""
            self.say(f"step {done} of {self._max_steps}  {news}{left}")

    def close(self) -> None:
        self._bar.stop()
        super().close()


class RunLog:
    """Records a run's lines, on rank 0."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator, progress: ProgressLine) -> None:
        """Open `metrics.jsonl` for appending, and start the trackers with the run's configuration."""
        self._output, self._accelerator, self._progress = config.output_dir, accelerator, progress
        plain = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in config_as_json(config).items()
        }
        accelerator.init_trackers(self._output.name, config=plain)
        self._file = (self._output / METRICS).open("ab")
        self._graphs_before = graphs_compiled()
        self._status_written = time.monotonic()

    def write(self, line: dict[str, Json], steps_done: int) -> None:
        """Append a line, so that readers see it at once, and tell all who follow the run."""
        if is_window := "loss" in line:
            device, rss_kib = self._accelerator.device, getrusage(RUSAGE_SELF).ru_maxrss
            peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else rss_kib << 10
            line["peak_memory_mib"] = peak >> 20
            line["recompiles"] = graphs_compiled() - self._graphs_before
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        values = dict(_numbers(line))
        self._accelerator.log(values, step=int(values.pop("step")) + is_window)  # a window's step is its last, from 0
        self._progress.window(line)
        if time.monotonic() - self._status_written > STATUS_EVERY_S:
            write_status(self._output, RunStatus.RUNNING, steps_done)
            self._status_written = time.monotonic()

    def close(self) -> None:
        """End the trackers; close the file and ignore errors: each line was flushed, or its error was raised."""
        for tracker in self._accelerator.trackers:
            tracker.finish()
        with contextlib.suppress(OSError):
            self._file.close()


def _numbers(line: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield prefix + name, value
