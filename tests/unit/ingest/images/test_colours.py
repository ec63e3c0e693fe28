"""Colours come out as the numbers say: profiles, code points, depths, inks, transparency; HDR is rejected."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from bucketline.ingest.images.crop import Framing, parse_grid
from bucketline.ingest.images.decode import Reason, RejectedError, decode_image, placed_by_header
from bucketline.ingest.images.pixels import colour_profile, to_srgb
from tests import profiles
from tests.models import encoded
from tests.profiles import avif, cicp, with_chunk

SIDE = 64
SQUARE = Framing(grid=parse_grid("square:64", step_px=8, align_px=8), min_size_px=1)
COLOURS = np.array(
    [(255, 255, 255), (0, 0, 0), (128, 128, 128), (200, 60, 60), (60, 200, 60), (60, 60, 200), (230, 190, 40), (20, 90, 120)]
)
MUTED = COLOURS.copy()  # within sRGB where they are of a wider gamut
MUTED[3:] = (190, 70, 70), (104, 197, 82), (60, 70, 190), (210, 190, 60), (210, 190, 60)


def pixels(data: bytes, **rules: Any) -> NDArray[np.int64]:
    framing = Framing(grid=SQUARE.grid, min_size_px=1, **rules)
    return decode_image(data, framing, "a.png")[0].astype(int)


def patches(colours: NDArray[np.int64] = COLOURS) -> NDArray[np.uint8]:
    return colours.astype("u1").repeat(8, axis=0)[:, None].repeat(SIDE, axis=1)


def stripes(found: NDArray[np.int64]) -> NDArray[np.int64]:
    return found[4::8, SIDE // 2]


def test_an_image_that_is_srgb_already_is_not_copied() -> None:
    image = Image.fromarray(patches())
    assert to_srgb(image, None, "#ffffff") is image


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP"])
@pytest.mark.parametrize(("colourants", "gamma"), [(profiles.ADOBE_RGB, 563 / 256), (profiles.SRGB[:, ::-1], 1.5)])
def test_a_wide_gamut_profile_comes_out_as_its_arithmetic_says(
    kind: str, colourants: NDArray[np.float64], gamma: float
) -> None:
    lossless: dict[str, dict[str, Any]] = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}
    options = lossless.get(kind, {})
    profile = profiles.matrix_profile(colourants, gamma)
    found = stripes(pixels(encoded(Image.fromarray(patches()), kind, icc_profile=profile, **options)))
    expected = profiles.srgb_of((COLOURS / 255) ** gamma @ colourants.T)
    assert np.abs(found - expected).max() < (4 if kind == "JPEG" else 2)
    assert np.abs(found - COLOURS).max() > 20  # the profile does something


def test_a_profile_counts_the_same_under_transparency_in_a_palette_and_in_grey_saved_as_colour() -> None:
    profile = profiles.matrix_profile(profiles.ADOBE_RGB, 2.2)
    image = Image.fromarray(patches())
    plain = pixels(encoded(image, "PNG", icc_profile=profile))
    alpha = image.copy()
    alpha.putalpha(255)
    assert np.abs(pixels(encoded(alpha, "PNG", icc_profile=profile)) - plain).max() <= 1
    indexed = image.quantize(8)
    assert np.array_equal(np.asarray(indexed.convert("RGB")), patches())
    assert np.abs(pixels(encoded(indexed, "PNG", icc_profile=profile)) - plain).max() <= 1
    grey = Image.fromarray(np.full((SIDE, SIDE), 100, "u1"))
    steeper = profiles.matrix_profile(profiles.SRGB, 1.0)
    expected = profiles.srgb_of(np.full(3, 100 / 255) @ profiles.SRGB.T)
    assert np.abs(pixels(encoded(grey, "PNG", icc_profile=steeper)) - expected).max() < 2


@pytest.mark.parametrize("mode", ["L", "LA", "I;16"])
def test_a_grey_profile_is_applied_to_grey_of_every_kind(mode: str) -> None:
    image = Image.fromarray(np.full((SIDE, SIDE), 100, "u1"))
    deep = Image.fromarray(np.full((SIDE, SIDE), 100 * 257, "<u2"))
    data = encoded(deep if mode == "I;16" else image.convert(mode), "PNG", icc_profile=profiles.grey_profile(1.0))
    expected = profiles.srgb_of(np.full(3, 100 / 255) @ profiles.SRGB.T)[0]
    assert np.abs(pixels(data) - expected).max() < 2
    assert expected > 160


@pytest.mark.parametrize(
    "profile", [b"nonsense", b"", profiles.grey_profile(1.0), profiles.matrix_profile(profiles.SRGB, 1.0)[:200]]
)
def test_a_profile_that_is_none_or_belongs_to_other_pixels_is_passed_over(profile: bytes) -> None:
    assert np.array_equal(pixels(encoded(Image.fromarray(patches()), "PNG", icc_profile=profile)), patches())


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_inks_come_out_as_their_profile_says(kind: str) -> None:
    corners = np.zeros((2, 2, 2, 2, 3))
    corners[..., 0] = [
        [[[100, 0], [90, 0]], [[50, 0], [45, 0]]],
        [[[60, 0], [55, 0]], [[30, 0], [22, 0]]],
    ]  # paper is white, and black is black
    corners[1, 0, 0, 0, 1:] = (-30, -40)
    corners[0, 1, 0, 0, 1:] = (60, -5)
    corners[0, 0, 1, 0, 1:] = (-5, 80)
    for inks in [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, 0)]:
        image = Image.new("CMYK", (SIDE, SIDE), tuple(255 * ink for ink in inks))
        data = encoded(image, kind, icc_profile=profiles.ink_profile(corners), **({"quality": 100} if kind == "JPEG" else {}))
        expected = profiles.srgb_of(profiles.xyz_of_lab(corners[inks]))
        assert np.abs(pixels(data) - expected).max() < 6, inks  # the table holds Lab in 8 bits


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_sixteen_bits_a_channel_become_eight_by_value(channels: int) -> None:
    """Every value there is, in another order in each channel, rounded to the nearest level."""
    whole = Framing(grid=parse_grid("256x256", step_px=8, align_px=8), min_size_px=1)
    values = np.stack([np.random.default_rng(n).permutation(65536) for n in range(channels)], axis=-1).astype("<u2")
    values = values.reshape(256, 256, channels)
    if channels != 3:
        values[..., -1] = 65535
    found = decode_image(profiles.deep_png(values), whole, "a.png")[0]
    colours = values if channels == 3 else values[..., :-1]
    assert np.array_equal(found, np.broadcast_to(np.round(colours / 257), (256, 256, 3)))


def test_opacity_of_sixteen_bits_is_rounded_as_well() -> None:
    values = np.zeros((SIDE, SIDE, 4), dtype="<u2")
    values[..., 3] = np.linspace(0, 65535, SIDE * SIDE).reshape(SIDE, SIDE)
    expected = 255 - np.round(values[..., 3:] / 257)
    assert np.abs(pixels(profiles.deep_png(values)) - expected).max() <= 0  # black over white
    both = values[..., [0, 3]]
    assert np.abs(pixels(profiles.deep_png(both)) - expected).max() <= 0


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("compression", [1, 8])
@pytest.mark.parametrize("channels", [3, 4])
def test_sixteen_bit_tiffs_of_either_byte_order_become_eight_by_value(channels: int, compression: int, order: str) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (SIDE, SIDE, channels))
    values[..., 3:] = 65535
    data = profiles.deep_tiff(values, order=order, compression=compression)
    assert np.array_equal(pixels(data), np.round(values[..., :3] / 257))


def test_a_colour_of_sixteen_bits_that_stands_for_transparent_is_that_colour_alone() -> None:
    values = np.full((SIDE, SIDE, 3), (0x1234, 0x5678, 0x9ABC), dtype="<u2")
    values[:32] = (0x1235, 0x5678, 0x9ABC)  # the same high bytes
    clear = profiles.png_chunk(b"tRNS", struct.pack(">HHH", 0x1234, 0x5678, 0x9ABC))
    found = pixels(profiles.deep_png(values, clear), background="#ff0000")
    assert (found[40:] == (255, 0, 0)).all()
    assert (found[:24] == np.round(values[0, 0] / 257)).all()


def test_a_deep_image_under_a_profile_and_turned_by_exif_is_rounded_first() -> None:
    values = np.random.default_rng(0).integers(0, 65536, (SIDE, SIDE, 3)).astype("<u2")
    profile = profiles.matrix_profile(profiles.ADOBE_RGB, 2.2)
    deep = profiles.deep_png(values, profiles.png_chunk(b"iCCP", b"own\0\0" + zlib.compress(profile)))
    plain = encoded(Image.fromarray(np.round(values / 257).astype("u1")), "PNG", icc_profile=profile)
    assert np.array_equal(pixels(deep), pixels(plain))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = profiles.deep_png(values, profiles.png_chunk(b"eXIf", exif.tobytes()[6:]))
    assert np.array_equal(pixels(turned), np.rot90(np.round(values / 257), -1))


def test_sixteen_bit_grey_with_alpha_and_with_a_transparent_value_show_the_background() -> None:
    values = np.linspace(0, 65535, SIDE * SIDE).astype("<u2").reshape(SIDE, SIDE)
    both = np.stack([values, np.full_like(values, 65535)], axis=-1)
    both[: SIDE // 2, :, 1] = 0
    found = pixels(profiles.deep_png(both))
    assert (found[: SIDE // 2] == 255).all()
    assert np.abs(found[SIDE // 2 :, :, 0] - values[SIDE // 2 :] / 257).max() < 1.0
    clear = profiles.png_chunk(b"tRNS", struct.pack(">H", int(values[5, 5])))
    found = pixels(profiles.deep_png(values, clear), background="#ff0000")
    assert found[5, 5].tolist() == [255, 0, 0]
    assert np.array_equal(found[6:, :, 1], np.round(values[6:] / 257))


@pytest.mark.parametrize("white_is_zero", [False, True])
def test_grey_tiffs_are_right_at_every_depth_and_either_way_round(*, white_is_zero: bool) -> None:
    ramp = np.linspace(0, 255, SIDE).round().astype("u1")[None].repeat(SIDE, 0)
    eight = ramp.tobytes()
    sixteen = (ramp.astype("<u2") * 257).tobytes()
    twelve_values = np.round(ramp / 255 * 4095).astype(int).reshape(-1, 2)
    first, second = twelve_values.T
    twelve = np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], axis=-1).astype("u1").tobytes()
    expected = 255 - ramp.astype(int) if white_is_zero else ramp.astype(int)
    for bits, data in [(8, eight), (16, sixteen), *([] if white_is_zero else [(12, twelve)])]:
        found = pixels(profiles.grey_tiff(SIDE, SIDE, data, bits=bits, white_is_zero=white_is_zero))
        assert np.array_equal(found, expected[..., None].repeat(3, -1)), bits


def test_sixteen_bit_netpbm_is_read_by_value() -> None:
    ramp = np.linspace(0, 65535, SIDE).astype(">u2")[None].repeat(SIDE, 0)
    found = pixels(b"P5 64 64 65535\n" + ramp.tobytes())
    assert np.array_equal(found[..., 0], np.round(ramp / 257))


def test_lab_colours_come_out_as_their_arithmetic_says() -> None:
    lab = np.array([(53, 0, 0), (80, -40, 30), (40, 30, -60)])
    for colour in lab:
        image = Image.new("LAB", (SIDE, SIDE), (round(colour[0] * 2.55), *(int(value) + 128 for value in colour[1:])))
        found = pixels(encoded(image, "TIFF"))
        expected = profiles.srgb_of(profiles.xyz_of_lab(colour.astype(float)))
        assert np.abs(found - expected).max() < 4, colour


def test_colours_that_are_multiplied_by_their_opacity_already_show_the_background() -> None:
    half = np.dstack([patches() // 2, np.full((SIDE, SIDE), 128, "u1")])  # colours already halved, as `ExtraSamples` 1 says
    data = encoded(Image.fromarray(half), "TIFF")
    kind = struct.pack("<HHI", 338, 3, 1)
    assert kind + b"\x02\x00" in data
    found = pixels(data.replace(kind + b"\x02\x00", kind + b"\x01\x00"), background="#000000")
    assert np.abs(stripes(found) - COLOURS // 2).max() <= 2


# Code points (CICP) of PNG, AVIF, HEIC and ICC profiles: wide gamuts are converted, HDR is rejected.

BT_709, UNSPECIFIED, BT_2020, DISPLAY_P3 = 1, 2, 9, 12
GAMMA_22, GAMMA_28, LINEAR, LOG, SRGB, PQ, SMPTE_428, HLG = 4, 5, 8, 9, 13, 16, 17, 18
_PLAIN_JXL = "800010074004b188b15009488316edcb807700068604aa0bec6506a9ee50fad915003"
JXL = {PQ: f"ff0a4f40401e3d020{_PLAIN_JXL}", HLG: f"ff0a4f40409e81080{_PLAIN_JXL}"}
"""A plain colour of 64x64 px, after a header by hand: the plugin writes sRGB's only, and reads a profile from any."""


