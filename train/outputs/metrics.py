"""Write `metrics.jsonl`: a line per window of steps, and one per validation.

A window's losses are read from the device when the *next* window ends, so that in the steady state nothing waits for them.
"""

from __future__ import annotations

import collections
import copy
import logging
import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from bucketline.errors import TrainError
from bucketline.train.compile import seconds_between
from bucketline.train.metrics_file import WindowState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from bucketline.train.compile import Mark
    from bucketline.train.step import StepOutcome
    from bucketline.typed_json import Json

log = logging.getLogger(__name__)

SKIPPED_IN_A_ROW = 5
"""Consecutive non-finite steps that end a run: a single one may come from a bad sample, several mean bad weights."""


class NotFiniteError(TrainError):
    """A loss, gradient or weight is NaN or infinite; a lower learning rate may help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Samples and FLOPs per step, to compute a window's throughput; buckets are added as a run takes them up."""

    num_devices: int
    peak_flops: float | None  # of one device; None: unknown
    samples: dict[str, int] = field(default_factory=dict)  # per step of each bucket, over all devices
    flops: dict[str, float] = field(default_factory=dict)  # likewise, forward and backward; {}: not counted
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the batches that the run is compiled for, by bucket


@dataclass(slots=True, kw_only=True)
class _Window:
    """A window in progress, with the steps whose values are still on the device."""

    state: WindowState
    on_device: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    took: list[tuple[Mark, Mark]] = field(default_factory=list)
    in_flight: Tensor | None = None  # [1 + W, n] float32 on the host: gradient norms, then each rank's losses
    copied: torch.cuda.Event | None = None


class WindowRecorder:
    """Collect steps into windows; a window's line is returned when the next window ends."""

    def __init__(
        self,
        *,
        log_every: int,
        scale: Scale,
        gather: Callable[[Tensor], Tensor],
        begun: WindowState | None = None,
        samples_of: Callable[[int, Sequence[int]], str] | None = None,
    ) -> None:
        """`gather` concatenates the ranks' [n] tensors into [W · n], in rank order; `begun`: a checkpoint's window.

        `samples_of` names the samples that some ranks read at a step, for a message; None on ranks that print none.
        """
        self._log_every = log_every
        self._samples_of = samples_of
        self._scale = scale
        self._gather = gather
        self._open = _Window(state=copy.deepcopy(begun)) if begun else None
        self._pending: _Window | None = None
        self._skipped: list[str] = []  # the latest steps, if they were skipped

    @property
    def skips_now(self) -> bool:
        """True if the last step read back was skipped, possibly because of bad weights."""
        return bool(self._skipped)

    def add(self, step: int, outcome: StepOutcome, *, took: tuple[Mark, Mark], wait_s: float) -> dict[str, Json] | None:
        """Add a step with its begin and end marks; if it completes a window, return the previous window's line.

        Raises:
            NotFiniteError: if a loss is not finite, or too many gradients in a row are not.
        """
        window = self._open = self._open or _Window(state=WindowState(first_step=step))
        window.on_device.append((outcome.loss, outcome.grad_norm))
        window.took.append(took)
        window.state.buckets.append(outcome.bucket)
        window.state.wait_s += wait_s
        window.state.learning_rate = outcome.learning_rate
        if (step + 1) % self._log_every:
            return None
        self._send(window)
        line = self.flush()
        self._open, self._pending = None, window
        return line

    def flush(self) -> dict[str, Json] | None:
        """Return the line of the last complete window now, if it has not been returned yet; errors as of `add`."""
        window, self._pending = self._pending, None
        if window is None:
            return None
        self._receive(window)
        return _line(window.state, self._scale)

    def partial(self) -> dict[str, Json] | None:
        """Return the line of the incomplete window, or None if it is empty; for the end of a run."""
        state = self.state()
        return None if state is None else _line(state, self._scale)

    def state(self) -> WindowState | None:
        """Return the incomplete window, or None if it is empty; errors as of `add`: no checkpoint may hold such a step."""
        if self._open is None:
            return None
        self._send(self._open)
        self._receive(self._open)
        return copy.deepcopy(self._open.state)

    def _send(self, window: _Window) -> None:
        """Start copying the window's values from the device to the host."""
        if not window.on_device:
            return
        losses = torch.stack([loss for loss, _ in window.on_device])
        norms = torch.stack([norm for _, norm in window.on_device])
        values = torch.cat([norms, self._gather(losses)]).view(-1, len(window.on_device))
        window.on_device = []
        window.in_flight = values.to("cpu", non_blocking=True)  # into pinned memory
        if values.is_cuda:
            window.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            window.copied.record()

    def _receive(self, window: _Window) -> None:
        """Read the values that `_send` copied; a step with a non-finite gradient was skipped, and gets None for both."""
        if window.in_flight is None:
            return
        if window.copied is not None:
            window.copied.synchronize()
        norms, losses = window.in_flight[0], window.in_flight[1:]
        for norm, loss, each in zip(norms.tolist(), losses.double().mean(0).tolist(), losses.T.tolist(), strict=True):
            bad = [rank for rank, own in enumerate(each) if not math.isfinite(own)]
            is_taken = self._is_taken(window.state, loss, norm, bad or range(len(each)))
            window.state.losses.append(loss if is_taken else None)
            window.state.grad_norms.append(norm if is_taken else None)
        window.state.step_s += [seconds_between(begin, end) for begin, end in window.took]
        window.in_flight, window.took = None, []

    def _is_taken(self, state: WindowState, loss: float, norm: float, ranks: Sequence[int]) -> bool:
        """Return whether a window's next step changed the weights: a step with a non-finite gradient was skipped.

        `ranks`: those whose own loss is not finite, or all of them.
        """
        if math.isfinite(norm) and math.isfinite(loss):
            self._skipped.clear()
            return True
        step, bucket = state.first_step + len(state.losses), state.buckets[len(state.losses)]
        found = f"the loss is {loss} and the gradient's norm {norm}"
        if self._samples_of is not None:
            found += f", of {self._samples_of(step, ranks)}"
        if math.isfinite(norm):
            raise NotFiniteError(
                f"step {step} (in the window of steps {state.first_step} to {state.last_step}), bucket {bucket}: {found}, "
                "expected finite numbers; checkpoints only hold earlier weights"
            )
        self._skipped.append(f"step {step} (bucket {bucket}): {found}")
        log.warning("%s, expected finite numbers; the step was skipped", self._skipped[-1])
        if len(self._skipped) == SKIPPED_IN_A_ROW:
            raise NotFiniteError(
                f"{self._skipped[0]}, expected finite numbers; this step and the next ones, {SKIPPED_IN_A_ROW} in a row, were "
                "skipped: the weights are no longer usable; checkpoints only hold earlier weights"
            )
        return False


def _line(window: WindowState, scale: Scale) -> dict[str, Json]:
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
