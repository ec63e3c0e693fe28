"""Images of a source in pages: the sheet of a scan with its worst crops, and thumbnails in `store report`."""

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

from bucketline.ingest import peek as sheet_module
from bucketline.ingest.images.crop import Placement, bucket_placement
from bucketline.ingest.images.grid import parse_grid
from bucketline.ingest.peek import (
    MAX_IN_ALL,
    MAX_PER_BUCKET,
    MAX_REJECTS,
    THUMBNAIL_PX,
    Cropped,
    reject_section,
    source_images,
    with_box,
    worst,
)
from bucketline.ingest.summary import Reject
from tests.commands import Ran, call
from tests.models import SMALL, colour_image, encoded, png, write_files, write_images
from tests.pages import parsed

SQUARE = parse_grid("square:64", step_px=64, align_px=8)


def placed(height_px: int, width_px: int) -> Placement:
    return bucket_placement(height_px, width_px, SQUARE)


def scan(source: object, out: Path, *more: object) -> Ran:
    return call("ingest", "scan", source, *SMALL, "-o", out, *more)


def test_the_worst_of_each_bucket_come_first_and_are_bounded() -> None:
    few = [Cropped(id=f"{n:02}.png", placement=placed(64, 64 + n)) for n in range(5)]
    many = [Cropped(id=f"{n:02}.png", placement=placed(64, 100 + 7 * n % 50)) for n in range(40)]
    chosen = worst({"few": few, "many": many, "alike": few[:1] * 3}, MAX_IN_ALL)
    assert [image.id for image in chosen["few"]] == ["04.png", "03.png", "02.png", "01.png", "00.png"]
    losses = [image.placement.cropped_away for image in chosen["many"]]
    assert losses == sorted((image.placement.cropped_away for image in many), reverse=True)[:MAX_PER_BUCKET]
    num_buckets = MAX_IN_ALL // 4
    assert [len(shown) for shown in worst({str(n): many for n in range(num_buckets)}, MAX_IN_ALL).values()] == [4] * num_buckets


def test_what_is_lost_is_grey_and_what_is_kept_is_left_as_it_is() -> None:
    pixels = np.full((40, 120, 3), (200, 30, 30), dtype=np.uint8)
    drawn = with_box(pixels, placed(400, 1200).crop_in_source, (400, 1200))
    assert drawn.shape == pixels.shape
    assert (drawn[2:38, 42:78] == pixels[2:38, 42:78]).all()
    for lost in (drawn[:, :40], drawn[:, 80:]):
        assert (np.ptp(lost, axis=2) == 0).all()
    assert (drawn[20, 40] == drawn[20, 79]).all()  # the line
    assert tuple(drawn[20, 40]) == (255, 96, 0)
    assert with_box(pixels, placed(400, 400).crop_in_source, (400, 400)) is pixels  # nothing is lost, so nothing is drawn


HOSTILE = (
    "<script>alert(1)</script>.png".replace("/", "\N{FRACTION SLASH}"),
    '"><img src=x onerror=alert(1)>.png',
    "' onload='alert(1).png",
    "<b>&lt;.png",
    "a\nb\u202egnp.exe.png",
)


def test_hostile_names_are_text_wherever_they_are_shown(tmp_path: Path) -> None:
    for folder, names in (("plain", [f"{n}.png" for n in range(len(HOSTILE))]), ("hostile", HOSTILE)):
        write_files(tmp_path / folder, {name: png(20, 60) for name in names} | {f"small {name}": png(4, 4) for name in names})
        scan(tmp_path / folder, tmp_path / f"{folder}.html").done()
    plain, hostile = (parsed(tmp_path / f"{folder}.html") for folder in ("plain", "hostile"))
    assert hostile.tags == plain.tags
    for name in HOSTILE[:4]:
        assert hostile.text.count(name) == 2, "a card, and a row of the rejects"
    assert "\u202e" not in hostile.text


def test_rejects_are_listed_up_to_a_number() -> None:
    rejects = [Reject(id=f"{n}.png", reason="too small", detail="1x1 px") for n in range(MAX_REJECTS + 5)]
    body = reject_section(rejects, {"too small": len(rejects)}).body
    assert body.count("<td>too small</td><td>1x1 px</td>") == MAX_REJECTS
    assert "and 5 more" in body