def decoded(data: bytes) -> NDArray[np.int64]:
    return stripes(pixels(data))


def png(primaries: int, transfer: int) -> bytes:
    return with_chunk(encoded(Image.fromarray(patches(MUTED)), "PNG"), cicp(primaries, transfer))


def deep_png(primaries: int, transfer: int) -> bytes:
    return profiles.deep_png(patches(MUTED).astype("<u2") * 257, cicp(primaries, transfer))


def heic(primaries: int, transfer: int) -> bytes:
    codes = {"color_primaries": primaries, "transfer_characteristics": transfer}
    return encoded(Image.fromarray(patches(MUTED)), "HEIF", quality=100, chroma=444, **codes)


def tagged(kind: str, primaries: int, transfer: int) -> bytes:
    return encoded(Image.fromarray(patches(MUTED)), kind, icc_profile=profiles.tagged_profile(primaries, transfer))


def linear(levels: NDArray[np.float64]) -> NDArray[np.float64]:
    light: NDArray[np.float64] = np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)
    return light


@pytest.mark.parametrize(
    ("make", "distance"),
    [(png, 1), (deep_png, 1), (lambda *codes: avif(Image.fromarray(patches(MUTED)), *codes), 5), (heic, 5)],
)
@pytest.mark.parametrize(("primaries", "colourants"), [(DISPLAY_P3, profiles.DISPLAY_P3), (BT_2020, profiles.BT_2020)])
def test_a_wide_gamut_by_code_points_comes_out_as_its_arithmetic_says(
    make: Callable[[int, int], bytes], distance: int, primaries: int, colourants: NDArray[np.float64]
) -> None:
    expected = profiles.srgb_of(linear(MUTED / 255) @ colourants.T)
    assert np.abs(expected - MUTED).max() > 20
    assert np.abs(decoded(make(primaries, SRGB)) - expected).max() <= distance


