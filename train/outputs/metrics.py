"""Write `metrics.jsonl`: a line per window of steps, and one per validation.

A window's losses are read from the device when the *next* window ends, so that in the steady state nothing waits for them.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import json
import math
import os
import statistics
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType

from bucketline.errors import TrainError, UsageError
from bucketline.files.atomic_write import write_durably
from bucketline.files.run_marker import METRICS
from bucketline.train.compile import seconds_between
from bucketline.train.parallel import whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from accelerate import Accelerator
    from torch import Tensor

    from bucketline.train.compile import Mark
    from bucketline.train.step import StepOutcome
    from bucketline.typed_json import Json

SKIPPED_IN_A_ROW = 5
"""Consecutive non-finite steps that end a run: a single one may come from a bad sample, several mean bad weights."""


class NotFiniteError(TrainError):
    """A loss, gradient or weight is NaN or infinite; a lower learning rate may help."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Samples and FLOPs per step, to compute a window's throughput."""

    num_devices: int
    samples: Mapping[str, int]  # per step of each bucket, over all devices
    flops: Mapping[str, float]  # per step of each bucket, over all devices, forward and backward; {}: not counted
    peak_flops: float | None  # of one device; None: unknown


@dataclass(slots=True, kw_only=True)
class _Window(WindowState):
    """A window in progress, with the steps whose values are still on the device."""

    on_device: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    took: list[tuple[Mark, Mark]] = field(default_factory=list)
    in_flight: Tensor | None = None  # [1 + W, n] float32 on the host: gradient norms, then each rank's losses
    copied: torch.cuda.Event | None = None

    @property
    def last_step(self) -> int:
        return self.first_step + len(self.buckets) - 1


def _copied(state: WindowState) -> dict[str, Any]:
    """Return copies of a state's fields, without those that a window in progress adds."""
    return {one.name: copy.copy(getattr(state, one.name)) for one in fields(WindowState)}


class WindowRecorder:
    """Collect steps into windows; a window's line is returned when the next window ends."""

    def __init__(self, *, log_every: int, scale: Scale, gather: Callable[[Tensor], Tensor]) -> None:
        """`gather` concatenates the ranks' [n] tensors into [W · n], in rank order."""
        self._log_every = log_every
        self.scale = scale
        self._gather = gather
        self._open: _Window | None = None
        self._pending: _Window | None = None
        self._skipped: list[str] = []  # the latest steps, if they were skipped

    @property
    def skips_now(self) -> bool:
        """True if the last step read back was skipped, possibly because of bad weights."""
        return bool(self._skipped)

    def restore(self, state: WindowState) -> None:
        """Continue the window stored in a checkpoint."""
        self._open = _Window(**_copied(state))

    def add(self, step: int, outcome: StepOutcome, *, took: tuple[Mark, Mark], wait_s: float) -> dict[str, Json] | None:
        """Add a step with its begin and end marks; if it completes a window, return the previous window's line.

        Raises:
            NotFiniteError: if a loss is not finite, or too many gradients in a row are not.
        """
        window = self._open = self._open or _Window(first_step=step)
        window.on_device.append((outcome.loss, whole(outcome.grad_norm)))
        window.took.append(took)
        window.buckets.append(outcome.bucket)
        window.wait_s += wait_s
        window.learning_rate = outcome.learning_rate
        if (step + 1) % self._log_every:
            return None
        self._send(window)
        line = self.flush()
        self._open, self._pending = None, window
        return line

    def flush(self) -> dict[str, Json] | None:
        """Return the line of the last complete window now, if it has not been returned yet.

        Raises:
            NotFiniteError: if a loss is not finite, or too many gradients in a row are not.
        """
        window, self._pending = self._pending, None
        if window is None:
            return None
        self._receive(window)
        return _line(window, self.scale)

    def partial(self) -> dict[str, Json] | None:
        """Return the line of the incomplete window, or None if it is empty; for the end of a run."""
        state = self.state()
        return None if state is None or self._open is None else _line(self._open, self.scale)

    def state(self) -> WindowState | None:
        """Return the incomplete window, or None if it is empty.

        Raises:
            NotFiniteError: if a loss is not finite, or too many gradients in a row are not: no checkpoint may hold them.
        """
        window = self._open
        if window is None:
            return None
        self._send(window)
        self._receive(window)
        return WindowState(**_copied(window))

    def _send(self, window: _Window) -> None:
        """Start copying the window's values from the device to the host."""
        if not window.on_device:
            return
        losses = torch.stack([loss for loss, _ in window.on_device])
        norms = torch.stack([norm for _, norm in window.on_device])
        values = torch.cat([norms, self._gather(losses)]).view(-1, len(window.on_device))
        window.on_device = []
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            window.in_flight = host.copy_(values, non_blocking=True)
            window.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            window.copied.record()
        else:
            window.in_flight = values

    def _receive(self, window: _Window) -> None:
        """Read the values that `_send` copied."""
        if window.in_flight is None:
            return
        if window.copied is not None:
            window.copied.synchronize()
        norms, losses = window.in_flight[0], window.in_flight[1:]
        for norm, loss in zip(norms.tolist(), losses.double().mean(0).tolist(), strict=True):
            self._take_in(window, loss, norm)
        window.step_s += [seconds_between(begin, end) for begin, end in window.took]
        window.in_flight, window.took = None, []

    def _take_in(self, window: _Window, loss: float, norm: float) -> None:
        """Record a step's loss and norm; a step with a non-finite gradient was skipped, and gets None for both."""
        offset = len(window.losses)
        step, bucket = window.first_step + offset, window.buckets[offset]
        if math.isfinite(norm) and math.isfinite(loss):
            self._skipped.clear()
            window.losses.append(loss)
            window.grad_norms.append(norm)
            return
        if math.isfinite(norm):
            raise NotFiniteError(
                f"step {step} (in the window of steps {window.first_step} to {window.last_step}), bucket {bucket}: the loss is "
                f"{loss} and the gradient's norm {norm}, expected finite numbers; checkpoints only hold earlier weights"
            )
        window.losses.append(None)
        window.grad_norms.append(None)
        self._skipped.append(f"step {step} (bucket {bucket}): the loss is {loss} and the gradient's norm {norm}")
        if len(self._skipped) == SKIPPED_IN_A_ROW:
            raise NotFiniteError(
                f"{self._skipped[0]}, expected finite numbers; this step and the next ones, {SKIPPED_IN_A_ROW} in a row, were "
                "skipped: the weights are no longer usable; checkpoints only hold earlier weights"
            )


