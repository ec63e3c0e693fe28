"""Every file becomes upright sRGB pixels of its bucket, or a reject with its reason; never a crash."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageCms

from bucketline.ingest.decode import Decoded, Reason, RejectedError, decode
from bucketline.ingest.framing import Framing
from bucketline.ingest.grids import parse_grid
from tests.models import encoded, picture, png

if TYPE_CHECKING:
    from numpy.typing import NDArray

GRID = Framing(grid=parse_grid("64x96,96x64,64x64", step_px=8, align_px=8), min_size_px=16)
SQUARE = Framing(grid=parse_grid("square:64", step_px=8, align_px=8), min_size_px=16)
RGB = Image.fromarray(picture(64, 64))


def pixels(data: bytes) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = decode(data, SQUARE, "a.png").pixels
    return found


def rejected(data: bytes, **rules: Any) -> RejectedError:
    with pytest.raises(RejectedError) as error:
        decode(data, replace(GRID, **rules), "a.png")
    return error.value


@pytest.mark.parametrize("orientation", range(1, 9))
def test_twins_that_differ_in_how_they_were_turned_come_into_one_bucket_with_equal_pixels(orientation: int) -> None:
    undo = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    upright = Image.fromarray(picture(70, 100))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    stored = upright if undo is None else upright.transpose(undo)
    one, other = decode(encoded(upright, "PNG"), GRID, "a.png"), decode(encoded(stored, "PNG", exif=exif), GRID, "a.png")
    assert one.placement == other.placement
    assert (one.placement.bucket.height_px, one.placement.bucket.width_px) == (64, 96)
    assert np.array_equal(one.pixels, other.pixels)


def test_a_picture_of_its_buckets_size_keeps_its_pixels() -> None:
    assert np.array_equal(pixels(png(64, 64)), picture(64, 64))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP", "PPM", "TGA"])
def test_lossless_formats_keep_every_pixel(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    assert np.array_equal(pixels(encoded(RGB, kind, **options)), picture(64, 64))


def test_what_is_transparent_shows_white() -> None:
    image = RGB.convert("RGBA")
    alpha = Image.new("L", (64, 64), 255)
    alpha.paste(0, (0, 0, 32, 64))
    image.putalpha(alpha)
    found = pixels(encoded(image, "PNG"))
    assert (found[:, :32] == 255).all()
    assert np.array_equal(found[:, 32:], picture(64, 64)[:, 32:])


def test_half_transparent_grey_is_halfway_to_white() -> None:
    found = pixels(encoded(Image.new("LA", (64, 64), (100, 128)), "PNG"))
    assert np.unique(found).tolist() in ([177], [178])


def test_a_palette_is_looked_up_with_and_without_a_transparent_colour() -> None:
    indexed = RGB.quantize(16)
    assert np.array_equal(pixels(encoded(indexed, "PNG")), np.asarray(indexed.convert("RGB")))
    first = int(np.asarray(indexed)[0, 0])
    found = pixels(encoded(indexed, "PNG", transparency=first))
    where = np.asarray(indexed) == first
    assert (found[where] == 255).all()
    assert np.array_equal(found[~where], np.asarray(indexed.convert("RGB"))[~where])


def test_sixteen_bits_become_eight_by_value_not_by_clipping() -> None:
    ramp = np.linspace(0, 65535, 64).astype("<u2")[None].repeat(64, 0)
    found = pixels(encoded(Image.fromarray(ramp), "PNG"))
    assert np.array_equal(found, np.round(ramp / 257).astype("u1")[..., None].repeat(3, -1))


def test_grey_black_and_white_and_cmyk_become_rgb() -> None:
    grey = RGB.convert("L")
    assert np.array_equal(pixels(encoded(grey, "PNG")), np.asarray(grey)[..., None].repeat(3, -1))
    assert set(np.unique(pixels(encoded(grey.convert("1"), "PNG")))) == {0, 255}
    cmyk = pixels(encoded(Image.new("CMYK", (64, 64), (255, 0, 0, 0)), "TIFF"))
    assert cmyk[0, 0].tolist() == [0, 255, 255]
    jpeg = pixels(encoded(RGB.convert("CMYK"), "JPEG", quality=98))
    assert np.abs(jpeg.astype(int) - picture(64, 64)).mean() < 6


def test_a_colour_profile_is_applied_and_one_that_is_none_is_passed_over() -> None:
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert np.abs(pixels(encoded(RGB, "PNG", icc_profile=lab)).astype(int) - picture(64, 64)).max() <= 1
    assert np.array_equal(pixels(encoded(RGB, "PNG", icc_profile=b"nonsense")), picture(64, 64))


def test_floating_point_pixels_are_rejected_not_guessed_at() -> None:
    error = rejected(encoded(Image.fromarray(np.ones((64, 64), "<f4")), "TIFF"))
    assert error.reason is Reason.MODE


def test_thirty_two_bit_values_are_rejected_not_guessed_at() -> None:
    assert rejected(encoded(Image.fromarray(np.full((64, 64), 200, "<i4")), "TIFF")).reason is Reason.MODE


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_several_pictures_in_one_file_are_rejected(kind: str) -> None:
    others = [Image.fromarray(picture(64, 64, seed)) for seed in (1, 2)]
    error = rejected(encoded(RGB, kind, save_all=True, append_images=others))
    assert (error.reason, error.detail) == (Reason.ANIMATED, f"3 pictures in one {kind} file")


def test_a_still_gif_is_taken() -> None:
    assert pixels(encoded(RGB, "GIF")).shape == (64, 64, 3)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP", "BMP"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_file_cut_short_is_rejected_as_damaged(kind: str, share: float) -> None:
    data = encoded(Image.fromarray(picture(200, 200)), kind)
    assert rejected(data[: int(len(data) * share)]).reason in (Reason.DAMAGED, Reason.NOT_AN_IMAGE)


def test_a_file_cut_within_its_pixels_is_damaged_by_name() -> None:
    data = encoded(Image.fromarray(picture(200, 200)), "JPEG")
    error = rejected(data[: len(data) // 2])
    assert error.reason is Reason.DAMAGED
    assert "truncated" in error.detail


def test_an_empty_file_is_rejected() -> None:
    assert (rejected(b"").reason, rejected(b"").detail) == (Reason.EMPTY, "0 bytes")


@pytest.mark.parametrize(
    "data", [b"x", b"a text", b"\x89PNG\r\n\x1a\n", b"%PDF-1.4", b"PK\x03\x04", bytes(1000), b"\xff\xd8\xff"]
)
def test_what_is_no_image_is_rejected(data: bytes) -> None:
    assert rejected(data).reason in (Reason.NOT_AN_IMAGE, Reason.DAMAGED)


def png_header(width: int, height: int) -> bytes:
    """Give a PNG that claims a size and holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("width", "height"), [(1 << 17, 1 << 17), (1 << 30, 1), (20_000, 20_000), ((1 << 31) - 1, (1 << 31) - 1)]
)
def test_a_bomb_is_rejected_by_its_header_before_anything_is_unpacked(width: int, height: int) -> None:
    error = rejected(png_header(width, height))
    assert error.reason in (Reason.TOO_LARGE, Reason.TOO_SMALL)