@pytest.mark.parametrize("transfer", [GAMMA_22, GAMMA_28, LINEAR, LOG, SMPTE_428])
def test_another_transfer_comes_out_as_its_arithmetic_says(transfer: int) -> None:
    levels = MUTED / 255
    light = {
        LOG: np.where(levels > 0, 10 ** (2 * (levels - 1)), 0),
        SMPTE_428: np.minimum(levels**2.6 * 52.37 / 48, 1),
    }.get(transfer, levels ** {GAMMA_22: 2.2, GAMMA_28: 2.8}.get(transfer, 1.0))
    expected = profiles.srgb_of(light @ profiles.SRGB.T)
    assert np.abs(decoded(png(BT_709, transfer)) - expected).max() <= 1.5


@pytest.mark.parametrize("transfer", [1, UNSPECIFIED, 6, 7, SRGB, 14, 15])
@pytest.mark.parametrize("primaries", [BT_709, UNSPECIFIED])
def test_pixels_of_video_or_of_an_unspecified_space_are_those_of_srgb(primaries: int, transfer: int) -> None:
    assert np.array_equal(decoded(png(primaries, transfer)), MUTED)


def test_code_points_count_the_same_under_transparency_in_a_palette_and_in_grey() -> None:
    image, p3 = Image.fromarray(patches(MUTED)), cicp(DISPLAY_P3, SRGB)
    plain = decoded(png(DISPLAY_P3, SRGB))
    alpha = image.copy()
    alpha.putalpha(255)
    assert np.array_equal(decoded(with_chunk(encoded(alpha, "PNG"), p3)), plain)
    assert np.array_equal(decoded(with_chunk(encoded(image.quantize(8), "PNG"), p3)), plain)
    grey = encoded(image.convert("L"), "PNG")
    assert np.array_equal(decoded(with_chunk(grey, p3)), decoded(grey))  # grey of any gamut is grey
    deep = profiles.deep_png(np.full((64, 64), 100 * 257, "<u2"), cicp(BT_709, LINEAR))
    assert np.abs(decoded(deep) - profiles.srgb_of(np.full(3, 100 / 255) @ profiles.SRGB.T)).max() <= 1


