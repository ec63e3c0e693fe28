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
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import ExifTags, Image, JpegImagePlugin

from bucketline.ingest.images import decode as decode_module
from bucketline.ingest.images.crop import Crop, Framing, crop_limit, parse_grid
from bucketline.ingest.images.decode import Reason, RejectedError, decode_image, placed_by_header
from bucketline.ingest.images.pixels import to_srgb
from tests import kinds_of_images, profiles
from tests.commands import spawn
from tests.models import colour_image, encoded, png
from tests.photographs import crop_of

GRID = Framing(grid=parse_grid("64x96,96x64,64x64", step_px=8, align_px=8), min_size_px=16)
SQUARE = Framing(grid=parse_grid("square:64", step_px=8, align_px=8), min_size_px=16)
RGB = Image.fromarray(colour_image(64, 64))


def pixels(data: bytes) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = decode_image(data, SQUARE, "a.png")[0]
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
        left = found[1].left
        assert found[1].crop_in_source == (0, left, 64, 64)
        assert np.array_equal(found[0], np.asarray(image)[:, left : left + 64])
        seen.add(left)
    assert len(seen) == 3


@pytest.mark.parametrize(("height", "width", "limit"), [(40, 60, Fraction(8, 5)), (20, 30, None)])
def test_an_image_too_small_for_its_bucket_is_enlarged_as_far_as_it_may(height: int, width: int, limit: Any) -> None:
    pixels, placement = decode_image(png(height, width), replace(GRID, max_upscale=limit), "a.png")
    assert placement.enlarged
    assert pixels.shape == (64, 96, 3)


def test_every_kind_of_image_has_the_pixels_that_it_was_made_of() -> None:
    background = "#{:02x}{:02x}{:02x}".format(*kinds_of_images.BACKGROUND)
    for image in (image for number in range(2) for image in kinds_of_images.images(number)):
        grid = parse_grid(f"{image.truth.height}x{image.truth.width}", step_px=1, align_px=1)
        framing = Framing(grid=grid, background=background)
        found, placement = decode_image(image.data, framing, image.name)
        most = 1 if image.name.startswith("wide_gamut") else 0  # by another arithmetic
        assert np.abs(found.astype(int) - np.asarray(image.truth)).max() <= most, image.name
        assert placed_by_header(io.BytesIO(image.data), framing, image.name) == placement


def test_every_file_that_is_no_such_image_is_rejected_with_its_reason() -> None:
    grid = parse_grid("48x64,64x48,48x48", step_px=8, align_px=8)
    framing = Framing(grid=grid, min_size_px=16, max_upscale=Fraction(2), max_crop=crop_limit(0.75))
    for file in (file for number in range(2) for file in kinds_of_images.refused(number)):
        with pytest.raises(RejectedError) as error:
            decode_image(file.data, framing, file.name)
        assert error.value.reason is file.reason, file.name
        if file.reason not in (Reason.DAMAGED, Reason.TOO_LARGE):  # which are seen behind the header
            with pytest.raises(RejectedError) as by_header:
                placed_by_header(io.BytesIO(file.data), framing, file.name)
            assert (by_header.value.reason, by_header.value.detail) == (file.reason, error.value.detail)


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


def png_header(width: int, height: int) -> bytes:
    """Return a PNG that claims a size and holds next to nothing."""
    return profiles.png_of(width, height, bytes(100))


@pytest.mark.parametrize(
    ("width", "height"), [(1 << 17, 1 << 17), (1 << 30, 1), (20_000, 20_000), ((1 << 31) - 1, (1 << 31) - 1)]
)
def test_a_bomb_is_rejected_by_its_header_before_anything_is_unpacked(width: int, height: int) -> None:
    error = rejected(png_header(width, height))
    assert error.reason in (Reason.TOO_LARGE, Reason.TOO_SMALL)


@given(height=st.integers(16, 150), width=st.integers(16, 150))
@settings(max_examples=40)
def test_pixels_have_the_size_of_the_bucket_whatever_the_image(height: int, width: int) -> None:
    pixels, placement = decode_image(png(height, width), GRID, "a.png")
    assert pixels.shape == (placement.bucket.height_px, placement.bucket.width_px, 3)
    assert placement.source == (height, width)


