"""The files of a drawing: a PNG of each image in its own size, a contact sheet of all, and what they are of as JSON."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image

from bucketline.files.atomic_write import write_durably

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from bucketline.typed_json import Json

PER_ROW = 4  # images of a sheet; more if there are more rows than that
CELL_PX, GAP_PX = 384, 8  # of a sheet: the longest side of an image, and what is between two


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSample:
    """A generated image, and the real one of the same caption."""

    entry: Mapping[str, Json]  # of images.json: id, caption, and of a prompt what else it says
    real: NDArray[np.uint8] | None  # [H, W, 3], decoded from the stored latents; of a prompt None
    generated: NDArray[np.uint8]  # [H, W, 3], from noise and the stored embedding


def write_images(drawn: Sequence[DrawnSample], sheet: Path, folder: Path) -> None:
    """Write a contact sheet, JSON next to it, and in a folder each generated image: 01.png and so on, in the same order."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, one in enumerate(drawn, 1):
        write_durably(folder / f"{number:02d}.png", _png(Image.fromarray(one.generated)))
    write_durably(sheet, _png(contact_sheet(drawn)))
    entries = [one.entry for one in drawn]
    sheet.with_suffix(".json").write_text(json.dumps(entries, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def contact_sheet(drawn: Sequence[DrawnSample]) -> Image.Image:
    """Return the images in rows from left to right, each generated one below its real one; large ones are made smaller."""
    cells = [[Image.fromarray(image) for image in (one.real, one.generated) if image is not None] for one in drawn]
    for image in (every := [image for cell in cells for image in cell]):
        image.thumbnail((CELL_PX, CELL_PX))
    columns = min(len(cells), max(PER_ROW, math.isqrt(len(cells))))
    width, height = (GAP_PX + max(sides) for sides in zip(*(image.size for image in every), strict=True))
    num_rows = -(-len(cells) // columns) * len(cells[0])
    sheet = Image.new("RGB", (columns * width + GAP_PX, num_rows * height + GAP_PX), "white")
    for number, cell in enumerate(cells):
        row, column = divmod(number, columns)
        for below, image in enumerate(cell):
            sheet.paste(image, (column * width + GAP_PX, (row * len(cell) + below) * height + GAP_PX))
    return sheet


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