def test_narrow_range_is_widened() -> None:
    narrow = Image.fromarray(patches((16 + MUTED * 219 / 255).round().astype(np.int64)))
    data = with_chunk(encoded(narrow, "PNG"), cicp(BT_709, SRGB, full_range=0))
    assert np.abs(decoded(data) - MUTED).max() <= 1


def test_a_pngs_code_points_outrank_its_profile_unless_they_are_unspecified() -> None:
    with_profile = encoded(Image.fromarray(patches(MUTED)), "PNG", icc_profile=profiles.matrix_profile(profiles.ADOBE_RGB, 2.2))
    assert np.array_equal(decoded(with_chunk(with_profile, cicp(BT_709, SRGB))), MUTED)
    assert np.array_equal(decoded(with_chunk(with_profile, cicp(DISPLAY_P3, SRGB))), decoded(png(DISPLAY_P3, SRGB)))
    assert np.array_equal(decoded(with_chunk(with_profile, cicp(UNSPECIFIED, UNSPECIFIED))), decoded(with_profile))


def test_an_avifs_profile_outranks_its_code_points() -> None:
    file, profile = io.BytesIO(avif(Image.fromarray(patches(MUTED)), DISPLAY_P3, PQ)), profiles.grey_profile(2.2)
    with Image.open(file) as image:
        image.info["icc_profile"] = profile  # Pillow writes one of both
        assert colour_profile(image, file) == profile


