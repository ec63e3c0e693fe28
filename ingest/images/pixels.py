"""Convert any pixels to 8-bit sRGB: colour profiles, 16 bits per channel, transparency."""

from __future__ import annotations

import functools
import io
import struct
import sys
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image, ImageCms

from bucketline.ingest.images.crop import Reason, RejectedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


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


# ---------------------------------------------------------------------------------------------------------------- sixteen bits
# Convert colours of 16 bits per channel to 8 bits by rounding: v becomes round(v * 255 / 65535).
#
# Pillow keeps the high byte of each value, which is up to one level too dark. It can be made to read the low byte instead,
# so such an image is read twice and the value computed from both bytes. Pillow reads 16-bit grey in full; see `srgb`.
#
# Some images remain at the high byte, because Pillow has no other way to read them: TIFFs with premultiplied alpha or
# planar channels, and JPEG 2000.

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


# ------------------------------------------------------------------------------------------------------------------------ srgb

PREMULTIPLIED = {"La": "LA", "RGBa": "RGBA"}
WITHOUT_ALPHA = {"LA": "L", "PA": "RGB", "RGBA": "RGB"}
PHOTOMETRIC, BITS_PER_SAMPLE, WHITE_IS_ZERO = 262, 258, 0  # TIFF tags, and the photometric value that inverts grey


def to_srgb(image: Image.Image, profile: bytes | None, background: str) -> Image.Image:
    """Return the image in mode RGB, sRGB, blended onto `background` (`#rrggbb`).

    Colours are assumed to be sRGB if `profile` is None, cannot be read or does not match the pixel format.
    """
    colours, alpha = split_srgb(image, profile)
    if alpha is None:
        return colours
    blended = Image.new("RGB", colours.size, background)
    blended.paste(colours, None, alpha)
    return blended


def split_srgb(image: Image.Image, profile: bytes | None) -> tuple[Image.Image, Image.Image | None]:
    """Return the colours as `to_srgb` does, not blended, and the alpha channel, L; None if all pixels are opaque."""
    image, alpha = split_alpha(image)
    return _by_profile(image, profile), alpha


def split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Return the colours in 8 bits without alpha, and the alpha channel; None if all pixels are opaque."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _eight_bits(image)
    if image.mode in PREMULTIPLIED:
        image = image.convert(PREMULTIPLIED[image.mode])
    if image.mode in WITHOUT_ALPHA:
        return image.convert(WITHOUT_ALPHA[image.mode]), image.getchannel("A")
    alpha = image.convert("RGBA").getchannel("A") if "transparency" in image.info else None
    if image.mode == "1":
        return image.convert("L"), alpha
    # A palette's transparency is now in `alpha`; left in `info`, it would make the conversion to RGB warn and apply it again.
    image = image.copy() if alpha is not None else image
    image.info.pop("transparency", None)
    return image if image.mode in ("L", "RGB", "CMYK", "LAB") else image.convert("RGB"), alpha


def _eight_bits(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Scale grey of more than 8 bits to 8 bits, strip by strip, so that white stays white."""
    tags = getattr(image, "tag_v2", {})
    if image.format == "PPM":  # Pillow scales its values to 16 bits
        white = 65535
    else:
        refuse_unknown_white(image)
        white = (1 << tags[BITS_PER_SAMPLE][0]) - 1 if BITS_PER_SAMPLE in tags else 65535
    is_turned_round = tags.get(PHOTOMETRIC) == WHITE_IS_ZERO  # Pillow inverts these only at 8 bits
    transparent = image.info.get("transparency")
    grey = Image.new("L", image.size)
    alpha = None if transparent is None else Image.new("L", image.size)
    for box in strips(image):
        values: NDArray[np.int64] = np.asarray(image.crop(box)).astype(np.int64)
        if alpha is not None:
            alpha.paste(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)), box)
        if is_turned_round:
            values = white - values
        grey.paste(Image.fromarray(((2 * 255 * values + white) // (2 * white)).clip(0, 255).astype(np.uint8)), box)
    return grey, alpha


def refuse_unknown_white(image: Image.Image) -> None:
    """Refuse pixel formats in which the value of white is undefined."""
    if image.mode in ("I", "F") and image.format != "PPM":
        raise RejectedError(
            Reason.MODE, f"32-bit pixels (mode {image.mode}), which do not define the value of white; save it with 8 or 16 bits"
        )


def _by_profile(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Convert the colours to sRGB if there is a profile that matches the pixel format."""
    if image.mode == "LAB":
        return _converted(image, ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")))
    if profile:
        try:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            space = source.profile.xcolor_space.strip()
            if space == "RGB" and image.mode == "L":  # grey saved with an RGB profile: equal channels
                image = image.convert("RGB")
            if (space, image.mode) in (("RGB", "RGB"), ("GRAY", "L"), ("CMYK", "CMYK")):
                return _converted(image, source)
        except (ImageCms.PyCMSError, OSError, ValueError):
            pass  # an invalid profile: assume sRGB
    return image if image.mode == "RGB" else image.convert("RGB")  # RGB would only be copied


def _converted(image: Image.Image, source: ImageCms.ImageCmsProfile) -> Image.Image:
    converted = ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    assert converted is not None  # None is returned only for in-place conversion
    return converted
