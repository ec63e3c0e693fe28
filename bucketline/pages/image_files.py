"""The image files of pages, by Pillow: a page encodes the images that it shows, and never decodes a file of somebody else."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

from bucketline.extras import extra_named

with extra_named("report"):
    from PIL import Image

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_JPEG = {"quality": 82, "subsampling": 0}  # sharp colours: captions are drawn into some images, and crops by a thin line


def png(pixels: NDArray[np.uint8], longest: int | None = None) -> bytes:
    """Return an RGB image, `[H, W, 3]`, as a PNG, averaged by a whole factor to at most `longest` pixels on its longer side."""
    image = Image.fromarray(pixels)
    return _encoded(image if longest is None else image.reduce(-(-max(image.size) // longest)), "PNG", optimize=True)


def jpeg(pixels: NDArray[np.uint8] | Image.Image, longest: int | None = None) -> bytes:
    """Return an RGB image, `[H, W, 3]` or Pillow's, as a JPEG whose longer side has at most `longest` pixels."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    if longest is not None and max(image.size) > longest:
        image = image.copy()
        image.thumbnail((longest, longest))
    return _encoded(image, "JPEG", **_JPEG)


def _encoded(image: Image.Image, kind: str, **options: int) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(image: bytes) -> str:
    """Return a PNG or JPEG file as a `data:` URL."""
    kind = "png" if image.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(image).decode('ascii')}"
