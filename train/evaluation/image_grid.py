"""The two image files of a run: the loss curve, and a grid of generated images, of prompts or below the real ones."""

from __future__ import annotations

import io
import json
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from bucketline.files.atomic_write import write_durably
from bucketline.train.evaluation.fonts import fonts_for, warn_of_no_font

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from bucketline.typed_json import Json

CELL_WIDTH = 2.6  # inches per image in the grid
PER_ROW = 4  # prompts
DPI, MAX_PX = 130, 60_000  # of a file; Agg and JPEG take fewer than 65,536 px a side
COLUMNS, LINES = 26, 4  # of a caption above an image; a Chinese character takes two columns
NEGATIVE_LINES = 2  # of a negative prompt below an image


CURVES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("loss", {"color": "tab:blue", "linewidth": 1, "label": "training, mean per window"}),
    ("val_loss", {"color": "tab:orange", "marker": "o", "label": "validation, averaged weights"}),
    ("val_zero_loss", {"color": "grey", "linestyle": "--", "label": "validation, predicting zero"}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSample:
    """A generated image of the grid, and the real one above it."""

    entry: Mapping[str, Json]  # of images.json: id, caption, and of a prompt what else it says
    real: NDArray[np.uint8] | None  # [H, W, 3], decoded from the stored latents; of a prompt None
    generated: NDArray[np.uint8]  # [H, W, 3], from noise and the stored embedding


def draw_loss_curve(lines: Sequence[Mapping[str, Json]], path: Path) -> None:
    """Plot the training loss per window, the validation loss, and the loss of predicting zero."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, style in CURVES:
        if points := list(_points(lines, name)):
            axes.plot(*zip(*points, strict=True), **({"marker": "o"} if len(points) == 1 else {}) | style)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Loss")
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("mean squared error of the prediction")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    if axes.lines:
        axes.legend()
    _save(figure, path)


def _points(lines: Sequence[Mapping[str, Json]], name: str) -> Iterator[tuple[int, float]]:
    """Yield the steps done and a value, of the lines that have it."""
    # A window's line has its last step, counted from 0; a validation's has the steps done.
    before = 1 if name == "loss" else 0
    for line in lines:
        step, value = line["step"], line.get(name)
        if isinstance(step, int) and isinstance(value, int | float):
            yield step + before, value


def draw_grid(samples: Sequence[DrawnSample], path: Path, *, title: str) -> None:
    """Draw real images above generated ones, one captioned column per sample; or prompts' images, a few in a row.

    Write the captions to a JSON file next to it.
    """
    has_real = samples[0].real is not None
    rows = [samples] * 2 if has_real else [samples[at : at + PER_ROW] for at in range(0, len(samples), PER_ROW)]
    tallest = [max(drawn.generated.shape[0] / drawn.generated.shape[1] for drawn in row) for row in rows]
    captions = 1.4 if has_real else 0.6 + 0.95 * len(rows)  # inches of text, with the title
    size = (max(6.0, CELL_WIDTH * len(rows[0])), CELL_WIDTH * sum(tallest) + captions)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(rows), len(rows[0]), squeeze=False, height_ratios=tallest)
    families, missing = fonts_for("".join(text for drawn in samples for text in (*_titles(drawn), _negative(drawn))))
    for cell in axes.flat:
        cell.set_xticks([])
        cell.set_yticks([])
    for cell in axes[-1, len(rows[-1]) :]:
        cell.set_axis_off()
    for number, row in enumerate(rows):
        is_real = has_real and number == 0
        for cell, drawn in zip(axes[number], row, strict=False):
            cell.imshow(drawn.real if is_real else drawn.generated, interpolation="nearest")
            if is_real or not has_real:
                text = "\n".join(filter(None, (_writable(drawn, missing), _settings(drawn.entry))))
                cell.set_title(text, fontsize=8, fontfamily=families, parse_math=False)
                negative = _without(missing, _negative(drawn))
                cell.set_xlabel(negative, fontsize=7, color="dimgrey", fontfamily=families, parse_math=False)
    if has_real:
        axes[0, 0].set_ylabel("real, decoded\nfrom the store", fontsize=9)
        axes[1, 0].set_ylabel("generated from\nits caption", fontsize=9)
    figure.suptitle(title, fontsize=11)
    _save(figure, path)
    entries = [drawn.entry for drawn in samples]
    path.with_suffix(".json").write_text(json.dumps(entries, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def write_each(samples: Sequence[DrawnSample], folder: Path) -> None:
    """Write each generated image as a PNG of its own size: 01.png and so on, in the order of the grid and its captions."""
    from PIL import Image  # matplotlib needs it too

    folder.mkdir(parents=True, exist_ok=True)
    for number, drawn in enumerate(samples, 1):
        png = io.BytesIO()
        Image.fromarray(drawn.generated).save(png, "PNG")
        write_durably(folder / f"{number:02d}.png", png.getvalue())


def _titles(drawn: DrawnSample) -> tuple[str, str]:
    """Return the caption for the grid, and what takes its place if no font has its characters."""
    return wrapped(str(drawn.entry["caption"])), wrapped(f"[{drawn.entry['id']}]")


def _negative(drawn: DrawnSample) -> str:
    """Return the beginning of a prompt's negative prompt, for below its image."""
    text = drawn.entry.get("negative_prompt")
    return wrapped(f"not: {text}", NEGATIVE_LINES) if text else ""


def _settings(entry: Mapping[str, Json]) -> str:
    """Return what tells prompts of one text apart.

    >>> _settings({"id": "default/1", "caption": "", "seed": 7, "guidance": 2.0})
    'seed 7, guidance 2.0'
    """
    return ", ".join(f"{name} {entry[name]}" for name in ("seed", "guidance") if entry.get(name) is not None)


def _writable(drawn: DrawnSample, missing: set[str]) -> str:
    """Return the title of a sample: its caption, or its id if the fonts lack more than a quarter of the characters."""
    text, name = _titles(drawn)
    letters = [letter for letter in text if not letter.isspace()]
    num_missing = sum(letter in missing for letter in letters)
    if num_missing:
        warn_of_no_font()
    shown = name if 4 * num_missing > len(letters) else text
    return _without(missing, shown)


def _without(missing: set[str], text: str) -> str:
    return "".join("?" if letter in missing else letter for letter in text)


def wrapped(text: str, most: int = LINES) -> str:
    """Wrap a caption to the width of an image and truncate it after a few lines; drop zero-width characters."""
    shown = "".join(" " if letter.isspace() else letter for letter in text if letter.isspace() or _is_shown(letter))
    wide = Text(" ".join(shown.split())).wrap(Console(), COLUMNS)
    lines = [line.plain.rstrip() for line in wide]
    if len(lines) > most:
        cut = lines[most - 1]
        while cell_len(cut) > COLUMNS - 2:
            cut = cut.rpartition(" ")[0] or cut[:-1]
        lines = [*lines[: most - 1], f"{cut} …"]
    return "\n".join(lines) or "(no caption)"


def _is_shown(letter: str) -> bool:
    """Return whether a character is visible: control characters, joiners and variation selectors are not."""
    return unicodedata.category(letter) not in ("Cc", "Cf", "Cs") and not 0xFE00 <= ord(letter) <= 0xFE0F


def _save(figure: Figure, path: Path) -> None:
    """Save the figure as a PNG, atomically, with the Agg backend, regardless of window system and user configuration."""
    FigureCanvasAgg(figure)
    png = io.BytesIO()
    dpi = min(DPI, MAX_PX / (max(figure.get_size_inches()) + 1.0))  # an inch for text at the edges
    figure.savefig(png, dpi=dpi, format="png", bbox_inches="tight")  # captions are of any height
    write_durably(path, png.getvalue())
