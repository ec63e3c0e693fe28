"""From a file's bytes to the pixels of its bucket: upright, sRGB, no alpha. What cannot become that is a reject."""

from __future__ import annotations

import io
import threading
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from PIL import ExifTags, Image, JpegImagePlugin, UnidentifiedImageError

from bucketline.ingest.geometry import NoBucketError, Placement
from bucketline.ingest.rejects import Reason, RejectedError
from bucketline.ingest.signature import damaged_format, described
from bucketline.ingest.srgb import refuse_unknown_white, to_srgb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from bucketline.ingest.framing import Framing

__all__ = ["Decoded", "Reason", "RejectedError", "decode", "placed_by_header"]

MAX_PIXELS = 1 << 28  # 268 megapixels, 1 GB decoded; larger ones are taken for decompression bombs
GIANT_PIXELS = 1 << 26  # of pictures as large as this, one is decoded at a time, so that memory stays bounded
DRAFT_MARGIN = 2  # a JPEG is decoded at a fraction of its size where that leaves so many times the resized picture's
Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2  # Pillow refuses twice of it, also in what its formats hold inside (an icon's PNG)
Image.init()
# Read by content, whatever the file is called; none that starts another program (EPS) or is no picture's format.
_WANTED = ("AVIF", "BMP", "CUR", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "PNG", "PPM", "QOI", "TGA", "TIFF", "WEBP")
FORMATS = tuple(name for name in _WANTED if name in Image.OPEN)
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
_FROM_THE_BOTTOM, _FROM_THE_RIGHT = frozenset({3, 4, 7, 8}), frozenset({2, 3, 6, 7})  # of the file's own rows and columns
_one_giant = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """A picture in its bucket."""

    pixels: NDArray[np.uint8]  # [height, width, 3] of the bucket, sRGB
    placement: Placement


def decode(data: bytes, framing: Framing, sample_id: str) -> Decoded:
    """Decode a picture once and bring it into its bucket.

    Raises:
        RejectedError: with the reason.
    """
    file = io.BytesIO(data)
    with _rejecting(file, framing):
        return _decode(file, framing, sample_id)


def placed_by_header(file: BinaryIO, framing: Framing, sample_id: str) -> Placement:
    """Say where a picture would come, by its header alone: damage behind it, and EXIF behind a PNG's pixels, are not seen.

    Raises:
        RejectedError: with the reason, that which decoding gives.
    """
    with _rejecting(file, framing), Image.open(file, formats=FORMATS) as image:
        _check(image, framing.min_size_px)
        # a PNG's own getexif would decode it, to find what stands behind its pixels
        placement = framing.place(sample_id, *_upright(image.size, _orientation(image, Image.Image.getexif)))
        refuse_unknown_white(image)
        return placement


@contextmanager
def _rejecting(file: BinaryIO, framing: Framing) -> Iterator[None]:
    """Turn whatever goes wrong with the picture in a file into a RejectedError with its reason."""
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
                Reason.DAMAGED, f"it begins as {kind}, but its header is damaged, cut short or of a kind that cannot be read"
            ) from error
        raise RejectedError(Reason.NOT_AN_IMAGE, described(data)) from error
    except Image.DecompressionBombError as error:
        raise RejectedError(Reason.TOO_LARGE, f"at most {MAX_PIXELS} px in all are taken: {error}") from error
    except MemoryError as error:
        raise RejectedError(Reason.TOO_LARGE, "there is not enough memory to decode it") from error
    except RejectedError:
        raise
    except NoBucketError as error:
        raise RejectedError(
            Reason.TOO_SMALL_FOR_BUCKET,
            f"the least that a bucket needs is to enlarge it {float(error.least):.3g} times; "
            f"--max-upscale is {float(framing.max_upscale or 0):g}",
        ) from error
    except Exception as error:
        # Pillow's readers raise whatever the broken bytes lead to
        if "Decompressed data too large" in str(error) or "text chunks" in str(error):
            raise RejectedError(Reason.TOO_LARGE, f"a packed text or colour profile in it: {error}") from error
        raise RejectedError(Reason.DAMAGED, f"it is cut short or broken ({type(error).__name__}: {error})"[:300]) from error


