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
    resized = picture.resize((placement.resized[1], placement.resized[0]), Image.Resampling.LANCZOS)
    top, left, height, width = placement.crop
    cropped = resized.crop((left, top, left + width, top + height))
    return Decoded(pixels=np.asarray(cropped, dtype=np.uint8), placement=placement)


def _to_srgb(image: Image.Image) -> Image.Image:
    """Bring any mode to RGB in sRGB: 16-bit to 8, profiles applied, transparency onto the background."""
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise RejectedError(Reason.MODE, f"values from {values.min()} to {values.max()}, expected 16 bits")
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise RejectedError(Reason.MODE, "floating point pixels, expected 8 or 16 bits")
    if "A" in image.mode or "transparency" in image.info:
        rgba = image.convert("RGBA")
        ground = Image.new("RGBA", rgba.size, BACKGROUND)
        return Image.alpha_composite(ground, rgba).convert("RGB")
    profile = image.info.get("icc_profile")
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
