"""Thumbnails of images of a source, with their crops drawn in, also of images that were rejected.

`python -m bucketline.ingest.sheet.source_images` makes them for `store report`: one JSON object on stdin, one on stdout.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

from bucketline.ingest.images.bucket_grid import Grid, Size
from bucketline.ingest.images.crop import Framing
from bucketline.ingest.images.decode import FORMATS, placed_by_header
from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.ingest.sheet.crops import whole_image, with_box
from bucketline.ingest.sources.open_source import open_source
from bucketline.pages.image_files import jpeg

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from bucketline.typed_json import Json

THUMBNAIL_PX = 160  # the longer side
_MAX_PIXELS = 200_000_000  # of an image that is decoded only to be shown
_ANY_SIZE = Framing(grid=Grid(name="1x1", sizes=(Size(1, 1),)))
_STILL_SHOWN = frozenset({Reason.ANIMATED, Reason.MODE})


def source_images(source_name: str, boxes: Mapping[str, Sequence[int] | None]) -> dict[str, Json]:
    """Return of each id a JPEG in base64, or the problem.

    Raises:
        SourceError: if the source cannot be listed or read.
        UsageError: if it is not a source.
    """
    source = open_source(source_name)
    items = [item for item in source.listing().items if item.id in boxes]
    found: dict[str, Json] = {name: {"jpeg": "", "problem": "no longer in the source"} for name in boxes}
    for item in source.in_turn(items):
        try:
            shown = _thumbnail(source.read(item).data, boxes[item.id])
        except Exception:  # noqa: BLE001 - any file of a stranger; the reject's own reason is next to it
            found[item.id] = {"jpeg": "", "problem": "cannot be decoded"}
            continue
        found[item.id] = {"jpeg": base64.b64encode(shown).decode("ascii"), "problem": None}
    return found


def _thumbnail(data: bytes, box: Sequence[int] | None, longest: int = THUMBNAIL_PX) -> bytes:
    """Return an image file's content as an upright JPEG of at most `longest` px; `box`: the crop, or None if there is none.

    The image is decoded as for packing, so that it looks as it was packed, and a file that cannot be packed is not shown as one
    that can. What packing rejects for another reason than damage (animated, 32-bit values) is shown as Pillow reads it.

    Raises:
        RejectedError: if the file is damaged or not an image.
    """
    try:
        upright = placed_by_header(io.BytesIO(data), _ANY_SIZE, "").source
        pixels = whole_image(data, upright, longest)
    except RejectedError as error:
        if error.reason not in _STILL_SHOWN:
            raise
        upright, pixels = _by_pillow(data, longest)
    return jpeg(pixels if box is None else with_box(pixels, box, upright))


def _by_pillow(data: bytes, longest: int) -> tuple[tuple[int, int], NDArray[np.uint8]]:
    """Return height, width and a reduced copy of the first image in a file."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
        if opened.width * opened.height > _MAX_PIXELS:
            raise ValueError(f"{opened.width}x{opened.height} px are too many")
        image = ImageOps.exif_transpose(opened)
        width, height = image.size
        image = image.convert("RGBA") if "transparency" in image.info else image
        image.thumbnail((longest, longest))
        if image.mode in ("RGBA", "LA", "PA"):
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        return (height, width), np.asarray(image.convert("RGB"))


def main() -> int:
    """Answer the request on stdin."""
    job: dict[str, Any] = json.load(sys.stdin)
    print(json.dumps(source_images(job["source"], job["boxes"])))
    return 0


if __name__ == "__main__":
    from bucketline.command_line import guarded

    sys.exit(guarded(main, "ingest"))
