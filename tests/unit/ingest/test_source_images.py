"""Thumbnails from a source for `store report`: crops drawn in, rejects shown where they can be, and said why where not."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from bucketline.ingest.sheet.source_images import THUMBNAIL_PX, source_images
from tests.commands import call
from tests.models import SMALL, encoded, png, write_images
from tests.pages import parsed

WHITE = Image.new("RGB", (400, 200), "white")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "photos"
    write_images(folder, 6)
    (folder / "broken.png").write_bytes(png(30, 30)[:40])
    (folder / "empty.png").write_bytes(b"")
    (folder / "tiny.png").write_bytes(png(4, 4))
    (folder / "white.jpg").write_bytes(encoded(WHITE, "JPEG"))
    clear = Image.new("RGBA", (30, 30), (255, 0, 0, 0))
    (folder / "clear.png").write_bytes(encoded(clear, "PNG"))
    return folder


def pixels_of(found: Any) -> NDArray[np.uint8]:
    shown, problem = found
    assert problem == ""
    with Image.open(io.BytesIO(base64.b64decode(shown))) as image:
        assert image.format == "JPEG"
        return np.asarray(image.convert("RGB"))


def test_images_are_shown_with_their_crop_and_rejects_with_their_reason(photos: Path) -> None:
    boxes: dict[str, Any] = {"white.jpg": (0, 0, 200, 200), "tiny.png": None, "clear.png": None}
    boxes |= {"broken.png": None, "empty.png": None, "gone.png": None}
    found: dict[str, Any] = source_images({"source": str(photos), "boxes": boxes})
    assert list(found) == list(boxes)
    white = pixels_of(found["white.jpg"]).astype(int)
    assert max(white.shape) == THUMBNAIL_PX
    assert white[40, 30].min() > 240  # kept
    assert white[40, 140].max() < 200  # lost: grey
    assert pixels_of(found["tiny.png"]).shape == (4, 4, 3)
    assert pixels_of(found["clear.png"]).min() > 240  # a transparent pixel has no colour
    assert found["gone.png"] == ("", "no longer in the source")
    assert found["broken.png"] == found["empty.png"] == ("", "cannot be decoded")


@pytest.mark.slow  # two processes that import torch
def test_a_report_shows_rejects_from_the_source_and_decoded_latents(photos: Path, model: Path, tmp_path: Path) -> None:
    call("ingest", "pack", photos, tmp_path / "s", "--model", model, *SMALL).done()
    page = tmp_path / "r.html"
    call("store", "report", tmp_path / "s", "-o", page, "--source", photos, "--model", model, "--json").done()
    rejects = [json.loads(line) for line in (tmp_path / "s" / "rejects.jsonl").read_text().splitlines()]
    found = parsed(page)
    section = page.read_text(encoding="utf-8").split('id="rejects"')[1].split("</section>")[0]
    assert {one["id"] for one in rejects} >= {"broken.png", "empty.png", "tiny.png"}
    assert section.count("<figure>") == len(rejects)
    assert section.count("data:image/jpeg") == sum(one["id"] in ("tiny.png", "white.jpg") for one in rejects)
    assert "empty.png" in section
    assert "decoded by the VAE of" in found.text
    assert "data:image/png" not in page.read_text(encoding="utf-8")
