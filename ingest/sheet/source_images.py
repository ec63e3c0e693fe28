"""Thumbnails of images of a source for `store report`, with their crops drawn in, also of images that were rejected."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any, BinaryIO

from bucketline.ingest.images.bucket_grid import Grid, Size
from bucketline.ingest.images.crop import Framing
from bucketline.ingest.images.decode import placed_by_header
from bucketline.ingest.sheet.crops import whole_image, with_box
from bucketline.ingest.sources.open_source import open_source
from bucketline.pages.image_files import jpeg

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


THUMBNAIL_PX = 160  # the longer side
_ANY_SIZE = Framing(grid=Grid(name="1x1", sizes=(Size(1, 1),)))


def source_images(job: Mapping[str, Any], _: BinaryIO | None = None) -> dict[str, tuple[str, str]]:
    """Return of each id a JPEG in base64, or "" and the problem.

    `job`: the source, and of each id the crop in its image (top, left, height, width), or None.
    """
    source, boxes = open_source(job["source"]), job["boxes"]
    items = [item for item in source.listing().items if item.id in boxes]
    found = dict.fromkeys(boxes, ("", "no longer in the source"))
    for item in source.in_turn(items):
        try:
            shown = _thumbnail(source.read(item).data, boxes[item.id])
        except Exception:  # noqa: BLE001 - any file of a stranger; the reject's own reason is next to it
            found[item.id] = ("", "cannot be decoded")
            continue
        found[item.id] = (base64.b64encode(shown).decode("ascii"), "")
    return found


def _thumbnail(data: bytes, box: Sequence[int] | None, longest: int = THUMBNAIL_PX) -> bytes:
    """Return an image file's content as an upright JPEG of at most `longest` px; `box`: the crop, or None if there is none.

    The image is decoded as for packing, so that it looks as it was packed, and a file that cannot be packed is not shown as one
    that can.
    """
    upright = placed_by_header(io.BytesIO(data), _ANY_SIZE, "").source
    pixels = whole_image(data, upright, longest)
    return jpeg(pixels if box is None else with_box(pixels, box, upright))
