"""However a camera was held, and at whatever fraction a JPEG is decoded: one placement, the same pixels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, JpegImagePlugin

from bucketline.ingest.images.bucket_grid import parse_grid
from bucketline.ingest.images.crop import Crop, Framing
from bucketline.ingest.images.decode import decode_image
from tests.models import encoded
from tests.photographs import crop_of

GRID = Framing(grid=parse_grid("64x96,96x64,64x64", step_px=8, align_px=8), min_size_px=16)
SQUARE = Framing(grid=parse_grid("square:64", step_px=8, align_px=8), min_size_px=16)
TURNS = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def turned(upright: Image.Image, orientation: int, kind: str, **options: Any) -> bytes:
    """Store an image as a camera held otherwise does: turned, with a note of how to turn it back."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    turn = TURNS[orientation]
    return encoded(upright if turn is None else upright.transpose(turn), kind, exif=exif, **options)


@pytest.mark.parametrize("crop", list(Crop))
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_that_differ_in_how_the_camera_was_held_get_one_placement_and_the_same_pixels(
    orientation: int, crop: Crop
) -> None:
    upright = crop_of(3, 290, 431)  # neither side a multiple of a JPEG's blocks
    framing = replace(GRID, crop=crop)
    plain = decode_image(encoded(upright, "PNG"), framing, "a.jpg")
    for kind, options, tolerance in (
        ("TIFF", {}, 0),
        ("WEBP", {"lossless": True}, 0),
        ("PNG", {}, 0),
        ("JPEG", {"quality": 98, "subsampling": 0}, 8),
    ):
        found = decode_image(turned(upright, orientation, kind, **options), framing, "a.jpg")
        assert found.placement == plain.placement
        assert np.abs(found.pixels.astype(int) - plain.pixels).max() <= tolerance, kind


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("height", "width"), [(301, 423), (381, 263), (399, 397)])
def test_a_jpeg_decoded_at_a_fraction_gives_the_same_image_however_it_was_held(
    orientation: int, height: int, width: int
) -> None:
    """At an eighth, 423 columns become 53, of which the last is 7/8 full: mirrored, it is the first."""
    data = turned(crop_of(0, height, width), orientation, "JPEG", quality=98, subsampling=0)
    framing = replace(GRID, grid=parse_grid("16x24,24x16,16x16", step_px=8, align_px=8))
    whole, reduced = (decode_image(data, replace(framing, jpeg_draft=draft), "a.jpg") for draft in (False, True))
    assert whole.placement == reduced.placement
    difference = np.abs(whole.pixels.astype(int) - reduced.pixels)
    assert 0 < difference.mean() < 1.5
    assert difference.max() < 30


def test_a_jpeg_is_decoded_at_a_fraction_only_where_twice_the_resized_image_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[tuple[int, int]] = []
    load = JpegImagePlugin.JpegImageFile.load

    def noted(image: JpegImagePlugin.JpegImageFile) -> Any:
        loaded.append(image.size)
        return load(image)

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "load", noted)
    for side, expected in ((64, 64), (128, 128), (255, 255), (256, 128), (400, 200)):
        loaded.clear()
        data = encoded(crop_of(1, side, side), "JPEG")
        decode_image(data, replace(SQUARE, jpeg_draft=True), "a.jpg")
        assert loaded[0] == (expected, expected)
        loaded.clear()
        decode_image(data, SQUARE, "a.jpg")
        assert loaded[0] == (side, side)
