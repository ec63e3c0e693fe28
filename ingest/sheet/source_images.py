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

from bucketline.ingest.sheet.crops import with_box
from bucketline.ingest.sources.open_source import open_source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bucketline.typed_json import Json

THUMBNAIL_PX = 160  # the longer side
JPEG_QUALITY = 82
MAX_PIXELS = 200_000_000  # of an image that is decoded only to be shown


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
            jpeg = thumbnail(source.read(item).data, boxes[item.id])
        except Exception:  # noqa: BLE001 - any file of a stranger; the reject's own reason is next to it
            found[item.id] = {"jpeg": "", "problem": "cannot be decoded"}
            continue
        found[item.id] = {"jpeg": base64.b64encode(jpeg).decode("ascii"), "problem": None}
    return found


def thumbnail(data: bytes, box: Sequence[int] | None, longest: int = THUMBNAIL_PX) -> bytes:
    """Return an image file's content as an upright JPEG of at most `longest` px; `box`: the crop, or None if there is none."""
    with Image.open(io.BytesIO(data)) as opened:
        if opened.width * opened.height > MAX_PIXELS:
            raise ValueError(f"{opened.width}x{opened.height} px are too many")
        opened.draft("RGB", (2 * longest, 2 * longest))
        image = ImageOps.exif_transpose(opened)
        upright = image.size  # width, height; a JPEG may be decoded at a fraction of it
        image = image.convert("RGBA") if "transparency" in image.info else image
        image.thumbnail((longest, longest))
        if image.mode in ("RGBA", "LA", "PA"):
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        pixels = np.asarray(image.convert("RGB"))
    if box is not None:
        pixels = with_box(pixels, box, (upright[1], upright[0]))
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()


def main() -> int:
    """Answer the request on stdin."""
    job: dict[str, Any] = json.load(sys.stdin)
    print(json.dumps(source_images(job["source"], job["boxes"])))
    return 0


if __name__ == "__main__":
    from bucketline.command_line import guarded

    sys.exit(guarded(main, "ingest"))
