"""The rows of the loops, and the record of what a loop did with them. Runs in every peer's environment."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

SHAPES = {"16x16": 30, "12x20": 21, "20x12": 15}  # rows of each shape: height and width of its latents
NUM_ROWS = sum(SHAPES.values())
VALIDATION_ROWS = {"16x16": 10, "12x20": 7, "20x12": 5}
BATCH_SIZE = 8  # of all ranks together
EPOCHS = 3
CHANNELS = 4
END = -1  # instead of a number of batches: after the `for`


class Row(NamedTuple):
    """A row of a data set."""

    number: int
    latent: NDArray[np.float16]  # [4, h, w]


def rows_by_shape(rows: dict[str, int]) -> dict[str, list[Row]]:
    """Return numbered rows by their shape."""
    numbers = itertools.count()
    return {shape: [_row(next(numbers), shape) for _ in range(many)] for shape, many in rows.items()}


def _row(number: int, shape: str) -> Row:
    height, width = map(int, shape.split("x"))
    return Row(number, np.random.default_rng(number).normal(size=(CHANNELS, height, width)).astype(np.float16))


@dataclass(kw_only=True)
class For:
    """A `for` over the training loader, as one rank saw it."""

    batches: list[list[int]] = field(default_factory=list)  # the rows' numbers
    shapes: list[list[int]] = field(default_factory=list)  # of the batches' latents


class KilledError(Exception):
    """The process is meant to end here."""


@dataclass(kw_only=True)
class Run:
    """A loop's instructions, and the record of its run.

    A moment is a pair: a `for` of this process, from 0, and its batches until then, or `END`.
    """

    folder: Path
    rank: int = 0
    ranks: int = 1
    save_at: tuple[int, int] | None = None
    break_at: tuple[int, int] | None = None
    kill_at: tuple[int, int] | None = None
    checkpoint: dict[str, Any] | None = None  # loaded, and then saved
    loops: list[For] = field(default_factory=list)
    validations: list[list[int]] = field(default_factory=list)  # the rows of each `for` over the validation loader

    @property
    def batch_size(self) -> int:
        """The rows of a batch that this rank gets."""
        return BATCH_SIZE // self.ranks

    def training(self, loader: Iterable[Any]) -> Iterable[Any]:
        """Return the loader, over which a `for` begins."""
        self.loops.append(For())
        return loader

    def step(self, numbers: Sequence[int], latents: Any) -> None:  # noqa: ANN401 - an array or a tensor
        """Train on a batch."""
        self.loops[-1].batches.append([int(number) for number in numbers])
        self.loops[-1].shapes.append(list(latents.shape[1:]))
        self._end_if(self.kill_at, self._now())

    def must_save(self) -> bool:
        """Return whether it is time to save, in an epoch."""
        return self.save_at == self._now()

    def must_save_at_end(self) -> bool:
        """Return whether it is time to save, after an epoch."""
        return self.save_at == (len(self.loops) - 1, END)

    def must_break(self) -> bool:
        """Return whether it is time for a `break`."""
        return self.break_at == self._now()

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Keep a checkpoint."""
        self.checkpoint = checkpoint

    def validation(self, loader: Iterable[Any]) -> Iterable[Any]:
        """Return the validation loader, over which a `for` begins."""
        self._end_if(self.kill_at, (len(self.loops) - 1, END))
        self.validations.append([])
        return loader

    def validate(self, numbers: Sequence[int]) -> None:
        """Evaluate a batch."""
        self.validations[-1] += [int(number) for number in numbers]

    def _now(self) -> tuple[int, int]:
        return len(self.loops) - 1, len(self.loops[-1].batches)

    @staticmethod
    def _end_if(kill_at: tuple[int, int] | None, now: tuple[int, int]) -> None:
        if kill_at == now:
            raise KilledError
