"""Every file becomes upright sRGB pixels of its bucket, or a reject with its reason; never a crash."""

from __future__ import annotations

import io
import struct
import sys
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from bucketline.ingest.images import decode as decode_module
from bucketline.ingest.images.bucket_grid import parse_grid
from bucketline.ingest.images.crop import Crop, Framing
from bucketline.ingest.images.decode import Decoded, Reason, RejectedError, decode_image
from bucketline.ingest.images.srgb import to_srgb
from tests import profiles
from tests.commands import spawn
from tests.models import colour_image, encoded, png
from tests.photographs import crop_of

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

GRID = Framing(grid=parse_grid("64x96,96x64,64x64", step_px=8, align_px=8), min_size_px=16)
SQUARE = Framing(grid=parse_grid("square:64", step_px=8, align_px=8), min_size_px=16)
RGB = Image.fromarray(colour_image(64, 64))


def pixels(data: bytes) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = decode_image(data, SQUARE, "a.png").pixels
    return found


def rejected(data: bytes, **rules: Any) -> RejectedError:
    with pytest.raises(RejectedError) as error:
        decode_image(data, replace(GRID, **rules), "a.png")
    return error.value


def test_a_crop_drawn_from_the_id_shows_that_part_of_the_image() -> None:
    image = crop_of(2, 64, 400)
    seen = set()
    for name in ("a.png", "b.png", "c.png"):
        found = decode_image(encoded(image, "PNG"), replace(SQUARE, crop=Crop.RANDOM), name)
        left = found.placement.left
        assert found.placement.crop_in_source == (0, left, 64, 64)
        assert np.array_equal(found.pixels, np.asarray(image)[:, left : left + 64])
        seen.add(left)
    assert len(seen) == 3


def test_an_image_too_small_for_its_bucket_is_rejected_with_what_it_would_take() -> None:
    error = rejected(png(40, 60), max_upscale=Fraction(3, 2))
    assert error.reason is Reason.TOO_SMALL_FOR_BUCKET
    assert error.detail == "the least that a bucket needs is to enlarge it 1.6 times; max_upscale is 1.5"
    assert decode_image(png(40, 60), replace(GRID, max_upscale=Fraction(8, 5)), "a.png").placement.enlarged


def test_an_image_of_its_buckets_size_keeps_its_pixels() -> None:
    assert np.array_equal(pixels(png(64, 64)), colour_image(64, 64))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP", "PPM", "TGA"])