def test_code_points_of_another_image_in_an_avif_are_not_the_primarys() -> None:
    data = bytearray(avif(Image.fromarray(patches(MUTED)), BT_709, PQ))
    at = data.index(b"ipma") + 8  # after version and flags: entries, item, properties
    count = data[at + 6]
    kinds = data[data.index(b"ipco") :]
    assert kinds.index(b"colr") > kinds.index(b"av1C") > kinds.index(b"pixi") > kinds.index(b"ispe")
    colr = next(n for n in range(at + 7, at + 7 + count) if data[n] & 0x7F == 4)
    data[colr] = 0  # no property
    assert np.abs(decoded(bytes(data)) - MUTED).max() <= 5


@pytest.mark.parametrize("transfer", [PQ, HLG])
@pytest.mark.parametrize(
    ("origin", "make"),
    [
        ("cICP chunk", png),
        ("cICP chunk", deep_png),
        ("nclx box", lambda *codes: avif(Image.fromarray(patches(MUTED)), *codes)),
        ("nclx box", heic),
        ("colour profile", lambda *codes: tagged("PNG", *codes)),
        ("colour profile", lambda *codes: tagged("JPEG", *codes)),
        ("colour profile", lambda _, transfer: bytes.fromhex(JXL[transfer])),
    ],
)
def test_hdr_is_rejected_by_header_and_pixels_alike(origin: str, make: Callable[[int, int], bytes], transfer: int) -> None:
    data = make(BT_2020, transfer)
    with pytest.raises(RejectedError) as of_pixels:
        decode_image(data, SQUARE, "a.png")
    with pytest.raises(RejectedError) as of_header:
        placed_by_header(io.BytesIO(data), SQUARE, "a.png")
    assert of_pixels.value.reason is Reason.MODE
    name = {PQ: "PQ", HLG: "HLG"}[transfer]
    assert of_pixels.value.detail == of_header.value.detail == f"HDR pixels ({name} by its {origin}): save it as SDR"
