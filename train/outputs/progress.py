"""Progress on stderr: a bar in a terminal, otherwise a plain line per window."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bucketline.command_line import counted, per_second

if TYPE_CHECKING:
    from bucketline.typed_json import Json


class ProgressLine(logging.Handler):
    """Print the progress of a run and its log messages; silent on all ranks but 0."""

    def __init__(self, *, max_steps: int, talks: bool) -> None:
        """`talks`: True on rank 0."""
        super().__init__(logging.WARNING)
        self.console = Console(stderr=True, quiet=not talks, highlight=False, soft_wrap=True)
        self._max_steps = max_steps
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
        self._task = self._bar.add_task("train", total=max_steps, news="")

    def __enter__(self) -> ProgressLine:
        """Print the trainer's log messages from now on."""
        logging.getLogger("bucketline.train").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the terminal."""
        logging.getLogger("bucketline.train").removeHandler(self)
        self.close()

    def begin(self, steps_done: int) -> None:
        """Show the bar and start the timer."""
        self._began = (steps_done, time.monotonic())
        self._bar.reset(self._task, completed=steps_done)
        self._bar.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a log message."""
        self.say(f"{record.levelname.lower()}: {record.getMessage()}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, markup=False)

    def step(self, steps_done: int) -> None:
        """Advance the bar."""
        self._bar.update(self._task, completed=steps_done)

    def window(self, line: dict[str, Json]) -> None:
        """Show the metrics of a window or a validation."""
        if "val_loss" in line:
            loss, zero_loss = line["val_loss"], line["val_zero_loss"]
            after = counted(cast("int", line["step"]), "step")
            self.say(f"validation after {after}: loss {loss:.4f}, predicting zero scores {zero_loss:.4f}")
            return
        rate, wait = line["samples_per_s"], line["data_wait_fraction"]
        loss = "no loss" if line["loss"] is None else f"loss {line['loss']:.4f}"
        news = f"{loss}  {per_second(cast('float', rate), 'sample')}  data wait {wait:.1%}"
        skipped = line.get("skipped_steps")
        if isinstance(skipped, int) and skipped:
            news += f"  {counted(skipped, 'step')} skipped: gradients not finite"
        if "mfu" in line:
            news += f"  MFU {line['mfu']:.1%}"
        self._bar.update(self._task, news=news)
        if not self.console.is_terminal:
            step = line["step"]
            assert isinstance(step, int)
            left = self._left_s(step + 1)
            self.say(f"step {step + 1} of {self._max_steps}  {news}  {timedelta(seconds=left)} left")

    def _left_s(self, steps_done: int) -> int:
        """Estimate the remaining time from all steps since the start, including pauses between them."""
        since, at = self._began
        return round((time.monotonic() - at) / max(1, steps_done - since) * (self._max_steps - steps_done))

    def close(self) -> None:
        """Restore the terminal."""
        self._bar.stop()
        super().close()
