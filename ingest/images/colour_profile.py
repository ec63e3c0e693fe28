"""Find an image's colour profile, or make the one that its code points (CICP, ITU-T H.273) stand for."""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from bucketline.ingest.images.rejects import Reason, RejectedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from PIL import Image

_D65, _C, _E, _DCI = (0.3127, 0.329), (0.31, 0.316), (1 / 3, 1 / 3), (0.314, 0.351)
_NTSC_1987 = (0.63, 0.34, 0.31, 0.595, 0.155, 0.07, *_D65)
_PRIMARIES = {
    1: (0.64, 0.33, 0.3, 0.6, 0.15, 0.06, *_D65),  # BT.709, sRGB
    4: (0.67, 0.33, 0.21, 0.71, 0.14, 0.08, *_C),  # BT.470 M
    5: (0.64, 0.33, 0.29, 0.6, 0.15, 0.06, *_D65),  # BT.470 BG
    6: _NTSC_1987,
    7: _NTSC_1987,
    8: (0.681, 0.319, 0.243, 0.692, 0.145, 0.049, *_C),  # film
    9: (0.708, 0.292, 0.17, 0.797, 0.131, 0.046, *_D65),  # BT.2020
    10: (1.0, 0.0, 0.0, 1.0, 0.0, 0.0, *_E),  # XYZ
    11: (0.68, 0.32, 0.265, 0.69, 0.15, 0.06, *_DCI),
    12: (0.68, 0.32, 0.265, 0.69, 0.15, 0.06, *_D65),  # Display P3
    22: (0.63, 0.34, 0.295, 0.605, 0.155, 0.077, *_D65),  # EBU 3213
}
"""x and y of red, green, blue and white. Source: ITU-T H.273, table 2; other values are unspecified or reserved."""
_EXPONENTS = {4: 2.2, 5: 2.8, 8: 1.0, 17: 2.6}
_DECADES = {9: 2.0, 10: 2.5}  # of logarithmic transfers
_HDR = {16: "PQ", 18: "HLG"}
"""Transfers by ITU-T H.273, table 3; all others are read as sRGB's, 13.

They are those of video, BT.709 and its kin, for which the table has a camera's curve that no display undoes; BT.1886's power of
2.4 is off to the other side. Many such files are sRGB that was named by its primaries, as libultrahdr's were
(https://github.com/google/libultrahdr/pull/458).
"""
_UNSPECIFIED = 2
_BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])
_D50 = np.array([0.9642, 1.0, 0.8249])  # XYZ of the white that ICC profiles relate to


class _CodePoints(NamedTuple):
    """The numbers of H.273's tables."""

    primaries: int
    transfer: int
    is_full_range: bool  # of RGB; what YUV needs to become RGB is the decoder's business


def colour_profile(image: Image.Image, file: BinaryIO) -> bytes | None:
    """Return the ICC profile by which an opened, not yet loaded image's colours are to be converted; None if they are sRGB.

    A PNG's `cICP` outranks its profile (PNG, third edition, 4.3); in HEIF and AVIF a profile outranks `nclx`, and an image with
    neither is sRGB (MIAF, 7.3.6.4).
    """
    profile: bytes | None = image.info.get("icc_profile")
    points, origin = _code_points(image, file)
    if profile and (points is None or image.format != "PNG"):
        _refuse_hdr(_tagged_transfer(profile), "colour profile")
        return profile
    if points is None:
        return None
    _refuse_hdr(points.transfer, origin)
    return _icc_profile(points)


def _refuse_hdr(transfer: int | None, origin: str) -> None:
    if transfer in _HDR:
        raise RejectedError(Reason.MODE, f"HDR pixels ({_HDR[transfer]} by its {origin}): save it as SDR")


def _code_points(image: Image.Image, file: BinaryIO) -> tuple[_CodePoints | None, str]:
    """Return an image's code points, None if they are missing or unspecified, and what has them."""
    found, origin = None, "nclx box"
    if image.format == "PNG":
        found, origin = _of_png(file), "cICP chunk"
    elif image.format == "AVIF":
        found = _of_avif(file)
    elif nclx := image.info.get("nclx_profile"):  # of HEIC, by its plugin
        found = _CodePoints(nclx["color_primaries"], nclx["transfer_characteristics"], is_full_range=True)
    is_given = found is not None and (found.primaries, found.transfer) != (_UNSPECIFIED, _UNSPECIFIED)
    return found if is_given else None, origin