def test_lossless_formats_keep_every_pixel(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    assert np.array_equal(pixels(encoded(RGB, kind, **options)), colour_image(64, 64))


def test_what_is_transparent_shows_white() -> None:
    image = RGB.convert("RGBA")
    alpha = Image.new("L", (64, 64), 255)
    alpha.paste(0, (0, 0, 32, 64))
    image.putalpha(alpha)
    found = pixels(encoded(image, "PNG"))
    assert (found[:, :32] == 255).all()
    assert np.array_equal(found[:, 32:], colour_image(64, 64)[:, 32:])


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
    assert np.abs(jpeg.astype(int) - colour_image(64, 64)).mean() < 6


def test_a_colour_profile_is_applied_and_one_that_is_none_is_passed_over() -> None:
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert np.abs(pixels(encoded(RGB, "PNG", icc_profile=lab)).astype(int) - colour_image(64, 64)).max() <= 1
    assert np.array_equal(pixels(encoded(RGB, "PNG", icc_profile=b"nonsense")), colour_image(64, 64))


def test_floating_point_pixels_are_rejected_not_guessed_at() -> None:
    error = rejected(encoded(Image.fromarray(np.ones((64, 64), "<f4")), "TIFF"))
    assert error.reason is Reason.MODE


def test_thirty_two_bit_values_are_rejected_not_guessed_at() -> None:
    assert rejected(encoded(Image.fromarray(np.full((64, 64), 200, "<i4")), "TIFF")).reason is Reason.MODE


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_several_images_in_one_file_are_rejected(kind: str) -> None:
    others = [Image.fromarray(colour_image(64, 64, seed)) for seed in (1, 2)]
    error = rejected(encoded(RGB, kind, save_all=True, append_images=others))
    assert (error.reason, error.detail) == (Reason.ANIMATED, f"3 images in one {kind} file")


def test_a_still_gif_is_taken() -> None:
    assert pixels(encoded(RGB, "GIF")).shape == (64, 64, 3)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP", "BMP"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_file_cut_short_is_rejected_as_damaged(kind: str, share: float) -> None:
    data = encoded(Image.fromarray(colour_image(200, 200)), kind)
    assert rejected(data[: int(len(data) * share)]).reason in (Reason.DAMAGED, Reason.NOT_AN_IMAGE)


def test_a_file_cut_within_its_pixels_is_damaged_by_name() -> None:
    data = encoded(Image.fromarray(colour_image(200, 200)), "JPEG")
    error = rejected(data[: len(data) // 2])
    assert error.reason is Reason.DAMAGED
    assert "truncated" in error.detail


def test_a_jpeg_without_its_end_marker_is_rejected_whatever_its_last_bits_are() -> None:
    for side in range(20, 120):  # Pillow by itself takes some of them
        for progressive in (False, True):
            data = encoded(crop_of(side, side, side + 7), "JPEG", progressive=progressive)
            for cut in (data[:-2], data[:-1], data[:-2] + bytes(1000)):
                assert rejected(cut).reason is Reason.DAMAGED, side


def test_what_follows_the_end_of_a_jpeg_and_a_preview_before_it_count_for_nothing() -> None:
    exif = b"Exif\0\0" + encoded(RGB.resize((16, 16)), "JPEG")
    data = encoded(RGB, "JPEG", exif=exif)
    assert np.array_equal(pixels(data + bytes(1000)), pixels(encoded(RGB, "JPEG")))
    assert "its end marker (EOI) is missing" in rejected(data[:-2]).detail


def test_an_empty_file_is_rejected() -> None:
    assert (rejected(b"").reason, rejected(b"").detail) == (Reason.EMPTY, "0 bytes")


@pytest.mark.parametrize(
    "data", [b"x", b"a text", b"\x89PNG\r\n\x1a\n", b"%PDF-1.4", b"PK\x03\x04", bytes(1000), b"\xff\xd8\xff"]
)
def test_what_is_no_image_is_rejected(data: bytes) -> None:
    assert rejected(data).reason in (Reason.NOT_AN_IMAGE, Reason.DAMAGED)


def png_header(width: int, height: int) -> bytes:
    """Return a PNG that claims a size and holds next to nothing."""

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


def test_an_image_with_a_side_below_the_least_is_rejected_with_its_size() -> None:
    error = rejected(png(63, 200), min_size_px=64)
    assert (error.reason, error.detail) == (Reason.TOO_SMALL, "63x200 px, the short side must have 64")
    assert isinstance(decode_image(png(64, 200), replace(GRID, min_size_px=64), "a.png"), Decoded)


def test_a_small_image_is_enlarged_and_said_to_be() -> None:
    decoded = decode_image(png(20, 30), GRID, "a.png")
    assert decoded.placement.enlarged
    assert decoded.pixels.shape == (64, 96, 3)


@given(height=st.integers(16, 150), width=st.integers(16, 150))
@settings(max_examples=40)
def test_pixels_have_the_size_of_the_bucket_whatever_the_image(height: int, width: int) -> None:
    decoded = decode_image(png(height, width), GRID, "a.png")
    assert decoded.pixels.shape == (decoded.placement.bucket.height_px, decoded.placement.bucket.width_px, 3)
    assert decoded.placement.source == (height, width)


@given(
    at=st.integers(0, 1 << 30), value=st.integers(0, 255), kind=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"])
)
@settings(max_examples=300)
def test_a_damaged_byte_ends_in_pixels_or_in_a_reject(at: int, value: int, kind: str) -> None:
    data = bytearray(encoded(Image.fromarray(colour_image(40, 50)), kind))
    data[at % len(data)] = value
    try:
        assert decode_image(bytes(data), SQUARE, "a.png").pixels.shape == (64, 64, 3)
    except RejectedError as error:
        assert error.reason in Reason  # noqa: PT017 - either is right, anything else is not


def test_an_icon_that_hides_a_bomb_behind_a_small_size_is_rejected_before_it_is_unpacked() -> None:
    for cursor in (False, True):
        error = rejected(profiles.icon(png_header(50_000, 50_000), side=64, cursor=cursor))
        assert error.reason in (Reason.TOO_LARGE, Reason.DAMAGED)
    assert rejected(profiles.icon(png_header(50_000, 50_000), side=64)).reason is Reason.TOO_LARGE


def test_icons_and_cursors_are_read_and_one_that_lies_about_its_size_is_taken_for_what_it_holds() -> None:
    assert np.array_equal(pixels(profiles.icon(png(64, 64), side=64)), colour_image(64, 64))
    bitmap = bytearray(encoded(RGB.convert("RGBA"), "DIB"))
    struct.pack_into("<i", bitmap, 8, 128)  # an icon's height counts its mask too
    for cursor in (False, True):
        found = pixels(profiles.icon(bytes(bitmap) + bytes(64 * 8), side=64, cursor=cursor))
        assert np.array_equal(found, colour_image(64, 64)), cursor
    lying = decode_image(profiles.icon(png(96, 64), side=64), GRID, "a.ico")
    assert lying.placement.source == (96, 64)
    assert np.array_equal(lying.pixels, colour_image(96, 64))


@pytest.mark.parametrize("kind", [b"zTXt", b"iCCP", b"iTXt"])
@pytest.mark.parametrize(("num_bytes", "is_taken"), [(16 << 20, True), ((16 << 20) + 1, False)])
def test_a_text_or_a_profile_may_have_16_mib(kind: bytes, num_bytes: int, *, is_taken: bool) -> None:
    text = b"name\0" + (b"\x01\0\0\0" if kind == b"iTXt" else b"\0") + zlib.compress(bytes(num_bytes))
    data = profiles.png_of(64, 64, bytes(64 * 193), extra=profiles.png_chunk(kind, text))
    if is_taken:
        assert not pixels(data).any()
    else:
        assert rejected(data).reason is Reason.TOO_LARGE


@pytest.mark.parametrize("kind", [b"zTXt", b"iCCP", b"iTXt"])
def test_a_text_or_a_profile_that_inflates_hugely_is_rejected(kind: bytes) -> None:
    bomb = b"name\0" + (b"\x01\0\0\0" if kind == b"iTXt" else b"\0") + zlib.compress(bytes(1 << 27))
    error = rejected(profiles.png_of(64, 64, bytes(64 * 193), extra=profiles.png_chunk(kind, bomb)))
    assert error.reason is Reason.TOO_LARGE
    assert "a compressed text or colour profile in it" in error.detail


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        (b"<!DOCTYPE html><html><body>404", "a web page: it begins with '<!DOCTYPE html><html><body>404'"),
        (b"<?xml version='1.0'?><svg/>", "an SVG drawing: it begins with"),
        ("Grüße an alle".encode(), "a text: it begins with 'Grüße an alle'"),
        (("ü" * 500).encode(), "a text: it begins with 'üüü"),
        (b"%PDF-1.4", "a PDF document"),
        (b"PK\x03\x04", "a ZIP archive"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n", "a PostScript document"),
        (b"\0\0\0\x18ftypheic", "a HEIC image; it is damaged or of a kind that pillow_heif cannot read; convert it to PNG"),
        (b"\0\0\0\x18ftypisom", "a video"),
        (bytes(1000), "1000 bytes of zeros"),
        (b"\xfe\xfd\x01\x02" * 9, "36 bytes in no known format"),
    ],
)
def test_what_is_no_image_is_rejected_with_what_it_is(data: bytes, detail: str) -> None:
    error = rejected(data)
    assert error.reason is Reason.NOT_AN_IMAGE
    assert error.detail.startswith(detail)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("PNG", "PNG"), ("GIF", "GIF"), ("TIFF", "TIFF"), ("WEBP", "WebP"), ("BMP", "BMP"), ("AVIF", "AVIF")],
)
def test_an_image_cut_within_its_header_is_damaged_and_named(kind: str, name: str) -> None:
    error = rejected(encoded(RGB, kind)[:14])
    assert error.reason is Reason.DAMAGED
    assert f"begins like {name}," in error.detail


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0nonsense", b"Exif\0\0II*\0\x08\0\0\0\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x01"]
)
def test_broken_metadata_does_not_cost_a_sound_image(exif: bytes) -> None:
    found = pixels(encoded(RGB, "JPEG", quality=98, exif=exif))
    assert np.abs(found.astype(int) - colour_image(64, 64)).mean() < 3