def _decode(file: BinaryIO, framing: Framing, sample_id: str) -> Decoded:
    with Image.open(file, formats=FORMATS) as image:
        width, height = image.size
        _check(image, framing.min_size_px)
        with _one_giant if height * width > GIANT_PIXELS else nullcontext():
            if not isinstance(image, JpegImagePlugin.JpegImageFile):
                # Before the metadata is asked for: that loads a PNG, and a second load of a broken one raises nothing.
                image.load()
            orientation = _orientation(image, lambda image: image.getexif())
            placement = framing.place(sample_id, *_upright((width, height), orientation))
            scale = _reduce(image, placement, orientation) if framing.jpeg_draft else 1
            image.load()
            if scale == 1 and image.size != (width, height):
                raise RejectedError(
                    Reason.DAMAGED, f"its header says {height}x{width} px, its content {image.height}x{image.width}"
                )
            picture = to_srgb(image, framing.background)
            if orientation in _UPRIGHT:
                picture = picture.transpose(_UPRIGHT[orientation])
            box = _box(placement, picture, scale, orientation)
            size = placement.bucket.width_px, placement.bucket.height_px
            cropped = picture.resize(size, Image.Resampling.LANCZOS, box=box)
    return Decoded(pixels=np.asarray(cropped, dtype=np.uint8), placement=placement)


def _check(image: Image.Image, min_size_px: int) -> None:
    """Refuse by the header what should not be decoded."""
    width, height = image.size
    if height * width > MAX_PIXELS:
        raise RejectedError(Reason.TOO_LARGE, f"{height}x{width} px, at most {MAX_PIXELS} in all are taken")
    if min(height, width) < min_size_px:
        raise RejectedError(Reason.TOO_SMALL, f"{height}x{width} px, the short side must have {min_size_px}")
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # a camera's MPO is a photograph with a preview behind it
        raise RejectedError(Reason.ANIMATED, f"{frames} pictures in one {image.format} file")


def _orientation(image: Image.Image, exif_of: Callable[[Image.Image], Image.Exif]) -> int:
    """Give the EXIF orientation, 1 to 8; 1 where the metadata cannot be read, for the pixels may be sound all the same."""
    if image.format == "TIFF":
        return 1  # Pillow turns it itself, and gives its size as it is then
    try:
        found = exif_of(image).get(ExifTags.Base.Orientation, 1)
    except Exception:  # noqa: BLE001 - broken EXIF ends in any of a dozen kinds of error
        return 1
    return int(found) if found in _UPRIGHT else 1


def _upright(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    """Give height and width of the upright picture whose file says `size`, width before height as Pillow has it."""
    return size if orientation in _SIDEWAYS else size[::-1]


def _reduce(image: Image.Image, placement: Placement, orientation: int) -> int:
    """Have a large JPEG decoded at a half, a quarter or an eighth of its size, and give that divisor; else 1.

    Measured on 5 to 24 megapixels into buckets of 384x640 to 1024x1024 px: 1.9 to 3.7 times as fast, pixels 0.3 to 0.6
    levels of 255 apart in the mean and 14 at most (48 to 52 dB). Nobody sees that, but it is not what others encode: an option.
    """
    if not isinstance(image, JpegImagePlugin.JpegImageFile):
        return 1
    height, width = placement.resized[::-1] if orientation in _SIDEWAYS else placement.resized
    before = image.width
    drafted = image.draft(None, (DRAFT_MARGIN * width, DRAFT_MARGIN * height))
    return 1 if drafted is None else round(before / drafted[1][2])


def _box(placement: Placement, picture: Image.Image, scale: int, orientation: int) -> tuple[float, float, float, float]:
    """Give the crop in the decoded picture as left, top, right, bottom, in px.

    Only the crop is resized: a picture of 64x400,000 px would otherwise become one of gigabytes on the way to its bucket.
    """
    top, left, height, width = placement.crop
    down, across = (source / resized for source, resized in zip(placement.source, placement.resized, strict=True))
    # 1001 columns decoded at a half are 501, the last one half filled: it is the first one where the picture is mirrored
    before_top = picture.height - placement.source[0] / scale if orientation in _FROM_THE_BOTTOM else 0.0
    before_left = picture.width - placement.source[1] / scale if orientation in _FROM_THE_RIGHT else 0.0
    return (
        left * across / scale + before_left,
        top * down / scale + before_top,
        min((left + width) * across / scale + before_left, picture.width),
        min((top + height) * down / scale + before_top, picture.height),
    )


_quiet_lock = threading.Lock()
_quiet_threads = 0
_quiet_filters: warnings.catch_warnings[None] | None = None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Pillow's warnings of large and odd files; what matters of it is checked here.

    Filters belong to the process: the first thread in sets them, the last one out puts back what was there.
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
