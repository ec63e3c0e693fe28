"""Grids: the bucket sizes that images are sorted into."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_SIDE_PX = 1 << 14
MAX_BUCKETS = 1024


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """Height and width in pixels, height first."""

    height_px: int
    width_px: int

    def __str__(self) -> str:
        return f"{self.height_px}x{self.width_px}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A list of bucket sizes, and the words that it was asked for with."""

    name: str
    sizes: tuple[Size, ...]


def parse_grid(text: str, *, step_px: int, align_px: int) -> Grid:
    """Make a grid out of `square:N`, `area:N[:STEP]` or an explicit list `HxW,HxW,…`.

    `step_px` is the step of an `area` grid that names none; every side must be a multiple of `align_px`, what a latent
    pixel covers.

    Raises:
        UsageError: naming what was found and what is expected.
    """
    if match := re.fullmatch(r"square:(\d+)", text):
        sizes: Iterable[Size] = [Size(int(match[1]), int(match[1]))]
        name = text
    elif match := re.fullmatch(r"area:(\d+)(?::(\d+))?", text):
        step = int(match[2]) if match[2] else step_px
        sizes = _area_sizes(int(match[1]), step)
        name = f"area:{match[1]}:{step}"
    elif re.fullmatch(r"\d+x\d+(,\d+x\d+)*", text):
        sizes = [Size(*map(int, size.split("x"))) for size in text.split(",")]
        name = text
    else:
        raise UsageError(f"--grid {text!r} is not a grid; expected square:N, area:N[:STEP] or a list such as 256x192,192x256")
    ordered = tuple(sorted(set(sizes)))
    for size in ordered:
        if min(size.height_px, size.width_px) < align_px or size.height_px % align_px or size.width_px % align_px:
            raise UsageError(f"--grid {text!r} has the size {size}; both sides must be multiples of {align_px} px for this VAE")
        if max(size.height_px, size.width_px) > MAX_SIDE_PX:
            raise UsageError(f"--grid {text!r} has the size {size}; a side has {MAX_SIDE_PX} px at most")
    if not 1 <= len(ordered) <= MAX_BUCKETS:
        raise UsageError(f"--grid {text!r} gives {len(ordered)} sizes, expected 1 to {MAX_BUCKETS}")
    return Grid(name=name, sizes=ordered)


def _area_sizes(side_px: int, step_px: int) -> list[Size]:
    """Give the sizes of at most `side_px` squared pixels, sides multiples of the step, from 1:2 in the sides to 2:1.

    For each height the widest width that fits, and the same with height and width exchanged.
    """
    if step_px < 1 or side_px < step_px or 2 * side_px > MAX_SIDE_PX:
        raise UsageError(
            f"--grid area:{side_px}:{step_px}: the step must be 1 to {side_px} px, and twice {side_px} at most {MAX_SIDE_PX}"
        )
    sizes = []
    for height in range(step_px, 2 * side_px + 1, step_px):
        width = min(side_px * side_px // height, 2 * side_px) // step_px * step_px
        if 2 * height >= side_px and 2 * width >= side_px:
            sizes += [Size(height, width), Size(width, height)]
    return sizes