def _of_png(file: BinaryIO) -> _CodePoints | None:
    before = file.tell()
    try:
        file.seek(8)
        while len(head := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            if kind == b"cICP" and length == 4:
                primaries, transfer, _, full_range = file.read(4)
                return _CodePoints(primaries, transfer, full_range != 0)
            if kind in (b"IDAT", b"IEND"):
                return None
            file.seek(length + 4, 1)
        return None
    finally:
        file.seek(before)


def _of_avif(file: BinaryIO) -> _CodePoints | None:
    """Return the code points of the primary image: others in the file, such as an HDR rendition, have theirs."""
    file.seek(0)
    data = file.read()
    inside = {kind: (start + 4, end) for kind, start, end in _boxes(data, 0, len(data)) if kind == b"meta"}
    boxes = {kind: (start, end) for kind, start, end in _boxes(data, *inside[b"meta"])} if inside else {}
    if b"pitm" not in boxes or b"iprp" not in boxes:
        return None
    at = boxes[b"pitm"][0]
    (primary,) = struct.unpack_from(">I" if data[at] else ">H", data, at + 4)
    properties: list[tuple[bytes, int, int]] = []
    associated: list[int] = []
    for kind, start, end in _boxes(data, *boxes[b"iprp"]):
        if kind == b"ipco":
            properties = list(_boxes(data, start, end))
        elif kind == b"ipma":
            associated += _associated(data, start, primary)
    for number in associated:
        kind, start, end = properties[number - 1] if 0 < number <= len(properties) else (b"", 0, 0)
        if kind == b"colr" and data[start : start + 4] == b"nclx":
            primaries, transfer = struct.unpack_from(">HH", data, start + 4)
            return _CodePoints(primaries, transfer, is_full_range=True)
    return None


def _boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, start and end of the contents of each box of ISO BMFF."""
    while start + 8 <= end:
        size, kind = struct.unpack_from(">I4s", data, start)
        head = 8
        if size == 1:
            (size,), head = struct.unpack_from(">Q", data, start + 8), 16
        size = size or end - start
        if size < head:
            return
        yield kind, start + head, min(start + size, end)
        start += size


def _associated(data: bytes, at: int, item: int) -> Iterator[int]:
    """Yield the numbers of an item's properties, from 1, by an `ipma` box."""
    version, is_wide = data[at], data[at + 3] & 1
    (entries,) = struct.unpack_from(">I", data, at + 4)
    at += 8
    for _ in range(entries):
        found, count = struct.unpack_from(">IB" if version else ">HB", data, at)
        at += 5 if version else 3
        numbers = struct.unpack_from(f">{count}H" if is_wide else f">{count}B", data, at)
        at += count * (2 if is_wide else 1)
        if found == item:
            yield from (number & (0x7FFF if is_wide else 0x7F) for number in numbers)


def _tagged_transfer(profile: bytes) -> int | None:
    """Return the transfer in a profile's `cicp` tag (ICC.1:2022, 9.2.17); None if it has none, or is not a profile."""
    try:
        (count,) = struct.unpack_from(">I", profile, 128)
        for n in range(count):
            name, offset = struct.unpack_from(">4sI", profile, 132 + 12 * n)
            if name == b"cicp":
                transfer: int = profile[offset + 9]
                return transfer
    except (struct.error, IndexError):
        pass
    return None


@functools.lru_cache(maxsize=64)
def _icc_profile(points: _CodePoints) -> bytes | None:
    """Return the profile that code points stand for, with curves of one value for each of 8 bits; None if it is sRGB."""
    primaries = _PRIMARIES.get(points.primaries, _PRIMARIES[1])
    levels = np.arange(256) / 255
    if not points.is_full_range:
        levels = ((255 * levels - 16) / 219).clip(0.0, 1.0)
    elif primaries == _PRIMARIES[1] and points.transfer not in {*_EXPONENTS, *_DECADES}:
        return None
    curve = (65535 * _linear(levels, points.transfer).clip(0.0, 1.0)).round().astype(">u2").tobytes()
    tags = {f"{name}TRC".encode(): b"curv\0\0\0\0" + struct.pack(">I", 256) + curve for name in "rgb"}
    for name, column in zip("rgb", (65536 * _colourants(primaries).T).round().astype(">i4"), strict=True):
        tags[f"{name}XYZ".encode()] = b"XYZ \0\0\0\0" + column.tobytes()
    table, body = struct.pack(">I", len(tags)), b""
    for tag, value in tags.items():
        table += tag + struct.pack(">II", 132 + 12 * len(tags) + len(body), len(value))
        body += value
    length = 128 + len(table) + len(body)
    header = struct.pack(">I4xI4s4s4s12x4s28x", length, 0x02400000, b"mntr", b"RGB ", b"XYZ ", b"acsp")
    return header + (65536 * _D50).round().astype(">i4").tobytes().ljust(60, b"\0") + table + body


def _linear(levels: NDArray[np.float64], transfer: int) -> NDArray[np.float64]:
    """Return light in proportion to white, of levels from 0 to 1."""
    if transfer in _DECADES:
        return np.where(levels > 0, 10 ** (_DECADES[transfer] * (levels - 1)), 0.0)
    if transfer in _EXPONENTS:
        light: NDArray[np.float64] = levels ** _EXPONENTS[transfer]
        return light * 52.37 / 48 if transfer == 17 else light  # a cinema's white is 48 cd/m² of 52.37
    return np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)


def _colourants(primaries: tuple[float, ...]) -> NDArray[np.float64]:
    """Return XYZ of red, green and blue, a column each, adapted to D50 so that white stays white."""
    xy = np.array(primaries).reshape(4, 2)
    xyz = np.column_stack([xy, 1 - xy.sum(axis=1)]).T
    white = xyz[:, 3] / xyz[1, 3]
    to_xyz = xyz[:, :3] * np.linalg.solve(xyz[:, :3], white)
    gains = (_BRADFORD @ _D50) / (_BRADFORD @ white)
    adapted: NDArray[np.float64] = np.linalg.solve(_BRADFORD, gains[:, None] * (_BRADFORD @ to_xyz))
    return adapted
