"""The cursor: the next micro-batch of an iteration, and where the iteration ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A position among the plan's micro-batches."""

    step: int  # optimizer step of the next micro-batch, from 0
    micro_step: int  # its index within the step, 0 to accumulation - 1
    num_steps: int | None  # the iteration ends before this step; None: endless

    def micro_steps(self, accumulation: int) -> Iterator[tuple[int, int]]:
        """Yield the micro-batches from here to the end: (step, micro step).

        >>> list(Cursor(step=3, micro_step=1, num_steps=5).micro_steps(2))
        [(3, 1), (4, 0), (4, 1)]
        """
        step, micro_step = self.step, self.micro_step
        while self.num_steps is None or step < self.num_steps:
            yield step, micro_step
            micro_step += 1
            if micro_step == accumulation:
                step, micro_step = step + 1, 0

    def at(self, step: int, micro_step: int = 0) -> Cursor:
        """Return a cursor at this micro-batch, with the same end."""
        return Cursor(step=step, micro_step=micro_step, num_steps=self.num_steps)

    def after(self, step: int, micro_step: int, accumulation: int) -> Cursor:
        """Return a cursor at the micro-batch that follows this one, with the same end.

        >>> Cursor(step=0, micro_step=0, num_steps=None).after(3, 1, 2)
        Cursor(step=4, micro_step=0, num_steps=None)
        """
        is_last = micro_step + 1 == accumulation
        return Cursor(step=step + is_last, micro_step=0 if is_last else micro_step + 1, num_steps=self.num_steps)