def test_a_scan_writes_each_bucket_with_its_worst_crops_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sheet_module, "MAX_PER_BUCKET", 3)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(Image.fromarray(colour_image(20, 60)), "JPEG", exif=exif)
    others = {"tall <b>.png": png(45, 20), "strip.png": png(100, 30_000), "turned.jpg": turned, "cut.png": png(20, 60)[:200]}
    photos = write_files(tmp_path / "photos", {**{f"wide {n}.png": png(20, 30 + 4 * n) for n in range(5)}, **others})
    ran = scan(photos, tmp_path / "sheet.html").done()
    assert "sheet.html: contact sheet" in ran.out
    assert not list(tmp_path.glob("*.tmp"))
    page = parsed(tmp_path / "sheet.html")
    assert page.titles == [
        *(f"Crops of {photos}", str(photos), "train/24x16", "train/16x24", "Too much cropped away", "Rejected")
    ]
    for note in ("2 images, 41.7 % lost on average, 50.0 % at most", "6 images, ", "1 image, 99.5 % lost"):
        assert note in page.text
    assert page.captions == [
        *("turned.jpg60x20 px, 50.0 % cropped away", "tall <b>.png45x20 px, 33.3 % cropped away"),
        *("cut.png20x60 px, 50.0 % cropped away", "wide 4.png20x46 px, 34.8 % cropped away"),
        *("wide 3.png20x42 px, 28.6 % cropped away", "strip.png100x30000 px, 99.5 % cropped away"),
    ]
    assert "damaged image: " in page.text
    assert "and 3 more, which lose 28.6 % or less" in page.text
    assert [image.size for image in page.images()] == [(20, 60), (20, 45), (46, 20), (42, 20), (240, 10)]


def test_one_sheet_shows_all_sources_of_a_data_set_file(tmp_path: Path) -> None:
    for name, size in (("photos", (20, 50)), ("dogs", (50, 20))):
        write_files(tmp_path / name, {"a.png": png(*size), "strip.png": png(10, 500)})
    (tmp_path / "dogs" / "a.txt").write_text("a dog", encoding="ascii")
    data = tmp_path / "data.toml"
    data.write_text('[[source]]\npath = "photos"\n[[source]]\npath = "dogs"\nrepeats = 3\n', encoding="ascii")
    ran = scan(data, tmp_path / "sheet.html", "--caption-template", "sks").done()
    assert ran.out.endswith("sheet.html: contact sheet of the crops that lose most\n")
    page = parsed(tmp_path / "sheet.html")
    assert page.titles == [
        *(f"Crops of {data}", str(tmp_path / "photos"), "train/16x24", "Too much cropped away", "Rejected"),
        *(str(tmp_path / "dogs"), "train/24x16", "Too much cropped away", "Rejected"),
    ]
    assert len(page.images()) == 4
    assert "sks, a dog" in page.text
    inside = scan(data, tmp_path / "dogs" / "sheet.html")
    assert (inside.code, inside.out) == (2, "")
    assert "is inside the source" in inside.err


def test_a_random_crop_is_drawn_where_packing_puts_it(tmp_path: Path) -> None:
    write_files(tmp_path / "photos", {"a.png": png(40, 120)})
    pages = []
    for crop in ("center", "random"):
        assert scan(tmp_path / "photos", tmp_path / f"{crop}.html", "--crop", crop).code == 0
        pages.append(parsed(tmp_path / f"{crop}.html").images()[0].tobytes())
    assert pages[0] != pages[1]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("sheet.png", "name a file that ends in .html"),
        ("photos/sheet.html", "is inside the source"),
        ("photos/a/sheet.html", "is inside the source"),
        ("some.store/sheet.html", "is in the store"),
        ("there.html", "there.html exists"),
        ("dangling.html", "dangling.html exists"),
        ("nowhere/sheet.html", "nowhere is not a folder"),
    ],
)
def test_a_place_that_the_sheet_must_not_have_is_refused_first(path: str, words: str, source: Path, tmp_path: Path) -> None:
    write_files(tmp_path, {"some.store/manifest.json": "{}", "there.html": "kept"})
    (tmp_path / "dangling.html").symlink_to(tmp_path / "target")
    before = sorted(tmp_path.rglob("*"))
    ran = scan(source, tmp_path / path)
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "there.html").read_bytes() == b"kept"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "photos"
    write_images(folder, 6)
    clear = encoded(Image.new("RGBA", (30, 30), (255, 0, 0, 0)), "PNG")
    own = {"broken.png": png(30, 30)[:40], "empty.png": b"", "tiny.png": png(4, 4), "clear.png": clear}
    return write_files(folder, {**own, "white.jpg": encoded(Image.new("RGB", (400, 200), "white"), "JPEG")})


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