def _line(window: _Window, scale: Scale) -> dict[str, Json]:
    seconds = max(sum(window.step_s), 1e-9)
    samples = sum(scale.samples[bucket] for bucket in window.buckets)
    line: dict[str, Json] = {
        "step": window.last_step,
        "loss": _mean(window.losses),
        "skipped_steps": window.losses.count(None),
        "samples": samples,
        "samples_per_s": samples / seconds,
        "samples_per_s_per_device": samples / seconds / scale.num_devices,
        "data_wait_fraction": min(1.0, window.wait_s / seconds),
        "step_s_p50": percentile(window.step_s, 50),
        "step_s_p99": percentile(window.step_s, 99),
        "lr": window.learning_rate,
        "grad_norm": _mean(window.grad_norms),
        "buckets": dict(sorted(collections.Counter(window.buckets).items())),
    }
    if scale.flops:
        rate = sum(scale.flops[bucket] for bucket in window.buckets) / seconds / scale.num_devices
        line["tflops_per_s_per_device"] = rate / 1e12
        if scale.peak_flops is not None:
            line["mfu"] = rate / scale.peak_flops
    return line


def _mean(values: list[float | None]) -> float | None:
    """Return the mean over the steps that were not skipped; None if all were skipped."""
    taken = [value for value in values if value is not None]
    return statistics.fmean(taken) if taken else None


def percentile(values: list[float], percent: float) -> float:
    """Return the smallest of the values that at least `percent` of them do not exceed (nearest rank).

    >>> percentile([3.0, 1.0, 2.0, 4.0], 50), percentile([3.0, 1.0, 2.0, 4.0], 99)
    (2.0, 4.0)
    """
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


class MetricsFile:
    """The metrics file; append complete lines."""

    def __init__(self, output_dir: Path) -> None:
        """Open for appending."""
        self.path = output_dir / METRICS
        self._file = self.path.open("ab")

    def write(self, line: dict[str, Json]) -> None:
        """Append a line and flush it, so that readers see it at once."""
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def sync(self) -> None:
        """Fsync the lines; called before a checkpoint that relies on them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file and ignore errors: each line was flushed, or its error was raised."""
        with contextlib.suppress(OSError):
            self._file.close()


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


def cut_back(output_dir: Path, *, steps_done: int, open_window: int | None, validate_every: int | None) -> None:
    """Keep only the lines that an uninterrupted run would have written by step `steps_done`.

    Remove windows that end later, the line of a partial window that continues (`open_window` is its first step), later
    validations, and a validation made only because the run ended here.
    """

    def stays(line: dict[str, Json]) -> bool:
        step = line["step"]
        assert isinstance(step, int)
        if "loss" in line:
            return step < (steps_done if open_window is None else open_window)
        scheduled = step == 0 or (validate_every is not None and step % validate_every == 0)
        return step < steps_done or (step == steps_done and scheduled)

    path = output_dir / METRICS
    lines = [line for line in read_metrics(output_dir) if stays(line)] if path.exists() else []
    write_durably(path, b"".join(json.dumps(line).encode() + b"\n" for line in lines))


FOLDER = "tracked"  # in the run's folder, for trackers that write files


def expect_trackers(names: Sequence[str]) -> None:
    """Check that each tracker is known and installed: Accelerate silently ignores the others.

    Raises:
        UsageError: if a tracker is unknown or not installed; the message names it.
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
    """Start the trackers on the main process with the run's configuration."""
    plain = {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in config.items()}
    accelerator.init_trackers(name, config=plain)


def track(accelerator: Accelerator, line: Mapping[str, Json]) -> None:
    """Log the numbers of a metrics line to the trackers, at the number of steps done."""
    values = dict(_numbers(line))
    done = int(values.pop("step")) + (0 if "val_loss" in line else 1)
    accelerator.log(values, step=done)


def _numbers(line: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield prefix + name, value
