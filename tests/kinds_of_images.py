"""Images of every kind that people have, and files of every kind that are none, made from real photographs.

Each kind of image comes with its upright sRGB pixels, got without the code under test: from what it was made of where the
format loses nothing, else by Pillow only.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from PIL import ExifTags, Image

from bucketline.ingest.images.crop import Reason
from tests import profiles
from tests.models import encoded
from tests.photographs import crop_of

BACKGROUND = (32, 64, 96)
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}  # what a camera did to the image, by the orientation that it noted
SIZES = ((90, 120), (120, 90), (100, 100), (97, 141))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCase:
    """A file that must be packed."""

    name: str
    data: bytes
    truth: Image.Image  # RGB, upright, on BACKGROUND


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A file that must be rejected."""

    name: str
    data: bytes
    reason: Reason


def by_pillow(data: bytes) -> Image.Image:
    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB")


def on_background(rgb: Image.Image, alpha: np.ndarray[Any, Any]) -> Image.Image:
    share = alpha[..., None].astype(float) / 255
    return Image.fromarray((np.asarray(rgb) * share + np.array(BACKGROUND) * (1 - share)).round().astype("u1"))


def images(number: int) -> Iterator[ImageCase]:
    photo = crop_of(number, *SIZES[number % len(SIZES)])
    for family in (_formats, _depths, _transparent, _turned, _coloured, _misnamed):
        for name, data, truth in family(photo, number):
            stem, _, suffix = name.rpartition(".")
            yield ImageCase(name=f"{stem.replace(' ', '_')}_{number}.{suffix}", data=data, truth=truth)


_Made: TypeAlias = tuple[str, bytes, Image.Image]


def _formats(photo: Image.Image, number: int) -> Iterator[_Made]:
    options: dict[str, Any]
    for suffix, kind, options in (
        ("png", "PNG", {}),
        ("bmp", "BMP", {}),
        ("dib", "DIB", {}),
        ("ppm", "PPM", {}),
        ("tga", "TGA", {}),
        ("tif", "TIFF", {}),
        ("tiff", "TIFF", {"compression": "tiff_lzw"}),
        ("webp", "WEBP", {"lossless": True}),
        ("jp2", "JPEG2000", {}),
    ):
        yield f"plain {kind}.{suffix}", encoded(photo, kind, **options), photo
    for name, kind, options in (
        ("baseline.jpg", "JPEG", {"quality": 90}),
        ("progressive.jpeg", "JPEG", {"quality": 85, "progressive": True}),
        ("full colour.jfif", "JPEG", {"quality": 95, "subsampling": 0}),
        ("lossy.webp", "WEBP", {"quality": 80}),
        ("still.avif", "AVIF", {"quality": 80}),
        ("still.gif", "GIF", {}),
    ):
        data = encoded(photo, kind, **options)
        yield name, data, by_pillow(data)
    large = crop_of(number, 280, 300)
    data = encoded(large, "JPEG", quality=92)
    yield "large.jpg", data, by_pillow(data)
    preview = encoded(photo, "MPO", save_all=True, append_images=[photo.resize((30, 30))])
    yield "with a preview.jpg", preview, by_pillow(preview)


def _depths(photo: Image.Image, number: int) -> Iterator[_Made]:
    grey = photo.convert("L")
    deep = (np.asarray(photo).astype("<u2") << 8) + np.random.default_rng(number).integers(
        0, 256, (*photo.size[::-1], 3)
    ).astype("<u2")
    eight = Image.fromarray((deep / 257).round().astype("u1"))
    eight_grey = Image.fromarray((deep[..., 0] / 257).round().astype("u1")).convert("RGB")
    yield "grey.png", encoded(grey, "PNG"), grey.convert("RGB")
    yield "grey.pgm", encoded(grey, "PPM"), grey.convert("RGB")
    yield "black and white.png", encoded(grey.convert("1"), "PNG"), grey.convert("1").convert("RGB")
    yield "sixteen bits.png", profiles.deep_png(deep), eight
    yield "sixteen bits grey.png", encoded(Image.fromarray(deep[..., 0].copy()), "PNG"), eight_grey
    yield "sixteen bits grey.tif", encoded(Image.fromarray(deep[..., 0].copy()), "TIFF"), eight_grey
    whole = np.asarray(crop_of(number, 280, 300).convert("L")).astype("<u2") * 257
    truth = Image.fromarray((whole / 257).round().astype("u1")).convert("RGB")
    yield "large sixteen bits grey.tif", encoded(Image.fromarray(whole), "TIFF"), truth
    turned = Image.frombytes("I;16B", (300, 280), whole.astype(">u2").tobytes())
    yield "large sixteen bits grey big endian.tif", encoded(turned, "TIFF"), truth
    negative = profiles.grey_tiff(*photo.size, (65535 - deep[..., 0]).tobytes(), bits=16, white_is_zero=True)
    yield "sixteen bits white is zero.tif", negative, eight_grey
    indexed = photo.quantize(64)
    yield "palette.png", encoded(indexed, "PNG"), indexed.convert("RGB")
    inks = photo.convert("CMYK")
    yield "inks.tif", encoded(inks, "TIFF"), inks.convert("RGB")
    adobe = encoded(inks, "JPEG", quality=95)
    yield "adobe inks.jpg", adobe, by_pillow(adobe)