@pytest.mark.parametrize(("height", "width"), [(1, 5000), (5000, 1), (1, 1), (2, 3)])
def test_a_strip_of_one_pixel_is_rejected_by_its_size_or_fills_its_bucket_where_asked_to(height: int, width: int) -> None:
    assert rejected(png(height, width)).reason is Reason.TOO_SMALL
    found = decode_image(png(height, width), replace(GRID, min_size_px=1), "a.png")
    assert found.pixels.shape == (found.placement.bucket.height_px, found.placement.bucket.width_px, 3)


def test_a_cameras_photograph_with_a_preview_behind_it_is_taken() -> None:
    data = encoded(crop_of(0, 96, 128), "MPO", save_all=True, append_images=[crop_of(0, 48, 64)])
    with Image.open(io.BytesIO(data)) as image:
        assert (image.format, getattr(image, "n_frames", 1)) == ("MPO", 2)
    assert decode_image(data, GRID, "a.jpg").placement.source == (96, 128)


def test_the_filters_of_warnings_are_put_back_whatever_threads_decode() -> None:
    """A palette with opacities and bad metadata make Pillow warn; a filter that each thread set would outlive them all."""
    before = list(warnings.filters)
    odd = encoded(RGB.quantize(8), "PNG", transparency=bytes(range(0, 256, 32)))
    worse = encoded(RGB, "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff")
    with ThreadPoolExecutor(8) as pool:
        sizes = set(pool.map(lambda n: decode_image((odd, worse)[n % 2], SQUARE, "a.png").pixels.shape, range(64)))
    assert sizes == {(64, 64, 3)}
    assert list(warnings.filters) == before


