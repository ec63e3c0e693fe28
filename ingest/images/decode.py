"""Decode a file into the pixels of its bucket: upright, sRGB, no alpha. Files that cannot be decoded are rejected."""

from __future__ import annotations

import io
import re
import resource
import sys
import threading
import warnings
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from PIL import ExifTags, Image, JpegImagePlugin, PngImagePlugin, UnidentifiedImageError

from bucketline.ingest.images.crop import Framing, Grid, NoBucketError, Reason, RejectedError, Size
from bucketline.ingest.images.pixels import (
    colour_profile,
    deep_layout,
    refuse_unknown_white,
    round_to_eight_bits,
    split_alpha,
    split_srgb,
    to_srgb,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from bucketline.ingest.images.crop import Placement


# ------------------------------------------------------------------------------------------------------------------- file type


def register() -> tuple[str, ...]:
    """Register the installed plugins with Pillow and return the names of their formats."""
    formats: tuple[str, ...] = ()
    if find_spec("pillow_heif"):
        import pillow_heif

        pillow_heif.register_heif_opener(thumbnails=False)
        formats += ("HEIF",)
    if find_spec("pillow_jxl"):
        import pillow_jxl  # noqa: F401 - registers itself

        formats += ("JXL",)
    return formats


SHOWN_BYTES = 32  # of a file that is no image
_IMAGES = (
    (b"\x89PNG", "PNG"),
    (b"\xff\xd8", "JPEG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"II+\x00", "TIFF"),
    (b"MM\x00+", "TIFF"),
    (b"\x00\x00\x01\x00", "ICO"),
    (b"\x00\x00\x02\x00", "CUR"),
    (b"\x00\x00\x00\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"qoif", "QOI"),
)
_JXL = (b"\xff\x0a", b"\x00\x00\x00\x0cJXL ")


def damaged_format(data: bytes) -> str | None:
    """Return the image format that the first bytes of an unreadable file indicate; None if they indicate none."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    if data[4:8] == b"ftyp" and data[8:11] == b"avi":
        return "AVIF"
    return next((name for start, name in _IMAGES if data.startswith(start)), None)


def described(data: bytes) -> str:
    """Describe a file whose first bytes are not those of a known image format.

    >>> described(b"<!DOCTYPE html><html>")
    "it begins with '<!DOCTYPE html><html>'"
    """
    is_heif = data[4:8] == b"ftyp" and data[8:11] in (b"hei", b"hev", b"mif", b"msf")
    if is_heif or data.startswith(_JXL):
        kind, plugin = ("a HEIC image", "pillow_heif") if is_heif else ("a JPEG XL image", "pillow_jxl")
        if find_spec(plugin):
            return f"{kind}; it is damaged or of a kind that {plugin} cannot read; convert it to PNG, JPEG or WebP"
        return f"{kind}; convert it to PNG, JPEG or WebP, or install the extra heif: pip install 'bucketline[heif]'"
    return f"it begins with {repr(data[:SHOWN_BYTES]).removeprefix('b')}"


# ---------------------------------------------------------------------------------------------------------------------- decode

__all__ = ["Reason", "RejectedError", "decode_grey", "decode_image", "decode_placed", "placed_by_header", "size_by_header"]

_MAX_PIXELS = 1 << 28  # 268 megapixels, 1 GB decoded; larger images count as decompression bombs
GIANT_PIXELS = 1 << 26  # images larger than this are decoded one at a time, to bound memory
DRAFT_MARGIN = 2  # a JPEG draft must be at least this many times the resized image
Image.MAX_IMAGE_PIXELS = _MAX_PIXELS // 2  # Pillow refuses twice this, also for images nested in others (an icon's PNG)
PngImagePlugin.MAX_TEXT_CHUNK = 16 << 20  # a printer's profile has megabytes; all texts together may have 64 MiB
Image.init()
# Detected by content, not by file name. Excluded: formats that start another program (EPS) or are not images.
_WANTED = ("AVIF", "BMP", "CUR", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "PNG", "PPM", "QOI", "TGA", "TIFF", "WEBP")
FORMATS = (*(name for name in _WANTED if name in Image.OPEN), *register())
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # by the EXIF orientation
_SIDEWAYS = frozenset({5, 6, 7, 8})
_FROM_THE_BOTTOM, _FROM_THE_RIGHT = frozenset({3, 4, 7, 8}), frozenset({2, 3, 6, 7})  # of the file's rows and columns
_JPEG_MARKER = re.compile(rb"\xff[\x02-\xcf\xd9-\xfe]")  # but those within a scan: stuffing and restarts
_one_giant = threading.Lock()


def decode_image(data: bytes, framing: Framing, sample_id: str) -> tuple[NDArray[np.uint8], Placement]:
    """Return the pixels of an image, resized and cropped to its bucket, `[height, width, 3]` in sRGB, and its placement."""
    pixels, placement, _ = decode_placed(data, framing, partial(framing.place, sample_id))
    assert placement is not None
    return np.asarray(pixels, dtype=np.uint8), placement


def decode_placed(
    data: bytes, framing: Framing, place: Callable[[int, int], Placement | None], *, keeps_alpha: bool = False
) -> tuple[Image.Image, Placement | None, Image.Image | None]:
    """Return an image as RGB, where `place` puts it by its upright height and width, its placement, and its alpha channel.

    If `place` returns None, the image is returned whole. With `keeps_alpha` its colours are not blended, and the upright alpha
    channel is returned, L, whole; None if it has none.
    """
    file = io.BytesIO(data)
    with _rejecting(file, framing):
        return _decode(file, framing, place, keeps_alpha=keeps_alpha)


def decode_grey(data: bytes, framing: Framing) -> Image.Image:
    """Return an upright image of one channel as L: grey of 1, 8 or 16 bits, or colours that are all grey. Alpha is ignored."""
    file = io.BytesIO(data)
    with _rejecting(file, framing), Image.open(file, formats=FORMATS) as image:
        _check(image, 1)
        with _one_giant if image.height * image.width > GIANT_PIXELS else nullcontext():
            orientation = _loaded(image, file)
            image.load()
            colours, _ = split_alpha(image)
            if colours.mode != "L":
                channels = np.asarray(colours.convert("RGB"))
                if (channels != channels[..., :1]).any():
                    raise RejectedError(Reason.MODE, f"it has colours (mode {image.mode}), expected grey; save it as grey")
                colours = Image.fromarray(channels[..., 0])
            return colours.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else colours


def size_by_header(file: BinaryIO, framing: Framing) -> tuple[int, int]:
    """Return the upright height and width of an image, from its header only."""
    with _rejecting(file, framing), Image.open(file, formats=FORMATS) as image:
        _check(image, 1)
        colour_profile(image, file)
        return _upright(image.size, _orientation(image, Image.Image.getexif))


def placed_by_header(file: BinaryIO, framing: Framing, sample_id: str) -> Placement:
    """Return an image's placement, from its header only; damage after the header or EXIF after a PNG's pixels goes unseen."""
    with _rejecting(file, framing), Image.open(file, formats=FORMATS) as image:
        _check(image, framing.min_size_px)
        colour_profile(image, file)  # refuses HDR
        # a PNG's own getexif would decode the image, to find EXIF after the pixels
        placement = framing.place(sample_id, *_upright(image.size, _orientation(image, Image.Image.getexif)))
        refuse_unknown_white(image)
        return placement


@contextmanager
def _rejecting(file: BinaryIO, framing: Framing) -> Iterator[None]:
    if not file.seek(0, io.SEEK_END):
        raise RejectedError(Reason.EMPTY, "0 bytes")
    file.seek(0)
    try:
        with _quiet():
            yield
    except UnidentifiedImageError as error:
        file.seek(0)
        data = file.read()
        if kind := damaged_format(data):
            raise RejectedError(
                Reason.DAMAGED, f"it begins like {kind}, but its header is damaged, truncated or of an unsupported kind"
            ) from error
        raise RejectedError(Reason.NOT_AN_IMAGE, described(data)) from error
    except Image.DecompressionBombError as error:
        raise RejectedError(Reason.TOO_LARGE, f"at most {_MAX_PIXELS} px in all are taken: {error}") from error
    except MemoryError as error:
        raise RejectedError(Reason.TOO_LARGE, "not enough memory to decode it", is_passing=True) from error
    except RejectedError:
        raise
    except NoBucketError as error:
        raise RejectedError(
            Reason.TOO_SMALL_FOR_BUCKET,
            f"the least that a bucket needs is to enlarge it {float(error.least):.3g} times; "
            f"max_upscale is {float(framing.max_upscale or 0):g}",
        ) from error
    except Exception as error:
        # broken bytes can make Pillow's readers raise almost any exception
        if "Decompressed data too large" in str(error) or "text chunks" in str(error):
            raise RejectedError(Reason.TOO_LARGE, f"a compressed text or colour profile in it: {error}") from error
        raise RejectedError(Reason.DAMAGED, f"it is truncated or damaged ({type(error).__name__}: {error})"[:300]) from error


def _decode(
    file: BinaryIO, framing: Framing, place: Callable[[int, int], Placement | None], *, keeps_alpha: bool
) -> tuple[Image.Image, Placement | None, Image.Image | None]:
    with Image.open(file, formats=FORMATS) as image:
        width, height = image.size
        _check(image, framing.min_size_px)
        profile = colour_profile(image, file)
        with _one_giant if height * width > GIANT_PIXELS else nullcontext():
            orientation = _loaded(image, file)
            placement = place(*_upright((width, height), orientation))
            scale = _reduce(image, placement, orientation) if framing.jpeg_draft and placement is not None else 1
            image.load()
            if scale == 1 and image.size != (width, height):
                raise RejectedError(
                    Reason.DAMAGED, f"its header says {height}x{width} px, its content {image.height}x{image.width}"
                )
            alpha: Image.Image | None = None
            if keeps_alpha:
                rgb, alpha = split_srgb(image, profile)
            else:
                rgb = to_srgb(image, profile, framing.background)
            if orientation in _UPRIGHT:
                rgb = rgb.transpose(_UPRIGHT[orientation])
                alpha = None if alpha is None else alpha.transpose(_UPRIGHT[orientation])
            if placement is None:
                return rgb, None, alpha
            box = crop_box(placement, rgb, scale, orientation)
            size = placement.bucket.width_px, placement.bucket.height_px
            return rgb.resize(size, Image.Resampling.LANCZOS, box=box), placement, alpha


def _loaded(image: Image.Image, file: BinaryIO) -> int:
    """Load an image, unless it is a JPEG, with 8 bits per channel, and return its EXIF orientation."""
    if isinstance(image, JpegImagePlugin.JpegImageFile):
        _refuse_without_end(file)
    else:
        # Load before reading the metadata: getexif loads a PNG, and loading a broken one a second time raises nothing.
        layout = deep_layout(image)
        image.load()
        if layout is not None:
            round_to_eight_bits(image, layout, file, FORMATS)
    return _orientation(image, lambda image: image.getexif())


def _refuse_without_end(file: BinaryIO) -> None:
    """Raise RejectedError if a JPEG has no end marker (EOI), since nothing tells then how much is missing.

    Pillow takes 1 in 30 files that lack only the marker, by the length of their last codes, and many whose rest is zeros.
    """
    before = file.tell()
    file.seek(0)
    data = file.read()
    file.seek(before)
    at = 2
    while marker := _JPEG_MARKER.search(data, at):
        if marker[0][-1] == 0xD9:
            return
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2])
    raise RejectedError(Reason.DAMAGED, "it is truncated: its end marker (EOI) is missing; download or save it again")


def _check(image: Image.Image, min_size_px: int) -> None:
    """Raise RejectedError if the header shows that the image should not be decoded."""
    width, height = image.size
    if height * width > _MAX_PIXELS:
        raise RejectedError(Reason.TOO_LARGE, f"{height}x{width} px, at most {_MAX_PIXELS} in all are taken")
    if min(height, width) < min_size_px:
        raise RejectedError(Reason.TOO_SMALL, f"{height}x{width} px, the short side must have {min_size_px}")
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # a camera's MPO is a photograph followed by a preview
        raise RejectedError(Reason.ANIMATED, f"{frames} images in one {image.format} file")


def _orientation(image: Image.Image, exif_of: Callable[[Image.Image], Image.Exif]) -> int:
    """Return the EXIF orientation, 1 to 8; 1 if the metadata cannot be read, since the pixels may still be intact."""
    if image.format in ("TIFF", "JXL"):
        return 1  # Pillow rotates a TIFF itself, and libjxl a JPEG XL; their sizes are already the upright ones
    try:
        found = exif_of(image).get(ExifTags.Base.Orientation, 1)
    except Exception:  # noqa: BLE001 - broken EXIF raises any of a dozen exception types
        return 1
    return int(found) if found in _UPRIGHT else 1


def _upright(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    """Return height and width of the upright image; `size` is the file's width and height, in Pillow's order."""
    return size if orientation in _SIDEWAYS else size[::-1]


def _reduce(image: Image.Image, placement: Placement, orientation: int) -> int:
    """Set a large JPEG to be decoded at 1/2, 1/4 or 1/8 scale, and return that divisor; else return 1.

    Measured on 5 to 24 megapixels into buckets of 384x640 to 1024x1024 px: 1.9 to 3.7 times as fast; pixels differ by 0.3 to
    0.6 levels of 255 on average and by at most 14 (48 to 52 dB). This is invisible, but differs from what others encode;
    therefore it is an option.
    """
    if not isinstance(image, JpegImagePlugin.JpegImageFile):
        return 1
    height, width = placement.resized[::-1] if orientation in _SIDEWAYS else placement.resized
    before = image.width
    drafted = image.draft(None, (DRAFT_MARGIN * width, DRAFT_MARGIN * height))
    return 1 if drafted is None else round(before / drafted[1][2])


def crop_box(placement: Placement, rgb: Image.Image, scale: int = 1, orientation: int = 1) -> tuple[float, float, float, float]:
    """Return the crop in the decoded image as left, top, right, bottom, in px.

    Only the crop is resized; otherwise an image of 64x400,000 px would temporarily grow to gigabytes.
    """
    top, left, height, width = placement.crop
    down, across = (source / resized for source, resized in zip(placement.source, placement.resized, strict=True))
    # 1001 columns at 1/2 scale become 501, the last of them half filled; in a mirrored image that is the first column
    before_top = rgb.height - placement.source[0] / scale if orientation in _FROM_THE_BOTTOM else 0.0
    before_left = rgb.width - placement.source[1] / scale if orientation in _FROM_THE_RIGHT else 0.0
    return (
        left * across / scale + before_left,
        top * down / scale + before_top,
        min((left + width) * across / scale + before_left, rgb.width),
        min((top + height) * down / scale + before_top, rgb.height),
    )


_quiet_lock = threading.Lock()
_quiet_threads = 0
_quiet_filters: warnings.catch_warnings[None] | None = None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Pillow's warnings about large and odd files; this module makes its own checks.

    Warning filters are global to the process: the first thread in sets them, the last one out restores them.
    """
    global _quiet_threads, _quiet_filters  # noqa: PLW0603 - as the filters are
    with _quiet_lock:
        if _quiet_threads == 0:
            _quiet_filters = warnings.catch_warnings()
            _quiet_filters.__enter__()
            warnings.filterwarnings("ignore", module=r"PIL\.")
        _quiet_threads += 1
    try:
        yield
    finally:
        with _quiet_lock:
            _quiet_threads -= 1
            if _quiet_threads == 0 and _quiet_filters is not None:
                _quiet_filters.__exit__(None, None, None)
                _quiet_filters = None


# ------------------------------------------------------------------------------------------------------------------------ trial
# `python -m bucketline.ingest.images.decode`: decode an image from stdin; a decoder that crashes ends only this process, by a
# signal.

_ANY = Framing(grid=Grid(name="64x64", sizes=(Size(64, 64),)))


def main() -> int:
    """Return 0 whether the image is decoded or rejected."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    data = sys.stdin.buffer.read()
    for jpeg_draft in (False, True):
        with suppress(RejectedError):
            decode_image(data, Framing(grid=_ANY.grid, jpeg_draft=jpeg_draft), "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