def _transparent(photo: Image.Image, _: int) -> Iterator[_Made]:
    alpha = np.linspace(0, 255, photo.width).round().astype("u1")[None].repeat(photo.height, 0)
    rgba = Image.fromarray(np.dstack([np.asarray(photo), alpha]))
    both = on_background(photo, alpha)
    yield "alpha.png", encoded(rgba, "PNG"), both
    yield "alpha.tif", encoded(rgba, "TIFF"), both
    yield "alpha.webp", encoded(rgba, "WEBP", lossless=True, exact=True), both
    grey = photo.convert("L")
    grey_alpha = Image.merge("LA", (grey, Image.fromarray(alpha)))
    yield "grey alpha.png", encoded(grey_alpha, "PNG"), on_background(grey.convert("RGB"), alpha)
    deep = np.dstack([np.asarray(photo), alpha]).astype("<u2") * 257
    yield "sixteen bits alpha.png", profiles.deep_png(deep), both
    indexed = photo.quantize(16)
    index, plain = np.asarray(indexed), indexed.convert("RGB")
    clear = int(index[0, 0])
    cut_out = on_background(plain, np.where(index == clear, 0, 255))
    yield "clear entry.png", encoded(indexed, "PNG", transparency=clear), cut_out
    yield "clear entry.gif", encoded(indexed, "GIF", transparency=clear), cut_out
    opacities = bytes(range(0, 256, 16))
    yield (
        "opacities.png",
        encoded(indexed, "PNG", transparency=opacities),
        on_background(plain, np.frombuffer(opacities, "u1")[index]),
    )
    colour = photo.getpixel((1, 1))
    is_clear = (np.asarray(photo) == np.array(colour)).all(axis=-1)
    yield "clear colour.png", encoded(photo, "PNG", transparency=colour), on_background(photo, np.where(is_clear, 0, 255))


def _turned(photo: Image.Image, _: int) -> Iterator[_Made]:
    for orientation, turn in TURNS.items():
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        stored = photo.transpose(turn)
        back = next(step for step in Image.Transpose if stored.transpose(step) == photo)
        data = encoded(stored, "JPEG", quality=92, exif=exif)
        yield f"turned {orientation}.jpg", data, by_pillow(data).transpose(back)
        kind, suffix, options = (("PNG", "png", {}), ("TIFF", "tif", {}), ("WEBP", "webp", {"lossless": True}))[orientation % 3]
        yield f"turned {orientation}.{suffix}", encoded(stored, kind, exif=exif, **options), photo


def _coloured(photo: Image.Image, _: int) -> Iterator[_Made]:
    wide = profiles.matrix_profile(profiles.ADOBE_RGB, 563 / 256)
    xyz = (np.asarray(photo) / 255) ** (563 / 256) @ profiles.ADOBE_RGB.T
    right = Image.fromarray(profiles.srgb_of(xyz).round().astype("u1"))
    yield "wide gamut.png", encoded(photo, "PNG", icc_profile=wide), right
    yield "wide gamut.tif", encoded(photo, "TIFF", icc_profile=wide), right
    p3 = profiles.cicp(12, 13)
    levels = np.asarray(photo) / 255
    xyz = np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4) @ profiles.DISPLAY_P3.T
    right = Image.fromarray(profiles.srgb_of(xyz).round().astype("u1"))
    yield "wide gamut by code points.png", profiles.with_chunk(encoded(photo, "PNG"), p3), right
    yield "no real profile.png", encoded(photo, "PNG", icc_profile=b"nonsense"), photo
    data = encoded(photo, "JPEG", quality=92, exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff")
    plain = encoded(photo, "JPEG", quality=92)
    yield "broken metadata.jpg", data, by_pillow(plain)


def _misnamed(photo: Image.Image, _: int) -> Iterator[_Made]:
    data = encoded(photo, "JPEG", quality=92)
    yield "is a jpeg.png", data, by_pillow(data)
    for name, kind, options in (
        ("is a png.jpg", "PNG", {}),
        ("is a webp.gif", "WEBP", {"lossless": True}),
        ("is a tiff.bmp", "TIFF", {}),
        ("is a bmp.webp", "BMP", {}),
    ):
        yield name, encoded(photo, kind, **options), photo
    square = photo.resize((64, 64))
    yield "is an icon.png", profiles.icon(encoded(square, "PNG"), side=64), square
    strip = photo.resize((200, 40))
    yield "long strip.png", encoded(strip, "PNG"), strip


def refused(number: int) -> Iterator[Refused]:
    photo = crop_of(number, *SIZES[number % len(SIZES)])
    for reason, makers in _REFUSED.items():
        for name, make in makers.items():
            stem, _, suffix = name.rpartition(".")
            yield Refused(name=f"{stem.replace(' ', '_')}_{number}.{suffix}", data=make(photo), reason=reason)


def _cut(kind: str, share: float, **options: Any) -> Callable[[Image.Image], bytes]:
    def make(photo: Image.Image) -> bytes:
        data = encoded(photo, kind, **options)
        return data[: int(share * len(data))]

    return make


def _several(kind: str) -> Callable[[Image.Image], bytes]:
    others = [Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM]
    return lambda photo: encoded(photo, kind, save_all=True, append_images=[photo.transpose(turn) for turn in others])


def _sized(height: int, width: int) -> Callable[[Image.Image], bytes]:
    return lambda photo: encoded(photo.resize((width, height)), "PNG")


def _values(dtype: str) -> Callable[[Image.Image], bytes]:
    return lambda photo: encoded(Image.fromarray(np.asarray(photo.convert("L")).astype(dtype)), "TIFF")


def _wrong_checksum(photo: Image.Image) -> bytes:
    data = bytearray(encoded(photo, "PNG"))
    data[data.index(b"IDAT") + 40] ^= 0x55
    return bytes(data)


_BOMB = profiles.png_of(50_000, 50_000, bytes(1000))
_TEXT_BOMB = profiles.png_chunk(b"zTXt", b"name\0\0" + zlib.compress(bytes(1 << 26)))
_BMP_BOMB = b"BM" + struct.pack("<IIIIiiHHIIiiII", 54, 0, 54, 40, 50_000, 50_000, 1, 24, 0, 0, 0, 0, 0, 0)
_GIF_BOMB = b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0x80, 0, 0) + bytes(6) + b",\0\0\0\0\xff\xff\xff\xff\0\x02\0;"
_NOISE = bytes(np.random.default_rng(7).integers(128, 256, 3000).astype("u1"))

