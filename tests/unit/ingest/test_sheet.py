"""Images of a source in pages: the sheet of a scan with its worst crops, and thumbnails in `store report`."""

from __future__ import annotations

import base64
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from bucketline.ingest import peek as sheet_module
from bucketline.ingest.images.crop import Placement, bucket_placement, parse_grid
from bucketline.ingest.peek import (
    MAX_IN_ALL,
    MAX_PER_BUCKET,
    MAX_REJECTS,
    THUMBNAIL_PX,
    reject_section,
    source_images,
    with_box,
    worst,
)
from bucketline.ingest.summary import Reject
from bucketline.store import Store
from tests.commands import Ran, call
from tests.kit import flip_row, make_store, samples_of
from tests.models import SMALL, colour_image, encoded, pack, png, write_files, write_images, write_model
from tests.pages import parsed

SQUARE = parse_grid("square:64", step_px=64, align_px=8)


def placed(height_px: int, width_px: int) -> Placement:
    return bucket_placement(height_px, width_px, SQUARE)


def scan(source: object, out: Path, *more: object) -> Ran:
    return call("ingest", "scan", source, *SMALL, "-o", out, *more)


def test_the_worst_of_each_bucket_come_first_and_are_bounded() -> None:
    few = [(f"{n:02}.png", placed(64, 64 + n)) for n in range(5)]
    many = [(f"{n:02}.png", placed(64, 100 + 7 * n % 50)) for n in range(40)]
    chosen = worst({"few": few, "many": many, "alike": few[:1] * 3}, MAX_IN_ALL)
    assert [name for name, _ in chosen["few"]] == ["04.png", "03.png", "02.png", "01.png", "00.png"]
    losses = [placement.cropped_away for _, placement in chosen["many"]]
    assert losses == sorted((placement.cropped_away for _, placement in many), reverse=True)[:MAX_PER_BUCKET]
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
    inside = scan(data, tmp_path / "dogs" / "sheet.html").fails("is inside the source", code=2)
    assert inside.out == ""


def test_a_random_crop_is_drawn_where_packing_puts_it(tmp_path: Path) -> None:
    write_files(tmp_path / "photos", {"a.png": png(40, 120)})
    pages = []
    for crop in ("center", "random"):
        assert scan(tmp_path / "photos", tmp_path / f"{crop}.html", "--crop", crop).code == 0
        pages.append(parsed(tmp_path / f"{crop}.html").images()[0].tobytes())
    assert pages[0] != pages[1]


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


# `ingest peek`: the image is what the model's VAE makes of the stored latent, and of no other VAE's.


TURNED = "turned\n\udcff.jpg"  # is on its side in the file, as cameras write it


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Store]:
    folder = tmp_path_factory.mktemp("peek")
    write_images(folder / "photos", 6)
    exif = Image.Exif()
    exif[0x0112] = 6
    (folder / "photos" / TURNED).write_bytes(encoded(Image.fromarray(colour_image(34, 22)), "JPEG", exif=exif))
    for dtype in ("F16", "BF16"):
        pack(folder / "photos", folder / dtype, model, "--dtype", dtype).done()
    return {dtype: Store.open(folder / dtype) for dtype in ("F16", "BF16")}


@pytest.fixture
def packed(stores: dict[str, Store]) -> Store:
    return stores["F16"]


def peek(store: Store, sample_id: str, model: Path, png: Path, *more: object) -> Ran:
    return call("ingest", "peek", store.path, sample_id, "--model", model, "-o", png, *more)


