"""The loss curve of a run as an image file."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bucketline.files.atomic_write import write_durably
from bucketline.train.report.read_run import series_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

CURVES: dict[str, dict[str, Any]] = {
    "loss": {"color": "tab:blue", "linewidth": 1, "label": "training, mean per window"},
    "val_loss": {"color": "tab:orange", "marker": "o", "label": "validation, averaged weights"},
    "val_zero_loss": {"color": "grey", "linestyle": "--", "label": "validation, predicting zero"},
}


def draw_loss_curve(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the training loss per window, the validation loss, and the loss of predicting zero, as a PNG.

    It is drawn by Agg, whatever the window system and the user's configuration are.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, style in CURVES.items():
        if steps := (found := series_of(lines, name)).steps:
            axes.plot(steps, found.values, **({"marker": "o"} if len(steps) == 1 else {}) | style)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Loss")
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("mean squared error of the prediction")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    if axes.lines:
        axes.legend()
    png = io.BytesIO()
    figure.savefig(png, dpi=130, format="png", bbox_inches="tight")
    write_durably(path, png.getvalue())
