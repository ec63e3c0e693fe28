"""The progress line on stderr: a bar in a terminal, a plain line per window elsewhere."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from bucketline.store.typed_json import Json


class ProgressLine(logging.Handler):
    """Tells one person at one terminal how the run goes, log messages included; on other ranks than 0 it says nothing."""

    def __init__(self, *, max_steps: int, talks: bool) -> None:
        """`talks`: whether this is rank 0."""
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

    def begin(self, steps_done: int) -> None:
        """Show the bar, and count time from here."""
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
        """Move the bar."""
        self._bar.update(self._task, completed=steps_done)

    def window(self, line: dict[str, Json]) -> None:
        """Show a window's figures, or a validation's."""
        if "val_loss" in line:
            loss, zero_loss = line["val_loss"], line["val_zero_loss"]
            self.say(f"validation after {line['step']} steps: loss {loss:.4f}, predicting zero scores {zero_loss:.4f}")
            return
        rate, wait = line["samples_per_s"], line["data_wait_fraction"]
        news = f"loss {line['loss']:.4f}  {rate:.1f} samples/s  data wait {wait:.1%}"
        if "mfu" in line:
            news += f"  MFU {line['mfu']:.1%}"
        self._bar.update(self._task, news=news)
        if not self.console.is_terminal:
            step = line["step"]
            assert isinstance(step, int)
            left = self._left_s(step + 1)
            self.say(f"step {step + 1} of {self._max_steps}  {news}  {timedelta(seconds=left)} left")

    def _left_s(self, steps_done: int) -> int:
        """Foretell from all steps since the beginning, with what came between them."""
        since, at = self._began
        return round((time.monotonic() - at) / max(1, steps_done - since) * (self._max_steps - steps_done))

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._bar.stop()
        super().close()
