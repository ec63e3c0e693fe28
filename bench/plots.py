"""The plots of a run: one bar per subject with quartiles; colours distinguish Bucketline, the limits and the peers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from bucketline.bench.peers.registry import ENTRIES, OURS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

OURS_COLOR, LIMIT_COLOR, PEER_COLOR = "tab:blue", "0.6", "tab:orange"


class Plot(NamedTuple):
    """The title and the label of one case's plot."""

    title: str
    label: str
    is_logarithmic: bool = False


PLOTS = {  # by name of the file
    "peers-hot": ("peers, hot, delivered", Plot("Delivery, page cache hot: more is better", "GB/s")),
    "peers-hot-cpu": ("peers, hot, CPU", Plot("What it costs, page cache hot: less is better", "CPU-seconds per GB", True)),
    "peers-cold": ("peers, cold, delivered", Plot("Delivery from the disk: more is better", "GB/s")),
    "peers-cold-cpu": ("peers, cold, CPU", Plot("What it costs, from the disk: less is better", "CPU-seconds per GB", True)),
}


def draw(results: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw every plot whose case is among the results, as PNG and SVG; return the files."""
    written = []
    for name, (case, plot) in PLOTS.items():
        rows = [one for one in results if one["case"] == case]
        if rows:
            written += _save(_bars(plot, rows), folder, name)
    return written


def _bars(plot: Plot, rows: Sequence[Mapping[str, Any]]) -> Figure:
    figure = Figure(figsize=(9, 1.2 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    medians = [one["median"] for one in rows]
    spreads = [[one["median"] - one["q1"] for one in rows], [one["q3"] - one["median"] for one in rows]]
    axes.barh(places, medians, xerr=spreads, color=[_color(one["subject"]) for one in rows], ecolor="0.2", capsize=2)
    axes.set_yticks(places, [one["subject"] for one in rows])
    axes.invert_yaxis()
    axes.set_title(plot.title)
    axes.set_xlabel(plot.label)
    if plot.is_logarithmic:
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    axes.grid(visible=True, axis="x", alpha=0.3)
    for place, median in zip(places, medians, strict=True):
        axes.annotate(f" {median:,.0f}" if median >= 100 else f" {median:.3g}", (median, place), va="bottom", fontsize=7)
    axes.margins(x=0.1, y=0.02)
    return figure


def _color(subject: str) -> str:
    if subject.startswith(OURS):
        return OURS_COLOR
    return PEER_COLOR if subject.startswith(tuple(entry.name for entry in ENTRIES if entry.environment)) else LIMIT_COLOR


def _save(figure: Figure, folder: Path, name: str) -> list[Path]:
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    FigureCanvasAgg(figure).print_png(png, metadata={"Software": None})
    with mpl.rc_context({"svg.hashsalt": name}):  # equal results produce equal files
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None})
    return [png, svg]
