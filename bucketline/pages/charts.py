"""Charts as plain HTML and SVG, whose colours follow the page's style."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.pages.page import escaped

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 34
COLOURS = 6  # of lines; a seventh line has the first colour again
_MAX_POINTS = 600  # of a line; more are thinned


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar: its label, its length, and what is written after it."""

    label: str
    value: float
    note: str
    warns: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int
    is_dashed: bool = False


def bars(rows: Sequence[Bar], *, most: float | None = None) -> str:
    """Return horizontal bars; `most`: the value of a full bar, by default the largest."""
    full = most or max((row.value for row in rows), default=0.0) or 1.0
    lines = (
        f"<span>{escaped(row.label)}</span><div>"
        f'<i{" class=warn" if row.warns else ""} style="width:{100 * row.value / full:.1f}%"></i></div>'
        f"<em>{escaped(row.note)}</em>"
        for row in rows
    )
    return f'<div class="bars">{"".join(lines)}</div>'


def histogram(edges: Sequence[float], counts: Sequence[int], label: str) -> str:
    """Return columns for counts between edges, one more than counts."""
    most = max(counts, default=0) or 1
    step = (WIDTH - LEFT - RIGHT) / max(1, len(counts))
    parts = [_frame(label), *_y_ticks(_VerticalAxis(lowest=0, highest=most))]
    place = _VerticalAxis(lowest=0, highest=most)
    for n, count in enumerate(counts):
        top = place(count)
        height = HEIGHT - BOTTOM - top
        if count:
            parts.append(
                f'<rect class="fill" x="{LEFT + n * step + 1:.1f}" y="{top:.1f}" width="{step - 2:.1f}" height="{height:.1f}"/>'
            )
    every = max(1, len(edges) // 8)
    parts += [_text(LEFT + n * step, HEIGHT - BOTTOM + 15, f"{edges[n]:g}", "middle") for n in range(0, len(edges), every)]
    return _svg(parts, label)


def scatter(points: Sequence[tuple[float, float]], boxes: Sequence[tuple[float, float, str]], labels: tuple[str, str]) -> str:
    """Return points (x, y) and named boxes (x, y, name) on logarithmic axes."""
    xs = [x for x, _ in points] + [box[0] for box in boxes]
    ys = [y for _, y in points] + [box[1] for box in boxes]
    x_range, y_range = _log_range(xs), _log_range(ys)
    height = 420

    def across(x: float) -> float:
        return LEFT + (math.log2(x) - x_range[0]) / (x_range[1] - x_range[0]) * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return height - BOTTOM - (math.log2(y) - y_range[0]) / (y_range[1] - y_range[0]) * (height - TOP - BOTTOM)

    parts = [_frame(labels[0], height)]
    for power in range(math.ceil(x_range[0]), math.floor(x_range[1]) + 1):
        x = across(2**power)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{height - BOTTOM}"/>')
        parts.append(_text(x, height - BOTTOM + 15, _power(power), "middle"))
    for power in range(math.ceil(y_range[0]), math.floor(y_range[1]) + 1):
        y = down(2**power)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 6, y + 4, _power(power), "end"))
    parts += [f'<circle class="dot" cx="{across(x):.1f}" cy="{down(y):.1f}" r="3"/>' for x, y in points]
    for x, y, name in boxes:
        left, top = across(x), down(y)
        parts.append(f'<rect class="box" x="{left - 5:.1f}" y="{top - 5:.1f}" width="10" height="10"/>')
        parts.append(f'<text class="box-name" x="{left + 8:.1f}" y="{top + 4:.1f}">{escaped(name)}</text>')
    parts.append(_text(LEFT + 4, TOP + 12, labels[1], "start"))
    return _svg(parts, f"{labels[1]} by {labels[0]}", height)


def lines(series: Sequence[Line], label: str, x_label: str = "step", *, from_zero: bool = True) -> str:
    """Return a line chart with a legend; lines without a point are left out."""
    drawn = [line for line in series if len(line.xs)]
    if not drawn:
        return '<p class="dim">not recorded</p>'
    lowest = 0.0 if from_zero else min(min(line.ys) for line in drawn)
    highest = max(max(line.ys) for line in drawn)
    first, last = min(min(line.xs) for line in drawn), max(max(line.xs) for line in drawn)
    place = _VerticalAxis(lowest=lowest, highest=highest if highest > lowest else lowest + 1.0)
    span = (last - first) or 1.0
    parts = [_frame(x_label), *_y_ticks(place)]
    is_whole = all(x == int(x) for line in drawn for x in line.xs)
    for value in _nice(first, first + span, is_whole=is_whole):
        x = LEFT + (value - first) / span * (WIDTH - LEFT - RIGHT)
        parts.append(_text(x, HEIGHT - BOTTOM + 15, _number(value), "middle" if x < WIDTH - RIGHT - 20 else "end"))
    for line in drawn:
        every = -(-len(line.xs) // _MAX_POINTS)
        pairs = list(zip(line.xs, line.ys, strict=True))
        pairs = [*pairs[::every], *([pairs[-1]] if (len(pairs) - 1) % every else [])]
        dots = " ".join(f"{LEFT + (x - first) / span * (WIDTH - LEFT - RIGHT):.1f},{place(y):.1f}" for x, y in pairs)
        dashes = ' stroke-dasharray="5 4"' if line.is_dashed else ""
        kind = f'class="line c{line.colour % COLOURS}"{dashes}'
        if len(pairs) == 1:
            left, _, top = dots.partition(",")
            parts.append(f'<circle {kind} cx="{left}" cy="{top}" r="3"/>')
        else:
            parts.append(f'<polyline {kind} points="{dots}"/>')
    legend = "".join(f'<span><b class="c{line.colour % COLOURS}"></b>{escaped(line.name)}</span>' for line in drawn)
    return f'<div class="legend">{legend}</div>{_svg(parts, label)}'


@dataclass(frozen=True, slots=True, kw_only=True)
class _VerticalAxis:
    """A linear vertical axis."""

    lowest: float
    highest: float

    def __call__(self, value: float) -> float:
        share = (value - self.lowest) / (self.highest - self.lowest)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _y_ticks(place: _VerticalAxis) -> list[str]:
    found = []
    for value in _nice(place.lowest, place.highest):
        y = place(value)
        found.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        found.append(_text(LEFT - 6, y + 4, _number(value), "end"))
    return found


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


def _log_range(values: Sequence[float]) -> tuple[float, float]:
    low, high = math.log2(min(values, default=1)), math.log2(max(values, default=2))
    room = max(0.12, 0.06 * (high - low))
    return low - room, high + room


def _power(power: int) -> str:
    return f"{2**power:g}" if power >= 0 else f"1/{2**-power}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _frame(label: str, height: int = HEIGHT) -> str:
    axis = f'<path class="axis" d="M{LEFT} {TOP}V{height - BOTTOM}H{WIDTH - RIGHT}"/>'
    return axis + _text(WIDTH - RIGHT, height - 4, label, "end")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped(text)}</text>'


def _svg(parts: Sequence[str], label: str, height: int = HEIGHT) -> str:
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escaped(label)}">{"".join(parts)}</svg>'
