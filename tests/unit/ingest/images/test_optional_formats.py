"""HEIC and JPEG XL: read with the extra `heif`, and named with it where it is not installed."""

from __future__ import annotations

import io
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bucketline.ingest.images.bucket_grid import parse_grid
from bucketline.ingest.images.crop import Framing
from bucketline.ingest.images.decode import decode_image, placed_by_header
from tests.commands import spawn
from tests.models import colour_image, encoded

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
    decoded = decode_image(data, FRAMING, "a")
    assert decoded.pixels.shape == (64, 96, 3)
    assert np.abs(decoded.pixels.astype(int) - kept.astype(int)).mean() <= distance
    assert placed_by_header(io.BytesIO(data), FRAMING, "a") == decoded.placement


def test_a_photograph_that_a_telephone_turned_is_turned_once() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    kept = colour_image(64, 96)
    data = encoded(Image.fromarray(kept), "HEIF", exif=exif.tobytes(), quality=95)
    decoded = decode_image(data, FRAMING, "a")
    assert decoded.pixels.shape == (96, 64, 3)
    assert np.abs(decoded.pixels.astype(int) - np.rot90(kept, -1).astype(int)).mean() <= 3
    assert placed_by_header(io.BytesIO(data), FRAMING, "a") == decoded.placement


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