@given(
    at=st.integers(0, 1 << 30), value=st.integers(0, 255), kind=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"])
)
@settings(max_examples=300)
def test_a_damaged_byte_ends_in_pixels_or_in_a_reject(at: int, value: int, kind: str) -> None:
    data = bytearray(encoded(Image.fromarray(colour_image(40, 50)), kind))
    data[at % len(data)] = value
    try:
        assert decode_image(bytes(data), SQUARE, "a.png")[0].shape == (64, 64, 3)
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
    found, placement = decode_image(profiles.icon(png(96, 64), side=64), GRID, "a.ico")
    assert placement.source == (96, 64)
    assert np.array_equal(found, colour_image(96, 64))


@pytest.mark.parametrize("kind", [b"zTXt", b"iCCP", b"iTXt"])
@pytest.mark.parametrize(("num_bytes", "is_taken"), [(16 << 20, True), ((16 << 20) + 1, False)])
def test_a_text_or_a_profile_may_have_16_mib(kind: bytes, num_bytes: int, *, is_taken: bool) -> None:
    text = b"name\0" + (b"\x01\0\0\0" if kind == b"iTXt" else b"\0") + zlib.compress(bytes(num_bytes))
    data = profiles.png_of(64, 64, bytes(64 * 193), extra=profiles.png_chunk(kind, text))
    if is_taken:
        assert not pixels(data).any()
    else:
        assert rejected(data).reason is Reason.TOO_LARGE


