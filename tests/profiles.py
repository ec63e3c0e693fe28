"""Colour profiles (ICC, version 2) made by hand, and files that Pillow cannot write, for the tests of decoding."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

D50 = (0.9642, 1.0, 0.8249)
# Colourants of Adobe RGB (1998), Display P3, BT.2020, sRGB as published profiles give them: XYZ relative to D50, a column each.
ADOBE_RGB = np.array([[0.60974, 0.20528, 0.14919], [0.31111, 0.62567, 0.06322], [0.01947, 0.06087, 0.74457]])
DISPLAY_P3 = np.array([[0.51512, 0.29198, 0.15710], [0.24120, 0.69225, 0.06657], [-0.00105, 0.04189, 0.78407]])
BT_2020 = np.array([[0.67348, 0.16566, 0.12505], [0.27904, 0.67534, 0.04561], [-0.00194, 0.02998, 0.79686]])
SRGB = np.array([[0.43607, 0.38515, 0.14307], [0.22249, 0.71687, 0.06061], [0.01392, 0.09708, 0.71410]])


def _number(value: float) -> bytes:
    return struct.pack(">i", round(value * 65536))


def _xyz(values: Sequence[float]) -> bytes:
    return b"XYZ \0\0\0\0" + b"".join(map(_number, values))


def _gamma(gamma: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256))


def _profile(kind: bytes, space: bytes, connection: bytes, tags: dict[bytes, bytes]) -> bytes:
    text = b"made for a test\0"
    tags = {
        b"desc": b"desc\0\0\0\0" + struct.pack(">I", len(text)) + text + bytes(78),
        b"cprt": b"text\0\0\0\0" + text,
        b"wtpt": _xyz(D50),
        **tags,
    }
    offset, table, body = 132 + 12 * len(tags), b"", b""
    for name, value in tags.items():
        table += name + struct.pack(">II", offset + len(body), len(value))
        body += value + bytes(-len(value) % 4)
    data = struct.pack(">I", len(tags)) + table + body
    header = struct.pack(">I4sI", 128 + len(data), b"lcms", 0x02400000) + kind + space + connection
    header += bytes(12) + b"acsp" + bytes(28) + b"".join(map(_number, D50))
    return header.ljust(128, b"\0") + data


def matrix_profile(colourants: NDArray[np.float64], gamma: float) -> bytes:
    curves = {name: _gamma(gamma) for name in (b"rTRC", b"gTRC", b"bTRC")}
    columns = {name: _xyz(colourants[:, n].tolist()) for n, name in enumerate((b"rXYZ", b"gXYZ", b"bXYZ"))}
    return _profile(b"mntr", b"RGB ", b"XYZ ", {**columns, **curves})


def tagged_profile(primaries: int, transfer: int) -> bytes:
    tags = {name: _gamma(2.2) for name in (b"rTRC", b"gTRC", b"bTRC")}
    tags |= {name: _xyz(SRGB[:, n].tolist()) for n, name in enumerate((b"rXYZ", b"gXYZ", b"bXYZ"))}
    return _profile(b"mntr", b"RGB ", b"XYZ ", {**tags, b"cicp": b"cicp" + bytes([0, 0, 0, 0, primaries, transfer, 0, 1])})


def grey_profile(gamma: float) -> bytes:
    return _profile(b"mntr", b"GRAY", b"XYZ ", {b"kTRC": _gamma(gamma)})


def ink_profile(corners: NDArray[np.float64]) -> bytes:
    """Make a CMYK printer's profile out of the Lab colours of its 16 corners, `[2, 2, 2, 2, 3]` by C, M, Y, K."""
    line = bytes(range(256))
    lab = corners.reshape(16, 3) * (2.55, 1.0, 1.0) + (0.0, 128.0, 128.0)
    table = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + b"".join(_number(value) for value in np.eye(3).ravel())
    table += 4 * line + lab.round().astype("u1").tobytes() + 3 * line
    return _profile(b"prtr", b"CMYK", b"Lab ", {b"A2B0": table})


