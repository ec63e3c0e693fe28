"""Write images whose CICP says PQ (HDR) or Display P3, as PNG and AVIF, and the right one in sRGB.

python hdr_images.py OUT
"""

from __future__ import annotations

import io
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Floats = NDArray[np.float64]
Pixels = NDArray[np.uint8] | NDArray[np.uint16]

NITS = np.array([0.5, 5, 20, 50, 100, 150, 203, 203.0])  # of eight patches; SDR's white is 203
PQ, P3 = (9, 16, 0, 1), (12, 13, 0, 1)  # primaries, transfer, matrix, range
XYZ_OF_P3 = np.array([[0.4865709, 0.2656677, 0.1982173], [0.2289746, 0.6917385, 0.0792869], [0, 0.0451134, 1.0439444]])
XYZ_OF_SRGB = np.array(
    [[0.4123908, 0.3575843, 0.1804808], [0.2126390, 0.7151687, 0.0721923], [0.0193308, 0.1191948, 0.9505322]]
)
GREEN = np.array([60, 200, 60]) / 255


def pq(nits: Floats) -> Floats:
    m1, m2 = 2610 / 16384, 2523 / 4096 * 128
    c1, c2, c3 = 3424 / 4096, 2413 / 4096 * 32, 2392 / 4096 * 32
    share = np.maximum(nits, 0) / 10000
    return np.asarray(((c1 + c2 * share**m1) / (1 + c3 * share**m1)) ** m2)


def srgb(linear: Floats) -> Floats:
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def patches(values: Floats, bits: int) -> Pixels:
    grey = np.repeat(np.repeat(values.reshape(2, 4), 64, 0), 32, 1)
    return np.stack([np.round(grey * (2**bits - 1)).astype(np.uint16 if bits > 8 else np.uint8)] * 3, -1)


def png(pixels: Pixels, cicp: tuple[int, ...]) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.astype(row.dtype.newbyteorder(">")).tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8 * pixels.itemsize, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"cICP", bytes(cicp)), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, data) for kind, data in chunks)


def avif(pixels: Pixels, cicp: tuple[int, ...]) -> bytes:
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "AVIF", quality=100, subsampling="4:4:4")
    found = bytearray(data.getvalue())
    at = found.index(b"colrnclx") + 8
    found[at : at + 4] = struct.pack(">HH", *cicp[:2])
    return bytes(found)


def p3_green() -> Pixels:
    """Return an image of one colour that sRGB has, in Display P3's code values."""
    linear = np.where(GREEN <= 0.04045, GREEN / 12.92, ((GREEN + 0.055) / 1.055) ** 2.4)
    code = srgb(np.clip(np.linalg.inv(XYZ_OF_P3) @ XYZ_OF_SRGB @ linear, 0, 1))
    return np.tile(np.round(code * 255).astype(np.uint8), (128, 128, 1))


def write(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    Image.fromarray(patches(srgb(NITS / 203), 8)).save(out / "sdr.png")
    (out / "hdr_pq.png").write_bytes(png(patches(pq(NITS), 16), PQ))
    (out / "hdr_pq.avif").write_bytes(avif(patches(pq(NITS), 8), PQ))
    (out / "p3_nclx.avif").write_bytes(avif(p3_green(), P3))
    (out / "p3_cicp.png").write_bytes(png(p3_green(), P3))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