_REFUSED: dict[Reason, dict[str, Callable[[Image.Image], bytes]]] = {
    Reason.EMPTY: {"empty.png": lambda _: b"", "empty.jpg": lambda _: b""},
    Reason.NOT_AN_IMAGE: {
        "text.png": lambda _: b"These are notes, renamed.\n",
        "web page.jpg": lambda _: b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
        "drawing.png": lambda _: b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "document.tif": lambda _: b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n",
        "archive.webp": lambda _: b"PK\x03\x04" + bytes(60),
        "phone.jpg": lambda _: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(60),
        "postscript.png": lambda _: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 90 90\nshowpage\n",
        "zeros.bmp": lambda _: bytes(4096),
        "noise.gif": lambda _: _NOISE,
    },
    Reason.DAMAGED: {
        "cut.png": _cut("PNG", 0.5),
        "cut.jpg": _cut("JPEG", 0.6),
        "cut progressive.jpg": _cut("JPEG", 0.7, progressive=True),
        "cut.webp": _cut("WEBP", 0.7),
        "cut.tif": _cut("TIFF", 0.7),
        "cut lzw.tif": _cut("TIFF", 0.8, compression="tiff_lzw"),
        "cut.bmp": _cut("BMP", 0.7),
        "cut.jp2": _cut("JPEG2000", 0.3),
        "cut.avif": _cut("AVIF", 0.7),
        "cut.ppm": _cut("PPM", 0.7),
        "header only.png": lambda photo: encoded(photo, "PNG")[:20],
        "header only.jpg": lambda photo: encoded(photo, "JPEG")[:12],
        "wrong checksum.png": _wrong_checksum,
    },
    Reason.ANIMATED: {
        "animated.gif": _several("GIF"),
        "animated.webp": _several("WEBP"),
        "animated.png": _several("PNG"),
        "animated.avif": _several("AVIF"),
        "several pages.tif": _several("TIFF"),
    },
    Reason.TOO_LARGE: {
        "bomb.png": lambda _: _BOMB,
        "bomb.bmp": lambda _: _BMP_BOMB,
        "bomb.gif": lambda _: _GIF_BOMB,
        "bomb in an icon.png": lambda _: profiles.icon(_BOMB, side=64),
        "bomb of text.png": lambda _: profiles.png_of(90, 90, bytes(90 * 271), extra=_TEXT_BOMB),
    },
    Reason.TOO_SMALL: {
        "one pixel.png": _sized(1, 1),
        "line.png": _sized(1, 700),
        "column.png": _sized(700, 1),
        "stamp.png": _sized(15, 60),
    },
    Reason.TOO_SMALL_FOR_BUCKET: {"thumbnail.png": _sized(18, 24), "low strip.png": _sized(16, 400)},
    Reason.CROP: {"longer strip.png": _sized(40, 300), "high strip.png": _sized(300, 40)},
    Reason.MODE: {
        "float.tif": _values("<f4"),
        "whole numbers.tif": _values("<i4"),
        "hdr.png": lambda photo: profiles.with_chunk(encoded(photo, "PNG"), profiles.cicp(9, 16)),
        "hdr.avif": lambda photo: profiles.avif(photo, 9, 18),
    },
}
