"""The loss curve of a run as an image file."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any, TypeGuard

from bucketline.files.atomic_write import write_durably

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

CURVES: dict[str, dict[str, Any]] = {
    "loss": {"color": "tab:blue", "linewidth": 1, "label": "training loss, mean per window"},
    "val_loss": {"color": "tab:orange", "marker": "o", "label": "validation: squared error, averaged weights"},
    "val_zero_loss": {"color": "grey", "linestyle": "--", "label": "validation: squared error of predicting zero"},
}


def draw_loss_curve(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the training loss per window, the validation loss, and the loss of predicting zero, as a PNG.

    It is drawn by Agg, whatever the window system and the user's configuration are.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, style in CURVES.items():
        if points := points_of(lines, name):
            axes.plot(*zip(*points, strict=True), **({"marker": "o"} if len(points) == 1 else {}) | style)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("loss")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    if axes.lines:
        axes.legend()
    png = io.BytesIO()
    figure.savefig(png, dpi=130, format="png", bbox_inches="tight")
    write_durably(path, png.getvalue())


def points_of(lines: Iterable[Mapping[str, Any]], field: str) -> list[tuple[float, float]]:
    """Return a value by the steps done, of the lines of metrics that have it as a finite number."""
    # A window's line has its last step, counted from 0; a validation's has the steps done.
    found = ((line["step"] + (0 if "val_loss" in line else 1), line.get(field)) for line in lines)
    return [(step, value) for step, value in found if is_number(value)]


def is_number(value: object) -> TypeGuard[float]:
    """Return True if a value of JSON is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)