def test_giants_are_decoded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_module, "GIANT_PIXELS", 100)
    at_once: list[int] = []
    inside: list[int] = []

    def counted(image: Image.Image, *rules: Any) -> Image.Image:
        inside.append(1)
        at_once.append(len(inside))
        found = to_srgb(image, *rules)
        inside.pop()
        return found

    monkeypatch.setattr(decode_module, "to_srgb", counted)
    data = encoded(crop_of(0, 200, 200), "PNG")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: decode_image(data, SQUARE, "a.png"), range(12)))
    assert at_once == [1] * 12


@pytest.mark.parametrize("level", [0, 6])
@pytest.mark.parametrize("at", [40, 400, 2000, 8000])
def test_a_bit_flipped_in_the_pixels_of_a_png_is_found(level: int, at: int) -> None:
    """Reading a PNG's metadata loads it; an error swallowed there once let half-decoded pixels through."""
    data = bytearray(encoded(crop_of(0, 96, 96), "PNG", compress_level=level))
    data[data.index(b"IDAT") + at] ^= 16
    error = rejected(bytes(data))
    assert error.reason is Reason.DAMAGED
    assert "truncated or damaged" in error.detail


DECODING = """
import sys
from tests.process_memory import in_memory
from bucketline.ingest.images.decode import decode_image
from bucketline.ingest.images.crop import Framing
from bucketline.ingest.images.bucket_grid import parse_grid
framing = Framing(grid=parse_grid("square:64", step_px=8, align_px=8))
for path in sys.argv[1:]:
    decode_image(open(path, "rb").read(), framing, path)
    print(in_memory("VmHWM"))
"""


@pytest.mark.parametrize(("kind", "most"), [("grey", 9), ("grey, a colour clear", 15), ("RGB", 9)])
def test_a_deep_image_takes_a_few_bytes_of_memory_a_pixel(kind: str, most: int, tmp_path: Path) -> None:
    """A file of a few megabytes may hold 268 megapixels: what is computed on the way to 8 bits must not count."""
    for name, side in (("small.png", 2048), ("large.png", 4096)):
        values = np.full((side, side) if kind != "RGB" else (side, side, 3), 1000, dtype="<u2")
        clear = profiles.png_chunk(b"tRNS", bytes(2)) if "clear" in kind else b""
        (tmp_path / name).write_bytes(profiles.deep_png(values, clear))
    ran = spawn([sys.executable, "-c", DECODING, tmp_path / "small.png", tmp_path / "large.png"]).done()
    before, after = map(int, ran.out.split())
    assert (after - before) / (4096**2 - 2048**2) <= most
