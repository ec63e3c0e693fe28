"""The page of `store report`: everything is on it, nothing is fetched, and strange texts stay texts."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bucketline.pages.charts import Line, lines
from bucketline.pages.image_files import png
from bucketline.pages.page import parts
from bucketline.store import RowColumn, Store, StoreWriter
from bucketline.store.report.collect import MAX_REASONS, OTHER_REASONS, collect_lists
from tests.commands import call
from tests.kit import make_sample, make_store, samples_of
from tests.models import SMALL
from tests.pages import parsed
from tests.photographs import crop_of
from tests.unit.store.report.conftest import cropped

FAULTY = ("constant", "duplicates", "crops")


@pytest.fixture(scope="module")
def page(store_with: Callable[..., Store], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a store with faults."""
    out = tmp_path_factory.mktemp("pages") / "report.html"
    ran = call("store", "report", store_with(*FAULTY, scaling_factor=0.45).path, "-o", out, "--samples", 30, "--batch-size", 8)
    assert ran.code == 0, ran.err
    assert "error: Wrong scaling factor" in ran.out
    assert "warning: 5 constant latents" in ran.out
    return out


def test_photographs_on_a_grey_backdrop_do_not_blame_their_vae(model: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for n in range(6):
        photo = Image.new("RGB", (64, 64), (128, 128, 128))
        photo.paste(crop_of(n, 16, 16), (24, 24))
        photo.save(tmp_path / "photos" / f"{n}.png")
    call("ingest", "pack", tmp_path / "photos", tmp_path / "s", "--model", model, *SMALL).done()
    ran = call("store", "report", tmp_path / "s", "-o", tmp_path / "r.html", "--json").done()
    titles = [one["title"] for one in ran.json["findings"]]
    assert "No NaN" in titles
    assert not [title for title in titles if "factor" in title or "spread" in title]


def test_every_section_of_the_report_is_there(page: Path) -> None:
    found = parsed(page)
    sections = ["buckets", "samples", "crops", "captions", "rejects", "latents", "duplicates", "disk", "provenance", "plan"]
    assert [name for name in found.ids if name in sections] == sections
    for words in (
        "Wrong scaling factor, or a broken VAE",
        "train/192x320 loses 60 % of its images to cropping",
        "10 near-duplicates in 1 cluster",
        "Most frequent words",
        "scaling_factor",
        "8 steps, 64 rows delivered",
        "column latent",
    ):
        assert words in found.text


def test_samples_are_at_most_as_many_as_requested(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    gallery = text[text.index("data-gallery") : text.index('id="crops"')]
    assert gallery.count("<figure>") == 30
    assert gallery.count('<div class="by-choice"') == 3


def test_captions_are_text_and_not_markup(page: Path) -> None:
    found = parsed(page)
    assert "<b>& more</b>" in found.text
    assert "<b>&amp;" not in page.read_text(encoding="utf-8").split("<h2>Samples", 1)[1].split("</section>")[0]


def test_a_store_is_reported_alike_twice(store_with: Callable[..., Store], page: Path, tmp_path: Path) -> None:
    store = store_with(*FAULTY, scaling_factor=0.45)
    again = tmp_path / "again.html"
    assert call("store", "report", store.path, "-o", again, "--samples", 30, "--batch-size", 8).code == 0
    assert again.read_bytes() == page.read_bytes()


def test_a_store_without_scaled_latents_of_a_vae_is_reported_too(tmp_path: Path) -> None:
    make_store(tmp_path / "s", samples_of({"train/64x96": 9, "val/64x64": 2}))
    ran = call("store", "report", tmp_path / "s", "-o", tmp_path / "r.html", "--json").done()
    assert any(one["level"] == "good" for one in ran.json["findings"])
    assert "false colours" in parsed(tmp_path / "r.html").text


def test_the_report_names_small_buckets_and_no_option_that_a_trainer_lacks(tmp_path: Path) -> None:
    make_store(tmp_path / "s", samples_of({"train/64x96": 2, "train/64x64": 30}))
    ran = call("store", "report", tmp_path / "s", "-o", tmp_path / "r.html", "--json", "--batch-size", 16).done()
    (found,) = [one for one in ran.json["findings"] if one["title"] == "Small buckets"]
    assert found["detail"].startswith("train/64x96 (2 images) ")
    assert found["detail"].endswith("; use a smaller batch or fewer ranks, or pack with a coarser --grid")


STRANGE = (
    "</script><script>alert(1)</script>",
    "a\nb\t\x00",
    "\u202eright to left",
    "no \udcff UTF-8",
    "'\"><img src=x onerror=alert(1)>",
    "",
)


def test_strange_ids_and_captions_are_shown_as_text(tmp_path: Path) -> None:
    samples = [make_sample(f"{text}.png", "train/64x64", (text,) if text else ()) for text in STRANGE]
    make_store(tmp_path / "s", samples)
    rejects = [{"id": text, "reason": text, "detail": text} for text in STRANGE]
    (tmp_path / "s" / "rejects.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rejects), encoding="ascii")
    call("store", "report", tmp_path / "s", "-o", tmp_path / "r.html").done()
    found = parsed(tmp_path / "r.html")
    for text in (
        "<script>alert(1)</script>",
        r"a\nb\t\x00",
        r"\u202eright to left",
        r"no \udcff UTF-8",
        "<img src=x onerror=alert(1)>",
    ):
        assert text in found.text


def test_one_very_long_caption_leaves_the_lengths_of_the_others_visible(tmp_path: Path) -> None:
    texts = [*("a red boat " * (1 + n % 4) for n in range(40)), "word " * 900]
    make_store(tmp_path / "s", [make_sample(f"{n}.png", "train/64x64", (text,)) for n, text in enumerate(texts)])
    call("store", "report", tmp_path / "s", "-o", tmp_path / "r.html").done()
    found = parsed(tmp_path / "r.html")
    assert "1 longer one not drawn" in found.text
    assert "9 words in the median, 900 at most" in found.text
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    chart = page[page.index("Words in a caption") :].partition("</svg>")[0]
    assert chart.count('class="fill"') == 4


def test_sequences_are_shown_as_grey_images(tmp_path: Path) -> None:
    columns = [RowColumn(role="target", dtype="F32", shape=(6, "length"))]
    with StoreWriter(tmp_path / "s", encoders={"codec": {}}, columns=columns, max_captions=1) as writer:
        for n in range(5):
            target = np.random.default_rng(n).normal(size=(6, 40)).astype(np.float32)
            target[0] = 9.0
            writer.add(f"{n}.wav", "train/40", {"target": target})
    call("store", "report", tmp_path / "s", "-o", tmp_path / "r.html").done()
    assert "time to the right" in parsed(tmp_path / "r.html").text
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    shown = re.search(r'data:image/png;base64,([^"]+)"', page[page.index('id="samples"') :])
    assert shown is not None
    with Image.open(io.BytesIO(base64.b64decode(shown[1]))) as image:
        assert image.size == (40, 6)
        assert (np.asarray(image)[-1] == 255).all(), "channel 0 is at the bottom"


def test_many_buckets_show_some_crops_of_the_worst(tmp_path: Path) -> None:
    samples = [
        replace(one, record=cropped(one.record, 0.01 * n))
        for n in range(1, 31)
        for one in samples_of({f"train/{64 + 8 * n}x64": 2})
    ]
    make_store(tmp_path / "s", samples)
    call("store", "report", tmp_path / "s", "-o", tmp_path / "r.html").done()
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    crops = page[page.index('id="crops"') : page.index('id="captions"')]
    assert crops.count("<figure>") == 24
    assert "train/304x64 <small>" in crops
    assert "train/72x64 <small>" not in crops
    assert "<span>train/72x64</span>" in crops, "the bars have every bucket"


@pytest.mark.slow  # it pushes a store
def test_a_store_in_object_storage_has_the_same_page(store_with: Callable[..., Store], page: Path, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    url = f"file://{tmp_path}/bucket/photos.store"
    assert call("store", "push", store_with(*FAULTY, scaling_factor=0.45).path, url).code == 0
    out = tmp_path / "r.html"
    call("store", "report", url, "-o", out, "--samples", 30, "--batch-size", 8, "--cache", tmp_path / "cache").done()
    ours, theirs = (path.read_text(encoding="utf-8") for path in (page, out))
    for name in ("samples", "crops", "captions", "latents", "duplicates", "plan"):
        assert [text[text.index(f'<section id="{name}"') :].partition("</section>")[0] for text in (ours, theirs)] == [
            ours[ours.index(f'<section id="{name}"') :].partition("</section>")[0]
        ] * 2


def test_a_page_is_never_written_over_anything(store_with: Callable[..., Store], tmp_path: Path) -> None:
    store = store_with()
    (tmp_path / "mine.html").write_text("mine", encoding="ascii")
    for out, message in (
        (tmp_path / "mine.html", "mine.html exists"),
        (tmp_path / "page.txt", "name a file that ends in .html"),
        (store.path / "page.html", "is inside the store"),
        (tmp_path / "none" / "page.html", "is not a folder"),
    ):
        ran = call("store", "report", store.path, "-o", out)
        assert ran.code == 2
        assert message in ran.err
    assert (tmp_path / "mine.html").read_text(encoding="ascii") == "mine"


@pytest.mark.slow  # it imports torch in a process of its own
def test_a_model_that_cannot_be_read_is_an_error(store_with: Callable[..., Store], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    ran = call("store", "report", store_with().path, "-o", tmp_path / "r.html", "--model", tmp_path / "model")
    assert ran.code == 1
    assert "lacks the part vae/" in ran.err
    assert not (tmp_path / "r.html").exists()


def test_a_png_is_read_by_others() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 5, 3)).astype(np.uint8)
    with Image.open(io.BytesIO(png(pixels))) as image:
        assert (np.asarray(image.convert("RGB")) == pixels).all()
        assert (image.format, image.mode) == ("PNG", "RGB")
    assert len(png(np.zeros((64, 64, 3), np.uint8))) < 200


@pytest.mark.parametrize(
    ("shape", "small"), [((96, 64), (48, 32)), ((48, 48), (48, 48)), ((130, 2), (44, 1)), ((100, 50), (34, 17))]
)
def test_previews_are_averaged_down(shape: tuple[int, int], small: tuple[int, int]) -> None:
    with Image.open(io.BytesIO(png(np.full((*shape, 3), 77, np.uint8), 48))) as image:
        assert np.asarray(image).shape == (*small, 3)
        assert (np.asarray(image) == 77).all()


def test_charts_take_what_is_degenerate() -> None:
    assert '<span>&lt;a&gt;</span><div><i style="width:0.0%"></i></div>' in parts.bar("<a>", 0.0, "none")
    assert "not recorded" in lines([Line(name="a", xs=[], ys=[], colour=0)], "loss")
    assert "<circle" in lines([Line(name="a", xs=[3], ys=[0.0], colour=0)], "loss")
    many = lines([Line(name="a", xs=range(10_000), ys=[float(n) for n in range(10_000)], colour=9)], "loss")
    assert many.count(",") < 1500


def test_lists_without_end_take_little_memory(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a.store", samples_of({"train/64x64": 4}))
    entries = [json.dumps({"reason": f"reason {number}", "id": "x"}) for number in range(1000)]
    entries += [json.dumps({"reason": "long", "id": "x" * (3 << 20)}), json.dumps({"reason": "reason 5", "id": "y"})]
    (store.path / "rejects.jsonl").write_text("\n".join(entries) + "\n")
    found = collect_lists(store)
    assert found.rejects["reason 5"] == 2
    assert found.rejects[OTHER_REASONS] == 800
    assert len(found.rejects) == MAX_REASONS + 1
    assert "long" not in found.rejects
