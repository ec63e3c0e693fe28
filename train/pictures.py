"""The two pictures a run leaves: its loss curve, and a grid of generated images under the real ones."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from bucketline.store.typed_json import Json

LOSS_CURVE = "loss.png"
PICTURES = "pictures.png"
CELL_WIDTH = 2.6  # of a picture in the grid, in inches


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSample:
    """One column of the grid."""

    real: NDArray[np.uint8]  # [H, W, 3], decoded from the stored latents
    generated: NDArray[np.uint8]  # [H, W, 3], from noise and the stored embedding of the caption
    caption: str


def draw_loss_curve(lines: Sequence[dict[str, Json]], path: Path) -> None:
    """Draw the training loss by window, the validation loss, and what predicting zero would score."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    # A window's line carries its last step, counted from 0; a validation's the steps done.
    training = [(_number(line, "step") + 1, _number(line, "loss")) for line in lines if "loss" in line]
    validation = [(_number(line, "step"), _number(line, "val_loss")) for line in lines if "val_loss" in line]
    zero = [(_number(line, "step"), _number(line, "val_zero_loss")) for line in lines if "val_zero_loss" in line]
    if training:
        axes.plot(*zip(*training, strict=True), color="tab:blue", linewidth=1, label="training, mean of a window")
    if validation:
        axes.plot(*zip(*validation, strict=True), color="tab:orange", marker="o", label="validation, averaged weights")
        axes.plot(*zip(*zero, strict=True), color="grey", linestyle="--", label="validation, predicting zero")
    axes.set_title("Loss")
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("mean squared error of the prediction")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    if training or validation:
        axes.legend()
    _save(figure, path)


def draw_grid(samples: Sequence[DrawnSample], path: Path, *, title: str) -> None:
    """Draw real pictures above, generated ones below, a column per sample with its caption."""
    tallest = max(drawn.real.shape[0] / drawn.real.shape[1] for drawn in samples)
    figure = Figure(figsize=(max(6.0, CELL_WIDTH * len(samples)), 2 * CELL_WIDTH * tallest + 1.4), layout="constrained")
    axes = figure.subplots(2, len(samples), squeeze=False)
    for column, drawn in enumerate(samples):
        # A dollar sign would start matplotlib's formulas.
        caption = textwrap.shorten(drawn.caption, 90, placeholder=" …").replace("$", r"\$")
        axes[0, column].set_title(textwrap.fill(caption, 26) or "(no caption)", fontsize=8)
        for row, (image, name) in enumerate(
            ((drawn.real, "real, decoded\nfrom the store"), (drawn.generated, "generated from\nits caption"))
        ):
            axes[row, column].imshow(image, interpolation="nearest")
            axes[row, column].set_xticks([])
            axes[row, column].set_yticks([])
            if column == 0:
                axes[row, column].set_ylabel(name, fontsize=9)
    figure.suptitle(title, fontsize=11)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """Write the picture, without a window system and whatever backend the user's configuration names."""
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=130)


def _number(line: dict[str, Json], field: str) -> float:
    value = line[field]
    assert isinstance(value, int | float)
    return value
