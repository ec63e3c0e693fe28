"""`metrics.jsonl`: a line per window of steps, and one per validation.

A window's losses are read from the device when the *next* window ends: in the steady state nothing waits for them.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from bucketline.errors import TrainError
from bucketline.store.durable import write_durably
from bucketline.train.hardware import seconds_between
from bucketline.train.sharding import whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from bucketline.store.typed_json import Json
    from bucketline.train.hardware import Mark
    from bucketline.train.step import StepOutcome

METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowState:
    """A window that is not complete, as a checkpoint keeps it, so that a resume continues it exactly."""

    first_step: int
    losses: tuple[float, ...]  # per step, the mean over ranks
    grad_norms: tuple[float, ...]
    buckets: tuple[str, ...]  # per step
    step_s: tuple[float, ...]
    wait_s: float
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What a window's steps are counted as."""

    num_devices: int
    samples: Mapping[str, int]  # of one step of a bucket, over all devices
    flops: Mapping[str, float]  # of one step of a bucket, over all devices, forward and backward; {}: not counted
    peak_flops: float | None  # of one device; None: not known


@dataclass(slots=True, kw_only=True)
class _Window:
    """The window being filled: steps already read (`losses` and the like), and steps still on the device."""

    first_step: int
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    buckets: list[str] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    wait_s: float = 0.0
    learning_rate: float = 0.0
    on_device: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    took: list[tuple[Mark, Mark]] = field(default_factory=list)
    in_flight: Tensor | None = None  # [1 + W, n] float32 on the host: gradient norms, then each rank's losses
    copied: torch.cuda.Event | None = None

    @property
    def num_steps(self) -> int:
        return len(self.buckets)


class WindowRecorder:
    """Collects steps into windows; a complete window's line comes out when the next one ends."""

    def __init__(self, *, log_every: int, scale: Scale, gather: Callable[[Tensor], Tensor]) -> None:
        """`gather`: concatenates the ranks' [n] tensors into [W · n], in order of rank."""
        self._log_every = log_every
        self._scale = scale
        self._gather = gather
        self._open: _Window | None = None
        self._pending: _Window | None = None

    def restore(self, state: WindowState) -> None:
        """Go on filling the window that a checkpoint kept."""
        self._open = _Window(
            first_step=state.first_step,
            losses=list(state.losses),
            grad_norms=list(state.grad_norms),
            buckets=list(state.buckets),
            step_s=list(state.step_s),
            wait_s=state.wait_s,
            learning_rate=state.learning_rate,
        )

    def add(self, step: int, outcome: StepOutcome, *, took: tuple[Mark, Mark], wait_s: float) -> dict[str, Json] | None:
        """Take in a step, with the moments at which it began and ended; where it ends a window, give the line before.

        Raises:
            TrainError: where that window's losses are not finite.
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
        """Give the line of the last complete window now, if it has not been given.

        Raises:
            TrainError: where its losses are not finite.
        """
        window, self._pending = self._pending, None
        if window is None:
            return None
        self._receive(window)
        return _line(window, self._scale)

    def partial(self) -> dict[str, Json] | None:
        """Give a line for the window that is not complete, if it has a step; for the end of a run."""
        state = self.state()
        return None if state is None or self._open is None else _line(self._open, self._scale)

    def state(self) -> WindowState | None:
        """Give the window that is not complete, if it has a step.

        Raises:
            TrainError: where its losses are not finite: they must not get into a checkpoint.
        """
        window = self._open
        if window is None:
            return None
        self._send(window)
        self._receive(window)
        return WindowState(
            first_step=window.first_step,
            losses=tuple(window.losses),
            grad_norms=tuple(window.grad_norms),
            buckets=tuple(window.buckets),
            step_s=tuple(window.step_s),
            wait_s=window.wait_s,
            learning_rate=window.learning_rate,
        )

    def _send(self, window: _Window) -> None:
        """Start the copy of what the window has on the device to the host."""
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
        """Take in what `_send` sent."""
        if window.in_flight is None:
            return
        if window.copied is not None:
            window.copied.synchronize()
        norms, losses = window.in_flight[0], window.in_flight[1:]
        window.grad_norms += norms.tolist()
        window.losses += losses.double().mean(0).tolist()
        window.step_s += [seconds_between(begin, end) for begin, end in window.took]
        window.in_flight, window.took = None, []
        _expect_finite(window)


def _expect_finite(window: _Window) -> None:
    for offset, (loss, norm) in enumerate(zip(window.losses, window.grad_norms, strict=True)):
        if not (math.isfinite(loss) and math.isfinite(norm)):
            last = window.first_step + window.num_steps - 1
            raise TrainError(
                f"step {window.first_step + offset} (in the window of steps {window.first_step} to {last}), bucket "
                f"{window.buckets[offset]}: the loss is {loss} and the gradient's norm {norm}, expected finite numbers; "
                "checkpoints hold only what came before: go on from the last one (--resume) or start anew, "
                "with a lower --learning-rate"
            )


def _line(window: _Window, scale: Scale) -> dict[str, Json]:
    seconds = max(sum(window.step_s), 1e-9)
    samples = sum(scale.samples[bucket] for bucket in window.buckets)
    line: dict[str, Json] = {
        "step": window.first_step + window.num_steps - 1,
        "loss": statistics.fmean(window.losses),
        "samples": samples,
        "samples_per_s": samples / seconds,
        "samples_per_s_per_device": samples / seconds / scale.num_devices,
        "data_wait_fraction": min(1.0, window.wait_s / seconds),
        "step_s_p50": percentile(window.step_s, 50),
        "step_s_p99": percentile(window.step_s, 99),
        "lr": window.learning_rate,
        "grad_norm": statistics.fmean(window.grad_norms),
        "buckets": dict(sorted(collections.Counter(window.buckets).items())),
    }
    if scale.flops:
        rate = sum(scale.flops[bucket] for bucket in window.buckets) / seconds / scale.num_devices
        line["tflops_per_s_per_device"] = rate / 1e12
        if scale.peak_flops is not None:
            line["mfu"] = rate / scale.peak_flops
    return line


def percentile(values: list[float], percent: float) -> float:
    """Give the value that `percent` of the values do not exceed: one of them.

    >>> percentile([3.0, 1.0, 2.0, 4.0], 50), percentile([3.0, 1.0, 2.0, 4.0], 99)
    (2.0, 4.0)
    """
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


class MetricsFile:
    """The file itself; lines are appended whole."""

    def __init__(self, output_dir: Path) -> None:
        """Open for appending."""
        self.path = output_dir / METRICS
        self._file = self.path.open("ab")

    def write(self, line: dict[str, Json]) -> None:
        """Append a line, visible to readers at once."""
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def sync(self) -> None:
        """Make the lines durable; before a checkpoint that counts on them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; each line has been flushed, or its failure has been raised."""
        with contextlib.suppress(OSError):
            self._file.close()


def read_metrics(output_dir: Path) -> list[dict[str, Json]]:
    """Read the lines; a last one that was cut off is left out."""
    lines = []
    for text in (output_dir / METRICS).read_bytes().split(b"\n")[:-1]:
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def cut_back(output_dir: Path, *, steps_done: int, open_window: int | None, validate_every: int | None) -> None:
    """Leave the lines that an uninterrupted run would have written by the time it had done `steps_done` steps.

    What goes: windows that end later, the line of a window that was cut short (`open_window` is its first step, and it
    goes on), later validations, and one made only because the run ended here.
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
