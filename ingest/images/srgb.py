"""Convert any pixels to sRGB: 16 bits to 8, apply colour profiles, blend transparency onto a background."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageCms

from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.ingest.images.sixteen_bits import strips

if TYPE_CHECKING:
    from numpy.typing import NDArray

PREMULTIPLIED = {"La": "LA", "RGBa": "RGBA"}
WITHOUT_ALPHA = {"LA": "L", "PA": "RGB", "RGBA": "RGB"}
PHOTOMETRIC, BITS_PER_SAMPLE, WHITE_IS_ZERO = 262, 258, 0  # TIFF tags, and the photometric value that inverts grey


def to_srgb(image: Image.Image, profile: bytes | None, background: str) -> Image.Image:
    """Return the image in mode RGB, sRGB, blended onto `background` (`#rrggbb`).

    Colours are assumed to be sRGB if `profile` is None, cannot be read or does not match the pixel format.
    """
    image, alpha = _split_alpha(image)
    colours = _by_profile(image, profile)
    if alpha is None:
        return colours
    blended = Image.new("RGB", colours.size, background)
    blended.paste(colours, None, alpha)
    return blended


def _split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
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
