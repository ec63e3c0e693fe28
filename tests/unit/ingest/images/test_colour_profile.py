"""Code points (CICP) of PNG, AVIF, HEIC and ICC profiles: wide gamuts are converted, HDR is rejected."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from bucketline.ingest.images.bucket_grid import parse_grid
from bucketline.ingest.images.colour_profile import colour_profile
from bucketline.ingest.images.crop import Framing
from bucketline.ingest.images.decode import Reason, RejectedError, decode_image, placed_by_header
from tests import profiles
from tests.models import encoded
from tests.profiles import avif, cicp, with_chunk

SQUARE = Framing(grid=parse_grid("square:64", step_px=8, align_px=8), min_size_px=1)
COLOURS = np.array([(255, 255, 255), (0, 0, 0), (128, 128, 128), (190, 70, 70), (104, 197, 82), (60, 70, 190), (210, 190, 60)])
BT_709, UNSPECIFIED, BT_2020, DISPLAY_P3 = 1, 2, 9, 12
GAMMA_22, GAMMA_28, LINEAR, LOG, SRGB, PQ, SMPTE_428, HLG = 4, 5, 8, 9, 13, 16, 17, 18
_PLAIN_JXL = "800010074004b188b15009488316edcb807700068604aa0bec6506a9ee50fad915003"
JXL = {PQ: f"ff0a4f40401e3d020{_PLAIN_JXL}", HLG: f"ff0a4f40409e81080{_PLAIN_JXL}"}
"""A plain colour of 64x64 px, after a header by hand: the plugin writes sRGB's only, and reads a profile from any."""


def stripes(colours: NDArray[np.int64] = COLOURS) -> NDArray[np.uint8]:
    """Make stripes of plain colours, `[64, 64, 3]`."""
    return np.concatenate([colours, colours[-1:]]).astype("u1").repeat(8, axis=0)[:, None].repeat(64, axis=1)


def decoded(data: bytes) -> NDArray[np.int64]:
    found = decode_image(data, SQUARE, "a.png").pixels.astype(np.int64)
    return found[4:56:8, 32]


def png(primaries: int, transfer: int) -> bytes:
    return with_chunk(encoded(Image.fromarray(stripes()), "PNG"), cicp(primaries, transfer))


def deep_png(primaries: int, transfer: int) -> bytes:
    return profiles.deep_png(stripes().astype("<u2") * 257, cicp(primaries, transfer))


def heic(primaries: int, transfer: int) -> bytes:
    codes = {"color_primaries": primaries, "transfer_characteristics": transfer}
    return encoded(Image.fromarray(stripes()), "HEIF", quality=100, chroma=444, **codes)


def tagged(kind: str, primaries: int, transfer: int) -> bytes:
    return encoded(Image.fromarray(stripes()), kind, icc_profile=profiles.tagged_profile(primaries, transfer))


def linear(levels: NDArray[np.float64]) -> NDArray[np.float64]:
    light: NDArray[np.float64] = np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)
    return light


@pytest.mark.parametrize(
    ("make", "distance"), [(png, 1), (deep_png, 1), (lambda *codes: avif(Image.fromarray(stripes()), *codes), 5), (heic, 5)]
)
@pytest.mark.parametrize(("primaries", "colourants"), [(DISPLAY_P3, profiles.DISPLAY_P3), (BT_2020, profiles.BT_2020)])
def test_a_wide_gamut_by_code_points_comes_out_as_its_arithmetic_says(
    make: Callable[[int, int], bytes], distance: int, primaries: int, colourants: NDArray[np.float64]
) -> None:
    expected = profiles.srgb_of(linear(COLOURS / 255) @ colourants.T)
    assert np.abs(expected - COLOURS).max() > 20
    assert np.abs(decoded(make(primaries, SRGB)) - expected).max() <= distance


@pytest.mark.parametrize("transfer", [GAMMA_22, GAMMA_28, LINEAR, LOG, SMPTE_428])
def test_another_transfer_comes_out_as_its_arithmetic_says(transfer: int) -> None:
    levels = COLOURS / 255
    light = {
        LOG: np.where(levels > 0, 10 ** (2 * (levels - 1)), 0),
        SMPTE_428: np.minimum(levels**2.6 * 52.37 / 48, 1),
    }.get(transfer, levels ** {GAMMA_22: 2.2, GAMMA_28: 2.8}.get(transfer, 1.0))
    expected = profiles.srgb_of(light @ profiles.SRGB.T)
    assert np.abs(decoded(png(BT_709, transfer)) - expected).max() <= 1.5


