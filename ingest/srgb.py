"""Any pixels to RGB in sRGB: 16 bits to 8, colour profiles applied, transparency onto a background."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageCms

from bucketline.ingest.rejects import Reason, RejectedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

PREMULTIPLIED = {"La": "LA", "RGBa": "RGBA"}
WITHOUT_ALPHA = {"LA": "L", "PA": "RGB", "RGBA": "RGB"}
PHOTOMETRIC, BITS_PER_SAMPLE, WHITE_IS_ZERO = 262, 258, 0  # TIFF tags, and the value of the first that turns grey round


def to_srgb(image: Image.Image, background: str) -> Image.Image:
    """Give the picture in mode RGB, sRGB; where it is transparent the background (`#rrggbb`) shows through.

    Colours are taken for sRGB where there is no profile, or one that cannot be read or belongs to other pixels.

    Raises:
        RejectedError: where nobody says which value is white.
    """
    profile = image.info.get("icc_profile")
    image, alpha = _split_alpha(image)
    colours = _by_profile(image, profile)
    if alpha is None:
        return colours
    return Image.composite(colours, Image.new("RGB", colours.size, background), alpha)


def _split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Give the colours in 8 bits and without alpha, and how opaque each pixel is; None where all are."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _eight_bits(image)
    if image.mode in PREMULTIPLIED:
        image = image.convert(PREMULTIPLIED[image.mode])
    if image.mode in WITHOUT_ALPHA:
        return image.convert(WITHOUT_ALPHA[image.mode]), image.getchannel("A")
    alpha = image.convert("RGBA").getchannel("A") if "transparency" in image.info else None
    if image.mode == "1":
        return image.convert("L"), alpha
    # A palette's own transparency is in `alpha`; left in `info`, converting to RGB would warn of it and look it up again.
    image = image.copy() if alpha is not None else image
    image.info.pop("transparency", None)
    return image if image.mode in ("L", "RGB", "CMYK", "LAB") else image.convert("RGB"), alpha


def _eight_bits(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Bring grey of more than 8 bits to 8 by value: white stays white."""
    values: NDArray[np.int64] = np.asarray(image).astype(np.int64)
    tags = getattr(image, "tag_v2", {})
    if image.format == "PPM":  # Pillow widens its values to 16 bits
        white = 65535
    else:
        refuse_unknown_white(image)
        white = (1 << tags[BITS_PER_SAMPLE][0]) - 1 if BITS_PER_SAMPLE in tags else 65535
    transparent = image.info.get("transparency")
    alpha = None if transparent is None else Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8))
    if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:  # Pillow turns these round for 8 bits only
        values = white - values
    return Image.fromarray(((2 * 255 * values + white) // (2 * white)).clip(0, 255).astype(np.uint8)), alpha


def refuse_unknown_white(image: Image.Image) -> None:
    """Refuse pixels of which nobody says what value is white.

    Raises:
        RejectedError: where they are such.
    """
    if image.mode in ("I", "F") and image.format != "PPM":
        raise RejectedError(
            Reason.MODE, f"32-bit pixels (mode {image.mode}), whose white nobody names; save it with 8 or 16 bits"
        )


def _by_profile(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Convert the colours to sRGB by the profile, where it has one that suits its pixels."""
    if image.mode == "LAB":
        return _converted(image, ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")))
    if profile:
        try:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            space = source.profile.xcolor_space.strip()
            if space == "RGB" and image.mode == "L":  # grey that was saved with a profile for colours: equal channels
                image = image.convert("RGB")
            if (space, image.mode) in (("RGB", "RGB"), ("GRAY", "L"), ("CMYK", "CMYK")):
                return _converted(image, source)
        except (ImageCms.PyCMSError, OSError, ValueError):
            pass  # a profile that is none: the pixels are taken for what most pixels are, sRGB
    return image.convert("RGB")


def _converted(image: Image.Image, source: ImageCms.ImageCmsProfile) -> Image.Image:
    converted = ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    assert converted is not None  # it is only where the image is changed in place
    return converted
