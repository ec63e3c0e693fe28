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
        self._open = copy.deepcopy(begun)
        self._on_device: list[tuple[Tensor, Tensor]] = []  # losses and gradient norms of the open window's latest steps
        self._took: list[tuple[Mark, Mark]] = []  # likewise
        self._pending: Callable[[], WindowState] | None = None  # reads what the last complete window's steps have measured
        self.skipped: list[str] = []  # the last steps read back, if they were skipped, possibly because of bad weights

    def add(self, step: int, outcome: StepOutcome, *, took: tuple[Mark, Mark], wait_s: float) -> dict[str, Json] | None:
        """Add a step with its begin and end marks; if it completes a window, return the previous window's line.

        Raises:
            NotFiniteError: if a loss is not finite, or too many gradients in a row are not.
        """
        window = self._open = self._open or WindowState(first_step=step)
        self._on_device.append((outcome.loss, outcome.grad_norm))
        self._took.append(took)
        window.buckets.append(outcome.bucket)
        window.wait_s += wait_s
        window.learning_rate = outcome.learning_rate
        if (step + 1) % self._log_every:
            return None
        sent = self._sent(window)
        line = self.flush()
        self._open, self._pending = None, sent
        return line

    def flush(self) -> dict[str, Json] | None:
        """Return the line of the last complete window now, if it has not been returned yet; errors as of `add`."""
        read, self._pending = self._pending, None
        return None if read is None else _line(read(), self._scale)

    def partial(self) -> dict[str, Json] | None:
        """Return the line of the incomplete window, or None if it is empty; for the end of a run."""
        state = self.state()
        return None if state is None else _line(state, self._scale)

    def state(self) -> WindowState | None:
        """Return the incomplete window, or None if it is empty; errors as of `add`: no checkpoint may hold such a step."""
        return None if self._open is None else copy.deepcopy(self._sent(self._open)())

    def _sent(self, window: WindowState) -> Callable[[], WindowState]:
        """Start copying the window's values from the device to the host; return what waits for them and adds them to it.

        A step with a non-finite gradient was skipped, and gets None for both values.
        """
        if not self._on_device:
            return lambda: window
        on_device, took, self._on_device, self._took = self._on_device, self._took, [], []
        losses, norms = map(torch.stack, zip(*on_device, strict=True))
        # [1 + W, n] float32: gradient norms, then each rank's losses; into pinned memory
        values = torch.cat([norms, self._gather(losses)]).view(-1, len(on_device))
        on_host = values.to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream(values.device).record_event() if values.is_cuda else None

        def read() -> WindowState:
            if copied is not None:
                copied.synchronize()
            norms, losses = on_host[0], on_host[1:]
            for norm, loss, each in zip(norms.tolist(), losses.double().mean(0).tolist(), losses.T.tolist(), strict=True):
                bad = [rank for rank, own in enumerate(each) if not math.isfinite(own)]
                is_taken = self._is_taken(window, loss, norm, bad or range(len(each)))
                window.losses.append(loss if is_taken else None)
                window.grad_norms.append(norm if is_taken else None)
            window.step_s += [seconds_between(begin, end) for begin, end in took]
            return window

        return read

    def _is_taken(self, state: WindowState, loss: float, norm: float, ranks: Sequence[int]) -> bool:
        """Return whether a window's next step changed the weights: a step with a non-finite gradient was skipped.

        `ranks`: those whose own loss is not finite, or all of them.
        """
        if math.isfinite(norm) and math.isfinite(loss):
            self.skipped.clear()
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
        self.skipped.append(f"step {step} (bucket {bucket}): {found}")
        log.warning("%s, expected finite numbers; the step was skipped", self.skipped[-1])
        if len(self.skipped) == SKIPPED_IN_A_ROW:
            raise NotFiniteError(
                f"{self.skipped[0]}, expected finite numbers; this step and the next ones, {SKIPPED_IN_A_ROW} in a row, were "
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
