"""Charts: where ticks and marks are, in pixels of an SVG that `parts.chart` draws in the page's colours."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.pages.page import parts

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 34
COLOURS = 6  # of lines; a seventh line has the first colour again
_MAX_POINTS = 600  # of a line; more are thinned


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int
    is_dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """An axis between two values: linear, or by powers of two."""

    label: str = ""
    low: float
    high: float
    is_whole: bool = False  # its ticks
    is_log: bool = False

    def share(self, value: float) -> float:
        """Return where a value is, from 0 to 1."""
        value, low, high = map(math.log2, (value, self.low, self.high)) if self.is_log else (value, self.low, self.high)
        return (value - low) / (high - low)

    def ticks(self) -> list[tuple[float, str]]:
        """Return values with their texts."""
        if not self.is_log:
            return [(value, _number(value)) for value in _nice(self.low, self.high, is_whole=self.is_whole)]
        powers = range(math.ceil(math.log2(self.low)), math.floor(math.log2(self.high)) + 1)
        return [(2.0**power, f"{2**power}" if power >= 0 else f"1/{2**-power}") for power in powers]


def histogram(edges: Sequence[float], counts: Sequence[int], label: str) -> str:
    """Return columns for counts between edges, one more than counts."""
    x, y = _Axis(label=label, low=edges[0], high=edges[-1], is_whole=True), _Axis(low=0, high=max(counts, default=0) or 1)
    spans = zip(edges, edges[1:], counts, strict=False)
    return _chart(x, y, columns=[(left, right, count) for left, right, count in spans if count])


def scatter(points: Sequence[tuple[float, float]], boxes: Sequence[tuple[float, float, str]], labels: tuple[str, str]) -> str:
    """Return points (x, y) and named boxes (x, y, name) on logarithmic axes."""
    both = [*points, *(box[:2] for box in boxes)]
    x, y = (_log_axis(label, [one[n] for one in both]) for n, label in enumerate(labels))
    return _chart(x, y, height=420, dots=points, boxes=boxes)


def lines(series: Sequence[Line], label: str, x_label: str = "step") -> str:
    """Return a line chart with a legend; lines without a point are left out."""
    drawn = [line for line in series if len(line.xs)]
    xs, ys = [x for line in drawn for x in line.xs], [y for line in drawn for y in line.ys]
    if not drawn:
        return parts.dim("not recorded")
    first, last, highest = min(xs), max(xs), max(ys)
    x = _Axis(label=x_label, low=first, high=last if last > first else first + 1.0, is_whole=all(x == int(x) for x in xs))
    return _chart(x, _Axis(low=0.0, high=highest if highest > 0.0 else 1.0), label=label, lines=drawn)


def _chart(
    x: _Axis,
    y: _Axis,
    *,
    label: str = "",
    height: int = HEIGHT,
    columns: Sequence[tuple[float, float, float]] = (),
    dots: Sequence[tuple[float, float]] = (),
    boxes: Sequence[tuple[float, float, str]] = (),
    lines: Sequence[Line] = (),
) -> str:
    bottom = height - BOTTOM

    def at(across: float, up: float) -> tuple[float, float]:
        place = LEFT + x.share(across) * (WIDTH - LEFT - RIGHT), bottom - y.share(up) * (bottom - TOP)
        return round(place[0], 1), round(place[1], 1)

    drawn = [(line, [at(*point) for point in _thinned(line)]) for line in lines]
    return parts.chart(
        label or f"{y.label} by {x.label}".removeprefix(" by "),
        frame={"left": LEFT, "right": WIDTH - RIGHT, "top": TOP, "bottom": bottom, "width": WIDTH, "height": height},
        x_axis=x,
        y_axis=y,
        x_ticks=[(at(value, y.high)[0], text) for value, text in x.ticks()],
        y_ticks=[(at(x.low, value)[1], text) for value, text in y.ticks()],
        columns=[(at(left, up), at(right, y.low)) for left, right, up in columns],
        dots=[at(*dot) for dot in dots],
        boxes=[(*at(across, up), name) for across, up, name in boxes],
        lines=[(line, line.colour % COLOURS, " ".join(f"{a},{b}" for a, b in points), points) for line, points in drawn],
    )


def _thinned(line: Line) -> list[tuple[float, float]]:
    every = -(-len(line.xs) // _MAX_POINTS)
    points = list(zip(line.xs, line.ys, strict=True))
    return [*points[::every], *([points[-1]] if (len(points) - 1) % every else [])]


def _log_axis(label: str, values: Sequence[float]) -> _Axis:
    low, high = min(values, default=1.0), max(values, default=2.0)
    room = 2 ** max(0.12, 0.06 * math.log2(high / low))
    return _Axis(label=label, low=low / room, high=high * room, is_log=True)


def _nice(lowest: float, highest: float, *, is_whole: bool = False) -> list[float]:
    """Return round values between two others, about five; whole ones if `is_whole`.

    >>> _nice(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> _nice(20.0, 22.0, is_whole=True)
    [20.0, 21.0, 22.0]
    """
    if is_whole and highest - lowest < 14:  # else a distance could be 2.5 or less than 1
        every = 1 if highest - lowest < 7 else 2
        return [float(n) for n in range(math.ceil(lowest), math.floor(highest) + 1, every)]
    raw = (highest - lowest) / 5
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * n for n in (1, 2, 2.5, 5, 10) if size * n >= raw * 0.999)
    first = math.ceil(lowest / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(highest / step + 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