def test_a_picture_with_a_side_below_the_least_is_rejected_with_its_size() -> None:
    error = rejected(png(63, 200), min_size_px=64)
    assert (error.reason, error.detail) == (Reason.TOO_SMALL, "63x200 px, the short side must have 64")
    assert isinstance(decode(png(64, 200), replace(GRID, min_size_px=64), "a.png"), Decoded)


def test_a_small_picture_is_enlarged_and_said_to_be() -> None:
    decoded = decode(png(20, 30), GRID, "a.png")
    assert decoded.placement.enlarged
    assert decoded.pixels.shape == (64, 96, 3)


@given(height=st.integers(16, 150), width=st.integers(16, 150))
@settings(max_examples=40)
def test_pixels_have_the_size_of_the_bucket_whatever_the_picture(height: int, width: int) -> None:
    decoded = decode(png(height, width), GRID, "a.png")
    assert decoded.pixels.shape == (decoded.placement.bucket.height_px, decoded.placement.bucket.width_px, 3)
    assert decoded.placement.source == (height, width)


@given(
    at=st.integers(0, 1 << 30), value=st.integers(0, 255), kind=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"])
)
@settings(max_examples=300)
def test_a_damaged_byte_ends_in_pixels_or_in_a_reject(at: int, value: int, kind: str) -> None:
    data = bytearray(encoded(Image.fromarray(picture(40, 50)), kind))
    data[at % len(data)] = value
    try:
        assert decode(bytes(data), SQUARE, "a.png").pixels.shape == (64, 64, 3)
    except RejectedError as error:
        assert error.reason in Reason  # noqa: PT017 - either is right, anything else is not


def test_pil_is_left_as_it_was() -> None:
    before = Image.MAX_IMAGE_PIXELS
    rejected(png_header(20_000, 20_000))
    assert before == Image.MAX_IMAGE_PIXELS
