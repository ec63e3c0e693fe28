"""PNG files of small images, by the standard library: commands that make pages need no imaging library."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_TRUECOLOUR, _UP = 2, 2  # colour type, and the filter that stores each line's difference from the line above


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Return an RGB image, `[H, W, 3]`, as a PNG."""
    height, width = pixels.shape[:2]
    above = np.concatenate([np.zeros_like(pixels[:1]), pixels[:-1]])
    lines = np.empty((height, 1 + 3 * width), dtype=np.uint8)
    lines[:, 0] = _UP
    lines[:, 1:] = (pixels - above).reshape(height, 3 * width)  # modulo 256, as the filter is defined
    header = struct.pack(">IIBBBBB", width, height, 8, _TRUECOLOUR, 0, 0, 0)
    body = zlib.compress(lines.tobytes(), 9)
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def data_url(image: bytes) -> str:
    """Return a PNG, JPEG or WebP file as a `data:` URL."""
    kind = "png" if image.startswith(_SIGNATURE) else "webp" if image[8:12] == b"WEBP" else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(image).decode('ascii')}"


def reduced(pixels: NDArray[np.uint8], longest: int) -> NDArray[np.uint8]:
    """Return an image averaged down by a whole factor until its longer side has at most `longest` pixels."""
    factor = -(-max(pixels.shape[:2]) // longest)
    if factor <= 1:
        return pixels
    down, across = (min(factor, side) for side in pixels.shape[:2])
    height, width = pixels.shape[0] // down, pixels.shape[1] // across
    means = pixels[: height * down, : width * across].reshape(height, down, width, across, 3).mean(axis=(1, 3))
    small: NDArray[np.uint8] = np.rint(means).astype(np.uint8)
    return small