def decoded(store: Store, sample_id: str, model: Path) -> NDArray[np.uint8]:
    from diffusers import AutoencoderKL

    record = store.sample(sample_id)[1]
    bucket = store.bucket(record.bucket)
    row = bucket.sample_ids(np.arange(bucket.num_rows)).index(sample_id)
    stored = bucket.read(np.array([row]), "latent")
    latent = torch.from_numpy(stored)
    latent = latent.view(torch.bfloat16) if stored.dtype == np.uint16 else latent
    vae: Any = AutoencoderKL
    with torch.no_grad():
        image = vae.from_pretrained(model / "vae").decode(latent.float()).sample[0]
    pixels: NDArray[np.uint8] = np.rint((image.clamp(-1, 1) + 1).mul(127.5).numpy()).astype(np.uint8).transpose(1, 2, 0)
    return pixels


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_the_image_is_what_the_vae_makes_of_a_latent(dtype: str, stores: dict[str, Store], model: Path, tmp_path: Path) -> None:
    packed = stores[dtype]
    for sample_id in ("a/000.png", "b/001.png", TURNED):
        ran = peek(packed, sample_id, model, tmp_path / "out.png", "--json").done()
        record = packed.sample(sample_id)[1]
        bucket = packed.bucket(record.bucket)
        with Image.open(tmp_path / "out.png") as image:
            assert (image.format, image.mode) == ("PNG", "RGB")
            found = np.asarray(image)
        assert found.shape == (bucket.height_px, bucket.width_px, 3)
        assert np.array_equal(found, decoded(packed, sample_id, model))
        assert ran.json == {
            "png": str(tmp_path / "out.png"),
            "id": sample_id,
            "bucket": bucket.name,
            "height_px": bucket.height_px,
            "width_px": bucket.width_px,
            "captions": json.loads(json.dumps(record.captions)),
        }
        (tmp_path / "out.png").unlink()


def test_an_image_that_lies_on_its_side_in_its_file_comes_out_upright(packed: Store, model: Path, tmp_path: Path) -> None:
    assert packed.sample(TURNED)[1].original_size == (22, 34)
    ran = peek(packed, TURNED, model, tmp_path / "out.png")
    assert ran.out == f"{tmp_path / 'out.png'}: turned\\n\\udcff.jpg of train/16x24, 16x24 px, height first\n"
    with Image.open(tmp_path / "out.png") as image:
        assert (image.height, image.width) == (16, 24)


def test_another_vae_than_the_stores_is_refused_with_field_and_both_values(packed: Store, model: Path, tmp_path: Path) -> None:
    stored: Any = packed.manifest.encoders["vae"]
    other = write_model(tmp_path / "other", seed=1)
    ran = peek(packed, "a/000.png", other, tmp_path / "out.png").fails(
        f"encoders.vae.weights_hash = {stored['weights_hash']}, {other} has ", "name the model that the store was packed with"
    )
    assert ran.out == ""
    shutil.copytree(model, tmp_path / "edited")
    config = tmp_path / "edited" / "vae" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text(encoding="utf-8")), "scaling_factor": 0.5}), encoding="utf-8")
    peek(packed, "a/000.png", tmp_path / "edited", tmp_path / "out.png").fails(
        f"encoders.vae.config_hash = {stored['config_hash']}, {tmp_path / 'edited'} has "
    )
    assert not (tmp_path / "out.png").exists()


def test_a_store_that_does_not_say_which_vae_made_it_is_refused(model: Path, tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", samples_of({"train/64x64": 1}))
    peek(store, "train/64x64/0.png", model, tmp_path / "out.png").fails("the store was made with encoders.vae.class = None")
    assert not (tmp_path / "out.png").exists()


def test_a_damaged_row_is_not_shown(packed: Store, model: Path, tmp_path: Path) -> None:
    shutil.copytree(packed.path, tmp_path / "s")
    sample_id = flip_row(tmp_path / "s", packed.buckets()[0].name, 0)
    peek(Store.open(tmp_path / "s"), sample_id, model, tmp_path / "out.png").fails(
        f"sample {sample_id!r}: the row's bytes do not match their checksum"
    )
    assert not (tmp_path / "out.png").exists()


def test_of_moments_and_mirror_images_the_mean_as_it_was_is_shown(model: Path, tmp_path: Path) -> None:
    """An image of the mode is one of the mean: the two stores give the same image."""
    write_images(tmp_path / "photos", 3)
    images = []
    for name, more in {"mode": (), "moments": ("--latents", "moments", "--flip")}.items():
        pack(tmp_path / "photos", tmp_path / name, model, *more).done()
        peek(Store.open(tmp_path / name), "b/001.png", model, tmp_path / f"{name}.png").done()
        images.append((tmp_path / f"{name}.png").read_bytes())
    assert images[0] == images[1]