def srgb_of(xyz: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return sRGB levels, 0 to 255, of XYZ relative to D50, `[..., 3]`."""
    linear = np.clip(xyz @ np.linalg.inv(SRGB).T, 0.0, 1.0)
    levels: NDArray[np.float64] = 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return levels


def xyz_of_lab(lab: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return XYZ relative to D50 of CIE Lab, `[..., 3]`."""
    y = (lab[..., 0] + 16) / 116
    roots = np.stack([y + lab[..., 1] / 500, y, y - lab[..., 2] / 200], axis=-1)
    xyz: NDArray[np.float64] = np.where(roots > 6 / 29, roots**3, 3 * (6 / 29) ** 2 * (roots - 4 / 29)) * D50
    return xyz


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def cicp(primaries: int, transfer: int, *, full_range: int = 1) -> bytes:
    return png_chunk(b"cICP", bytes([primaries, transfer, 0, full_range]))


def with_chunk(png: bytes, chunk: bytes) -> bytes:
    return png[:33] + chunk + png[33:]


def avif(image: Image.Image, primaries: int, transfer: int, **options: Any) -> bytes:
    """Make an AVIF with code points: Pillow writes those of sRGB."""
    file = io.BytesIO()
    image.save(file, "AVIF", **{"quality": 100, "subsampling": "4:4:4", **options})
    at = file.getvalue().index(b"colrnclx") + 8
    return file.getvalue()[:at] + struct.pack(">HH", primaries, transfer) + file.getvalue()[at + 4 :]


def png_of(width: int, height: int, rows: bytes, *, bits: int = 8, colours: int = 2, extra: bytes = b"") -> bytes:
    """Make a PNG of a size and a kind; `rows` are its bytes, each row after a filter byte; `extra` comes before them."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")


def deep_png(values: NDArray[np.uint16], extra: bytes = b"") -> bytes:
    """Make a PNG of 16 bits a channel, of `[height, width]` grey, or with 2, 3 or 4 channels: LA, RGB, RGBA."""
    height, width, *channels = values.shape
    colours = {(): 0, (2,): 4, (3,): 2, (4,): 6}[tuple(channels)]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return png_of(width, height, rows, bits=16, colours=colours, extra=extra)


def deep_tiff(values: NDArray[Any], *, order: str, compression: int) -> bytes:
    """Make a TIFF of one strip of 16 bits a channel, `[height, width, 3 or 4]`; of compression 1 (none) or 8 (deflate)."""
    height, width, channels = values.shape
    data = values.astype(f"{order}u2").tobytes()
    data = zlib.compress(data) if compression == 8 else data
    sizes = struct.pack(f"{order}{channels}H", *(16,) * channels)
    at = 8 + 2 + 12 * (10 + (channels == 4)) + 4
    entries = [
        *((256, width), (257, height), (258, at), (259, compression), (262, 2), (273, at + len(sizes)), (277, channels)),
        *((278, height), (279, len(data)), (284, 1)),
        *([(338, 2)] if channels == 4 else []),
    ]
    table = b""
    for tag, value in entries:
        kind, count = (4, 1) if tag in (273, 279) else (3, channels if tag == 258 else 1)
        packed = struct.pack(f"{order}I" if kind == 4 or tag == 258 else f"{order}Hxx", value)
        table += struct.pack(f"{order}HHI", tag, kind, count) + packed
    mark = b"II*\0" if order == "<" else b"MM\0*"
    return mark + struct.pack(f"{order}IH", 8, len(entries)) + table + bytes(4) + sizes + data


def grey_tiff(width: int, height: int, data: bytes, *, bits: int, white_is_zero: bool) -> bytes:
    """Make a little-endian TIFF of one strip of grey."""
    sizes = ((256, width), (257, height), (258, bits), (259, 1), (262, 0 if white_is_zero else 1), (273, 122))
    entries = (*sizes, (277, 1), (278, height), (279, len(data)))
    table = b"".join(struct.pack("<HHII", tag, 4 if tag in (273, 279) else 3, 1, value) for tag, value in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + table + bytes(4) + data


def icon(image: bytes, *, side: int, cursor: bool = False) -> bytes:
    """Make an ICO or CUR file around one image, a PNG or a DIB whose height is doubled."""
    entry = struct.pack("<BBBBHHII", side, side, 0, 0, 1, 32, len(image), 22)
    return struct.pack("<HHH", 0, 2 if cursor else 1, 1) + entry + image
