"""Convert colours of 16 bits per channel to 8 bits by rounding: v becomes round(v * 255 / 65535).

Pillow keeps the high byte of each value, which is up to one level too dark. It can be made to read the low byte instead,
so such an image is read twice and the value computed from both bytes. Pillow reads 16-bit grey in full; see `srgb`.

Some images remain at the high byte, because Pillow has no other way to read them: TIFFs with premultiplied alpha or
planar channels, and JPEG 2000.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from numpy.typing import NDArray

STRIP_PX = 1 << 20  # processed together, to bound the extra memory of a large image
HALF = 129  # v / 257 is high + (low - high) / 257, which rounds to another level if |low - high| is 129 or more
_OTHER_END = {"L": "B", "B": "L", "N": "B" if sys.byteorder == "little" else "L"}
_LAYOUTS = ("RGB", "RGBA", "RGBX", "CMYK")
LOW_BYTES = {f"{layout};16{end}": f"{layout};16{other}" for layout in _LAYOUTS for end, other in _OTHER_END.items()}
"""Pillow's name for a 16-bit byte layout → the layout that makes it read the low bytes."""
LOW_BYTES["LA;16B"] = "RGBA"  # all four bytes of a pixel: high and low of the grey, high and low of the opacity


def deep_layout(image: Image.Image) -> str | None:
    """Return the byte layout of an opened, not yet loaded image if it has 16 bits per channel; else None."""
    found = {_layout(tile) for tile in getattr(image, "tile", ())}
    layout = found.pop() if len(found) == 1 else None
    return layout if layout in LOW_BYTES else None


def round_to_eight_bits(image: Image.Image, layout: str, file: BinaryIO, formats: tuple[str, ...]) -> None:
    """Replace the values of a loaded image by correctly rounded ones, read from `file`.

    A colour key for transparency (a PNG's tRNS) is compared in 16 bits and becomes the image's alpha channel.
    """
    file.seek(0)
    low = Image.open(file, formats=formats)
    low.tile = [_with_layout(tile, LOW_BYTES[layout]) for tile in low.tile]
    low.load()
    transparent = image.info.pop("transparency", None) if image.mode == "RGB" else None
    alpha = None if transparent is None else Image.new("L", image.size)
    for box in strips(image):
        high_bytes, low_bytes = (np.asarray(part.crop(box)).astype(np.int16) for part in (image, low))
        if layout == "LA;16B":
            high_bytes, low_bytes = low_bytes[..., [0, 0, 0, 2]], low_bytes[..., [1, 1, 1, 3]]
        if alpha is not None:
            is_clear = (256 * high_bytes.astype(np.int32) + low_bytes == np.array(transparent)).all(axis=-1)
            alpha.paste(Image.fromarray(np.where(is_clear, 0, 255).astype(np.uint8)), box)
        rounded = _rounded(high_bytes, low_bytes)
        image.paste(Image.frombytes(image.mode, rounded.shape[1::-1], rounded.tobytes()), box)
    if alpha is not None:
        image.putalpha(alpha)


def strips(image: Image.Image) -> Iterator[tuple[int, int, int, int]]:
    """Yield boxes (left, top, right, bottom) of full rows that cover an image from top to bottom."""
    rows = max(1, STRIP_PX // image.width)
    for top in range(0, image.height, rows):
        yield 0, top, image.width, min(top + rows, image.height)


def _rounded(high: NDArray[np.int16], low: NDArray[np.int16]) -> NDArray[np.uint8]:
    difference = low - high
    return (high + (difference >= HALF) - (difference <= -HALF)).astype(np.uint8)


def _layout(tile: Any) -> str:  # noqa: ANN401 - Pillow's
    return str(tile.args if isinstance(tile.args, str) else tile.args[0] if tile.args else "")


def _with_layout(tile: Any, layout: str) -> Any:  # noqa: ANN401 - Pillow's
    return tile._replace(args=layout if isinstance(tile.args, str) else (layout, *tile.args[1:]))
