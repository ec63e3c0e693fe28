"""From a file's bytes to the pixels of its bucket: upright, sRGB, no alpha. What cannot become that is a reject."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from bucketline.ingest.geometry import Placement, place

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bucketline.ingest.grids import Grid

RESAMPLING = "lanczos"
BACKGROUND = "white"  # what shows through where a picture is transparent
MAX_PIXELS = 1 << 28  # 268 megapixels, 800 MB decoded; larger ones are taken for decompression bombs
Image.MAX_IMAGE_PIXELS = None  # Pillow's own limit is lower, and by header too
_WITH_ALPHA = frozenset({"RGBA", "LA", "PA", "La", "RGBa"})


class Reason(StrEnum):
    """Why an image is refused."""

    EMPTY = "empty file"
    NOT_AN_IMAGE = "not an image"
    DAMAGED = "damaged image"
    ANIMATED = "animated or several pictures"
    TOO_LARGE = "too many pixels"
    TOO_SMALL = "too small"
    MODE = "unsupported pixel format"
    UNREADABLE = "unreadable file"
    CAPTION = "unreadable caption"
    LATENT = "latent not finite in the stored dtype"
    TOKENS = "caption embedding not finite in the stored dtype"
    CLASS = "unknown class"


class RejectedError(Exception):
    """An image is refused: with a reason, and what was found."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """A picture in its bucket."""

    pixels: NDArray[np.uint8]  # [height, width, 3] of the bucket, sRGB
    placement: Placement


def decode(data: bytes, grid: Grid, min_side_px: int) -> Decoded:
    """Decode a picture once and bring it into its bucket.

    Raises:
        RejectedError: with the reason.
    """
    if not data:
        raise RejectedError(Reason.EMPTY, "0 bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL warns of large and odd files; what matters is checked here
            return _decode(data, grid, min_side_px)
    except UnidentifiedImageError as error:
        raise RejectedError(Reason.NOT_AN_IMAGE, f"its {len(data)} bytes are in no picture format that is known") from error
    except Image.DecompressionBombError as error:
        raise RejectedError(Reason.TOO_LARGE, str(error)) from error
    except RejectedError:
        raise
    except Exception as error:
        raise RejectedError(Reason.DAMAGED, f"{type(error).__name__}: {error}"[:300]) from error


def _decode(data: bytes, grid: Grid, min_side_px: int) -> Decoded:
    with Image.open(io.BytesIO(data)) as image:
        width, height = image.size
        if height * width > MAX_PIXELS:
            raise RejectedError(Reason.TOO_LARGE, f"{height}x{width} px, at most {MAX_PIXELS} in all are taken")
        if min(height, width) < min_side_px:
            raise RejectedError(Reason.TOO_SMALL, f"{height}x{width} px, the short side must have {min_side_px}")
        frames = getattr(image, "n_frames", 1)
        if frames > 1 and image.format != "MPO":  # a camera's MPO is a photograph with a preview behind it
            raise RejectedError(Reason.ANIMATED, f"{frames} frames")
        image.load()
        picture = _to_srgb(ImageOps.exif_transpose(image))
    placement = place(picture.height, picture.width, grid)
    cropped = picture.resize(
        (placement.bucket.width_px, placement.bucket.height_px), Image.Resampling.LANCZOS, box=_box(placement)
    )
    return Decoded(pixels=np.asarray(cropped, dtype=np.uint8), placement=placement)


def _box(placement: Placement) -> tuple[float, float, float, float]:
    """Give the crop in the source picture as left, top, right, bottom, in px.

    Only the crop is resized: a picture of 64x400,000 px would otherwise become one of gigabytes on the way to its bucket.
    """
    top, left, height, width = placement.crop
    down, across = (source / resized for source, resized in zip(placement.source, placement.resized, strict=True))
    right, bottom = min((left + width) * across, placement.source[1]), min((top + height) * down, placement.source[0])
    return left * across, top * down, right, bottom


def _to_srgb(image: Image.Image) -> Image.Image:
    """Bring any mode to RGB in sRGB: 16-bit to 8, profiles applied, transparency onto the background."""
    if image.mode.startswith("I;16"):
        return Image.fromarray(((np.asarray(image).astype(np.int64) + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise RejectedError(Reason.MODE, f"32-bit pixels (mode {image.mode}), whose white nobody names; expected 8 or 16 bits")
    profile = image.info.get("icc_profile")
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        rgba = image.convert("RGBA")
        colours = _by_profile(rgba.convert("RGB"), profile)
        ground = Image.new("RGB", rgba.size, BACKGROUND)
        return Image.composite(colours, ground, rgba.getchannel("A"))
    return _by_profile(image.convert("RGB") if image.mode == "P" else image, profile)


def _by_profile(image: Image.Image, profile: bytes | None) -> Image.Image:
    if profile and image.mode in ("RGB", "L", "CMYK"):
        try:
            converted = ImageCms.profileToProfile(
                image, ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB"), outputMode="RGB"
            )
        except (ImageCms.PyCMSError, OSError, ValueError):
            converted = None  # a profile that is none: the pixels are taken for what most pixels are, sRGB
        if converted is not None:
            return converted
    return image.convert("RGB")