@pytest.mark.parametrize("transfer", [1, UNSPECIFIED, 6, 7, SRGB, 14, 15])
@pytest.mark.parametrize("primaries", [BT_709, UNSPECIFIED])
def test_pixels_of_video_or_of_an_unspecified_space_are_those_of_srgb(primaries: int, transfer: int) -> None:
    assert np.array_equal(decoded(png(primaries, transfer)), COLOURS)


def test_code_points_count_the_same_under_transparency_in_a_palette_and_in_grey() -> None:
    image, p3 = Image.fromarray(stripes()), cicp(DISPLAY_P3, SRGB)
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
    narrow = Image.fromarray(stripes((16 + COLOURS * 219 / 255).round().astype(np.int64)))
    data = with_chunk(encoded(narrow, "PNG"), cicp(BT_709, SRGB, full_range=0))
    assert np.abs(decoded(data) - COLOURS).max() <= 1


def test_a_pngs_code_points_outrank_its_profile_unless_they_are_unspecified() -> None:
    with_profile = encoded(Image.fromarray(stripes()), "PNG", icc_profile=profiles.matrix_profile(profiles.ADOBE_RGB, 2.2))
    assert np.array_equal(decoded(with_chunk(with_profile, cicp(BT_709, SRGB))), COLOURS)
    assert np.array_equal(decoded(with_chunk(with_profile, cicp(DISPLAY_P3, SRGB))), decoded(png(DISPLAY_P3, SRGB)))
    assert np.array_equal(decoded(with_chunk(with_profile, cicp(UNSPECIFIED, UNSPECIFIED))), decoded(with_profile))


def test_an_avifs_profile_outranks_its_code_points() -> None:
    file, profile = io.BytesIO(avif(Image.fromarray(stripes()), DISPLAY_P3, PQ)), profiles.grey_profile(2.2)
    with Image.open(file) as image:
        image.info["icc_profile"] = profile  # Pillow writes one of both
        assert colour_profile(image, file) == profile


def test_code_points_of_another_image_in_an_avif_are_not_the_primarys() -> None:
    data = bytearray(avif(Image.fromarray(stripes()), BT_709, PQ))
    at = data.index(b"ipma") + 8  # after version and flags: entries, item, properties
    count = data[at + 6]
    kinds = data[data.index(b"ipco") :]
    assert kinds.index(b"colr") > kinds.index(b"av1C") > kinds.index(b"pixi") > kinds.index(b"ispe")
    colr = next(n for n in range(at + 7, at + 7 + count) if data[n] & 0x7F == 4)
    data[colr] = 0  # no property
    assert np.abs(decoded(bytes(data)) - COLOURS).max() <= 5


def test_limited_range_and_subsampled_colours_are_the_decoders_business() -> None:
    data = avif(Image.fromarray(stripes()), BT_709, SRGB, range="limited")
    assert np.abs(decoded(data) - COLOURS).max() <= 5


@pytest.mark.parametrize("transfer", [PQ, HLG])
@pytest.mark.parametrize(
    ("origin", "make"),
    [
        ("cICP chunk", png),
        ("cICP chunk", deep_png),
        ("nclx box", lambda *codes: avif(Image.fromarray(stripes()), *codes)),
        ("nclx box", heic),
        ("colour profile", lambda *codes: tagged("PNG", *codes)),
        ("colour profile", lambda *codes: tagged("JPEG", *codes)),
        ("colour profile", lambda _, transfer: bytes.fromhex(JXL[transfer])),
    ],
)
def test_hdr_is_rejected_by_its_header_and_by_its_pixels_alike(
    origin: str, make: Callable[[int, int], bytes], transfer: int
) -> None:
    data = make(BT_2020, transfer)
    with pytest.raises(RejectedError) as of_pixels:
        decode_image(data, SQUARE, "a.png")
    with pytest.raises(RejectedError) as of_header:
        placed_by_header(io.BytesIO(data), SQUARE, "a.png")
    assert of_pixels.value.reason is Reason.MODE
    name = {PQ: "PQ", HLG: "HLG"}[transfer]
    assert of_pixels.value.detail == of_header.value.detail == f"HDR pixels ({name} by its {origin}): save it as SDR"