REJECTS: list[tuple[bytes, dict[str, Any], Reason, str]] = [
    (b"", {}, Reason.EMPTY, "0 bytes"),
    (png(63, 200), {"min_size_px": 64}, Reason.TOO_SMALL, "63x200 px, the short side must have 64"),
    (
        png(40, 60),
        {"max_upscale": Fraction(3, 2)},
        Reason.TOO_SMALL_FOR_BUCKET,
        "the least that a bucket needs is to enlarge it 1.6",
    ),
    *(
        (data, {}, Reason.NOT_AN_IMAGE, detail)
        for data, detail in (
            (b"x", "it begins with 'x'"),
            (b"<!DOCTYPE html><html><body>404", "it begins with '<!DOCTYPE html><html><body>404'"),
            (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n", "it begins with '%!PS-Adobe"),
            (b"\0\0\0\x18ftypheic", "a HEIC image; it is damaged or of a kind that pillow_heif cannot read"),
            (b"\0\0\0\x18ftypisom", "ftypisom"),
            (bytes(1000), "it begins with '\\x00\\x00"),
        )
    ),
    *(
        (encoded(RGB, name.upper())[:14], {}, Reason.DAMAGED, f"begins like {name},")
        for name in ("PNG", "GIF", "TIFF", "WebP", "BMP", "AVIF")
    ),
]


@pytest.mark.parametrize(("data", "rules", "reason", "detail"), REJECTS, ids=lambda one: str(one)[:40])
def test_what_cannot_be_taken_is_rejected_with_its_reason(
    data: bytes, rules: dict[str, Any], reason: Reason, detail: str
) -> None:
    error = rejected(data, **rules)
    assert error.reason is reason
    assert detail in error.detail


@pytest.mark.parametrize(("height", "width"), [(1, 5000), (5000, 1), (1, 1), (2, 3)])
def test_a_strip_of_one_pixel_is_rejected_by_its_size_or_fills_its_bucket_where_asked_to(height: int, width: int) -> None:
    assert rejected(png(height, width)).reason is Reason.TOO_SMALL
    found = decode_image(png(height, width), replace(GRID, min_size_px=1), "a.png")
    assert found[0].shape == (found[1].bucket.height_px, found[1].bucket.width_px, 3)


def test_the_filters_of_warnings_are_put_back_whatever_threads_decode() -> None:
    """A palette with opacities and bad metadata make Pillow warn; a filter that each thread set would outlive them all."""
    before = list(warnings.filters)
    odd = encoded(RGB.quantize(8), "PNG", transparency=bytes(range(0, 256, 32)))
    worse = encoded(RGB, "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff")
    with ThreadPoolExecutor(8) as pool:
        sizes = set(pool.map(lambda n: decode_image((odd, worse)[n % 2], SQUARE, "a.png")[0].shape, range(64)))
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
from bucketline.ingest.images.crop import parse_grid
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


# However a camera was held, and at whatever fraction a JPEG is decoded: one placement, the same pixels.

TURNS = {1: None, **kinds_of_images.TURNS}


def turned(upright: Image.Image, orientation: int, kind: str, **options: Any) -> bytes:
    """Store an image as a camera held otherwise does: turned, with a note of how to turn it back."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    turn = TURNS[orientation]
    return encoded(upright if turn is None else upright.transpose(turn), kind, exif=exif, **options)


@pytest.mark.parametrize("crop", list(Crop))
@pytest.mark.parametrize("orientation", range(1, 9))
def test_however_a_camera_was_held_a_photograph_has_one_placement_and_its_pixels(orientation: int, crop: Crop) -> None:
    upright = crop_of(3, 290, 431)  # neither side a multiple of a JPEG's blocks
    framing = replace(GRID, crop=crop)
    plain = decode_image(encoded(upright, "PNG"), framing, "a.jpg")
    for kind, options, tolerance in (("TIFF", {}, 0), ("JPEG", {"quality": 98, "subsampling": 0}, 8)):
        found = decode_image(turned(upright, orientation, kind, **options), framing, "a.jpg")
        assert found[1] == plain[1]
        assert np.abs(found[0].astype(int) - plain[0]).max() <= tolerance, kind


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("height", "width"), [(301, 423), (381, 263), (399, 397)])
def test_a_jpeg_at_a_fraction_gives_the_same_image_however_it_was_held(orientation: int, height: int, width: int) -> None:
    """At an eighth, 423 columns become 53, of which the last is 7/8 full: mirrored, it is the first."""
    data = turned(crop_of(0, height, width), orientation, "JPEG", quality=98, subsampling=0)
    framing = replace(GRID, grid=parse_grid("16x24,24x16,16x16", step_px=8, align_px=8))
    whole, reduced = (decode_image(data, replace(framing, jpeg_draft=draft), "a.jpg") for draft in (False, True))
    assert whole[1] == reduced[1]
    difference = np.abs(whole[0].astype(int) - reduced[0])
    assert 0 < difference.mean() < 1.5
    assert difference.max() < 30


def test_a_jpeg_is_decoded_at_a_fraction_if_twice_the_resized_image_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
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


# HEIC and JPEG XL: read with the extra `heif`, and named with it where it is not installed.

FRAMING = Framing(grid=parse_grid("64x96,96x64", step_px=8, align_px=8), max_upscale=Fraction(1), min_size_px=16)
WITHOUT = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("pillow_heif", "pillow_jxl") else find(name, *rest)
from bucketline.ingest.cli import main
sys.exit(main(["scan", sys.argv[1], "--json"]))
"""


@pytest.mark.parametrize(("kind", "options", "distance"), [("HEIF", {"quality": 95}, 3.0), ("JXL", {"lossless": True}, 0.0)])
def test_an_image_that_a_plugin_reads_is_what_was_saved(kind: str, options: dict[str, int], distance: float) -> None:
    kept = colour_image(64, 96)
    data = encoded(Image.fromarray(kept), kind, **options)
    pixels, placement = decode_image(data, FRAMING, "a")
    assert pixels.shape == (64, 96, 3)
    assert np.abs(pixels.astype(int) - kept.astype(int)).mean() <= distance
    assert placed_by_header(io.BytesIO(data), FRAMING, "a") == placement


def test_a_photograph_that_a_telephone_turned_is_turned_once() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    kept = colour_image(64, 96)
    data = encoded(Image.fromarray(kept), "HEIF", exif=exif.tobytes(), quality=95)
    pixels, placement = decode_image(data, FRAMING, "a")
    assert pixels.shape == (96, 64, 3)
    assert np.abs(pixels.astype(int) - np.rot90(kept, -1).astype(int)).mean() <= 3
    assert placed_by_header(io.BytesIO(data), FRAMING, "a") == placement


def test_without_the_extra_the_reject_names_it(tmp_path: Path) -> None:
    image = Image.fromarray(colour_image(64, 96))
    (tmp_path / "a.heic").write_bytes(encoded(image, "HEIF"))
    (tmp_path / "b.jxl").write_bytes(encoded(image, "JXL"))
    (tmp_path / "c.png").write_bytes(encoded(image, "PNG"))
    ran = spawn([sys.executable, "-c", WITHOUT, tmp_path]).done()
    remedy = "convert it to PNG, JPEG or WebP, or install the extra heif: pip install 'bucketline[heif]'"
    assert {reject["id"]: reject["detail"] for reject in ran.json["rejects"]} == {
        "a.heic": f"a HEIC image; {remedy}",
        "b.jxl": f"a JPEG XL image; {remedy}",
    }
