"""The record of a run: a bar or lines on stderr, `metrics.jsonl`, trackers, `status.json` and the loss curve."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from datetime import timedelta
from resource import RUSAGE_SELF, getrusage
from typing import TYPE_CHECKING, cast

import torch
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bucketline.command_line import counted, per_second
from bucketline.errors import UsageError
from bucketline.files.run_marker import LOSS_CURVE, METRICS
from bucketline.progress import stderr_console
from bucketline.train.compile import graphs_compiled
from bucketline.train.metrics_file import read_metrics
from bucketline.train.outputs.run_dir import RunStatus, write_status
from bucketline.train.run_file import config_as_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from accelerate import Accelerator

    from bucketline.train.config import TrainConfig
    from bucketline.typed_json import Json

TRACKED = "tracked"  # folder in the run's, for trackers that write files
STATUS_EVERY_S = 5.0
CURVE_EVERY_S = 10.0  # at least, between two drawings of the loss curve
CURVE_SHARE = 0.005  # at most, of the run's time; a drawing takes about 0.2 s


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


class ProgressLine(logging.Handler):
    """Print the progress of a run and its log messages; silent on all ranks but 0."""

    def __init__(self, *, talks: bool) -> None:
        """`talks`: True on rank 0."""
        super().__init__(logging.WARNING)
        self.console = stderr_console(quiet=not talks, highlight=False, soft_wrap=True)
        self._max_steps = 0  # until `expect`
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

    def expect(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._bar.update(self._task, total=max_steps)

    def begin(self, steps_done: int) -> None:
        """Show the bar and start the timer."""
        self._began = (steps_done, time.monotonic())
        self._bar.reset(self._task, completed=steps_done)
        self._bar.start()

    def emit(self, record: logging.LogRecord) -> None:
        self.say(f"{record.levelname.lower()}: {record.getMessage()}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, markup=False)

    def step(self, steps_done: int) -> None:
        self._bar.update(self._task, completed=steps_done)

    def window(self, line: dict[str, Json]) -> None:
        if "val_loss" in line:
            loss, zero_loss = line["val_loss"], line["val_zero_loss"]
            after = counted(cast("int", line["step"]), "step")
            self.say(f"validation after {after}: loss {loss:.4f}, predicting zero scores {zero_loss:.4f}")
            return
        rate, wait = line["samples_per_s"], line["data_wait_fraction"]
        loss = "no loss" if line["loss"] is None else f"loss {line['loss']:.4f}"
        news = f"{loss}  {per_second(cast('float', rate), 'sample')}  data wait {wait:.1%}"
        if skipped := cast("int", line.get("skipped_steps", 0)):
            news += f"  {counted(skipped, 'step')} skipped: gradients not finite"
        if "mfu" in line:
            news += f"  MFU {line['mfu']:.1%}"
        self._bar.update(self._task, news=news)
        if not self.console.is_terminal:
            done, (since, at) = cast("int", line["step"]) + 1, self._began
            # by all steps since the start, including pauses between them
            left_s = round((time.monotonic() - at) / max(1, done - since) * (self._max_steps - done))
            self.say(f"step {done} of {self._max_steps}  {news}  {timedelta(seconds=left_s)} left")

    def close(self) -> None:
        self._bar.stop()
        super().close()


class RunLog:
    """Records a run's lines, on rank 0."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator, progress: ProgressLine) -> None:
        """Open `metrics.jsonl` for appending, and start the trackers with the run's configuration."""
        from bucketline.train.report.loss_curve import draw_loss_curve

        self._output, self._accelerator, self._progress, self._plot = config.output_dir, accelerator, progress, draw_loss_curve
        plain = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in config_as_json(config).items()
        }
        accelerator.init_trackers(self._output.name, config=plain)
        self._file = (self._output / METRICS).open("ab")
        self._graphs_before = graphs_compiled()
        self._status_written = time.monotonic()
        self._curve_due = time.monotonic() + CURVE_EVERY_S

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
        if time.monotonic() >= self._curve_due:
            self.draw_curve()

    def draw_curve(self) -> None:
        """Redraw the loss curve, and decide when the next time is: the longer it takes, the later."""
        began = time.monotonic()
        self._plot(read_metrics(self._output), self._output / LOSS_CURVE)
        ended = time.monotonic()
        self._curve_due = ended + max(CURVE_EVERY_S, (ended - began) / CURVE_SHARE)

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
