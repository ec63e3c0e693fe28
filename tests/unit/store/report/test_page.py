"""The page of `store report`: everything is on it, nothing is fetched, strange texts stay texts, and its colours are right."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from bucketline.pages.page import Finding, Line, lines, parts, png
from bucketline.store import RowColumn, Store, StoreWriter
from bucketline.store.report import facts as facts_module
from bucketline.store.report.facts import check_latents, check_pairs, collect_facts, collect_lists, near_duplicates, vae_of
from bucketline.store.report.latent_rgb import (
    LATENT_RGB,
    PUBLISHED,
    LatentRgb,
    false_colours,
    published_for,
    scaled,
    vae_family_of,
)
from bucketline.store.report.report import findings
from tests.browser import Browser, check_page, check_record, find_browser
from tests.commands import call
from tests.kit import make_sample, make_store, samples_of
from tests.models import SMALL
from tests.pages import parsed
from tests.photographs import crop_of
from tests.unit.store.report.conftest import CONSTANT, DUPLICATES, NAME, NAN_ROW, ROWS, cropped, write_store

FAULTY = ("constant", "duplicates", "crops")


@pytest.fixture(scope="module")
def page(store_with: Callable[..., Store], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pages") / "report.html"
    ran = call(
        "store", "report", store_with(*FAULTY, scaling_factor=0.45).path, "-o", out, "--samples", 30, "--batch-size", 8
    ).done()
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
    sections = ["buckets", "samples", "crops", "captions", "rejects", "latents", "duplicates", "provenance", "plan"]
    assert [name for name in found.ids if name in sections] == sections
    for words in (
        "5 constant latents",
        "Wrong scaling factor, or a broken VAE",
        "train/192x320 loses 60 % of its images to cropping",
        "10 near-duplicates in 1 cluster",
        "Most frequent words",
        "scaling_factor",
        "8 steps, 64 rows delivered",
    ):
        assert words in found.text


def test_samples_are_at_most_as_many_as_requested_and_captions_are_text_and_not_markup(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    gallery = text[text.index("data-gallery") : text.index('id="crops"')]
    assert gallery.count("<figure>") == 30
    assert gallery.count('<div class="by-choice"') == 3
    assert "<b>& more</b>" in parsed(page).text
    assert "<b>&amp;" not in text.split("<h2>Samples", 1)[1].split("</section>")[0]


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
    assert found["detail"].startswith("train/64x96 has 2 images, ")
    assert found["detail"].endswith("; use a smaller batch or fewer GPUs, or pack with a coarser --grid")


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
        one, other = (text[text.index(f'<section id="{name}"') :].partition("</section>")[0] for text in (ours, theirs))
        assert one == other


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


def test_what_is_no_entry_of_a_list_is_left_out(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a.store", samples_of({"train/64x64": 4}))
    entries = [json.dumps({"reason": "few", "id": "x"}), json.dumps({"reason": "long", "id": "x" * (3 << 20)})]
    entries += ["[" * 100_000, "1", json.dumps({"reason": "few", "id": "y"})]
    (store.path / "rejects.jsonl").write_text("\n".join(entries) + "\n")
    assert collect_lists(store).rejects == {"few": 2}


# The words at the top of `store report`: each seeded fault is named with its number, and a good store has none.


def found_in(store: Store, most: int = 1000) -> list[Finding]:
    return findings(
        facts=collect_facts(store, 4),
        lists=collect_lists(store),
        latents=check_latents(store, most),
        pairs=check_pairs(store, most),
        vae=vae_of(store),
    )


def wrong(store: Store) -> list[Finding]:
    return [one for one in found_in(store) if one.level != "good"]


def test_a_good_store_has_no_finding(store_with: Callable[..., Store]) -> None:
    assert not wrong(store_with())
    assert {one.title for one in found_in(store_with())} == {
        "No NaN",
        "The latents' spread fits their VAE",
        "No near-duplicates",
        "Little is cropped away",
    }


SEEDED: dict[str, tuple[str, list[int]]] = {
    "constant": (f"{CONSTANT} constant latents", list(range(CONSTANT))),
    "duplicates": (f"{DUPLICATES} near-duplicates in 1 cluster", list(range(CONSTANT + 1, CONSTANT + 1 + DUPLICATES))),
    "nan": ("1 latent with NaN or infinity", [NAN_ROW]),
    "crops": ("train/192x320 loses 60 % of its images to cropping", []),
}


@pytest.mark.parametrize("fault", SEEDED)
def test_a_seeded_fault_is_the_only_finding_and_its_rows_are_known(fault: str, store_with: Callable[..., Store]) -> None:
    (only,) = wrong(store_with(fault))
    title, rows = SEEDED[fault]
    assert (only.title, only.level) == (title, "error" if fault == "nan" else "warning")
    facts = check_latents(store_with(fault), 1000)
    assert [
        place.row for place in (*facts.constant, *facts.not_finite, *(one for own in facts.clusters for one in own))
    ] == rows


@pytest.mark.parametrize(("factor", "level"), [(0.13025, "warning"), (0.45, "error"), (0.05, "error")])
def test_a_wrong_scaling_factor_is_named_and_one_that_fits(store_with: Callable[..., Store], factor: float, level: str) -> None:
    (only,) = wrong(store_with(scaling_factor=factor))
    assert only.level == level
    assert f"recorded scaling factor {factor:g}" in only.detail
    assert "A factor of 0.1" in only.detail
    assert "scaled twice" not in only.detail


def test_what_was_encoded_here_is_not_judged_by_a_factor(store_with: Callable[..., Store]) -> None:
    assert not wrong(store_with("encoded here", scaling_factor=0.45))


def test_a_few_latents_are_not_judged_by_a_factor(store_with: Callable[..., Store]) -> None:
    store = store_with(scaling_factor=0.45)
    assert not [one.title for one in found_in(store, 99) if one.level != "good"]
    assert [one.title for one in wrong(store)] == ["Wrong scaling factor, or a broken VAE"]


def test_latents_that_were_scaled_before_they_were_stored_are_recognised(store_with: Callable[..., Store]) -> None:
    faults = [one for one in wrong(store_with("scaled before")) if one.level == "error"]
    assert [one.title for one in faults] == ["Wrong scaling factor, or a broken VAE"]
    assert "would be scaled twice" in faults[0].detail


def test_a_drawn_part_says_that_it_is_one(store_with: Callable[..., Store]) -> None:
    total = sum(ROWS.values())
    facts = check_latents(store_with(), 20)
    assert (facts.live, facts.read) == (total, 20)
    assert any(f"20 latents read (drawn from {total})" in one.detail for one in found_in(store_with(), 20))
    assert (check_latents(store_with(), 20).std == facts.std).all()


def test_rejects_and_cut_captions_are_findings(store_with: Callable[..., Store]) -> None:
    store = store_with("crops", "nan", "cut")
    lines = [{"id": f"{n}.png", "reason": "empty file", "detail": "0 bytes"} for n in range(9)]
    (store.path / "rejects.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in lines) + "{broken\n", encoding="ascii"
    )
    by_title = {one.title: one.detail for one in wrong(store)}
    assert by_title["9 images rejected"] == "8.1 % of the images found: 9 empty file."
    number = len(ROWS)
    assert by_title[f"{number} captions cut by a text encoder"].startswith(f"text_encoder: {number}.")
    assert (NAME.format(1), "text_encoder", 90, 77, "the rest") in collect_facts(store, 1).cut_examples


def test_a_chain_of_alike_latents_is_one_cluster_and_thousands_of_copies_are_found_quickly() -> None:
    random = np.random.default_rng(0)
    turns = np.arange(30) * 0.1  # each is 0.1 rad from the next: a cosine of 0.995; its ends are not alike
    chain = np.stack([np.cos(turns), np.sin(turns)], axis=1) @ np.linalg.qr(random.normal(size=(256, 2)))[0].T
    others = random.normal(size=(40, 256)) / 16
    found = near_duplicates(np.concatenate([others, chain, -chain]).astype(np.float32))
    assert found == [list(range(40, 70)), list(range(70, 100))]
    copies = np.concatenate([np.repeat(others[:2], 1500, axis=0), -others[:2].repeat(700, axis=0)]).astype(np.float32)
    assert [len(cluster) for cluster in near_duplicates(copies)] == [1500, 1500, 700, 700]


def test_frequent_words_stay_and_rare_ones_make_room(store_with: Callable[..., Store], monkeypatch: pytest.MonkeyPatch) -> None:
    counted = collect_facts(store_with(), 1).words
    assert counted.most_common(1) == [("b", 2 * sum(ROWS.values()))]  # twice in each caption
    assert len(counted) > 4
    monkeypatch.setattr(facts_module, "MAX_WORDS", 4)
    few = collect_facts(store_with(), 1).words
    assert few["b"] == counted["b"]
    assert len(few) <= 4


def provenance(name: str) -> dict[str, Any]:
    vae = PUBLISHED[name]
    return {
        "class": vae.kind,
        "latent_channels": vae.channels,
        "scaling_factor": vae.scaling,
        "shift_factor": vae.shift,
        "latents_mean": None if vae.mean is None else list(vae.mean),
        "latents_std": None if vae.std is None else list(vae.std),
    }


def smooth_image(height: int, width: int) -> NDArray[np.uint8]:
    down, across = np.mgrid[0:height, 0:width] / max(height, width)
    waves = [np.sin(5 * down + k * 3 * across + k) for k in range(3)]
    image: NDArray[np.uint8] = (127.5 + 90 * np.stack(waves, axis=-1)).astype(np.uint8)
    return image


def latent_of(rgb: LatentRgb, image: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return a scaled latent whose preview by these factors is the image: the smallest one."""
    values = image.reshape(-1, 3) / 127.5 - 1.0 - rgb.bias
    latent: NDArray[np.float64] = (values @ np.linalg.pinv(rgb.factors)).T.reshape(rgb.channels, *image.shape[:2])
    return latent


@pytest.mark.parametrize("name", sorted(LATENT_RGB))
def test_a_stores_constants_choose_the_factors_and_the_scaling_that_they_are_for(name: str) -> None:
    rgb, vae, image = LATENT_RGB[name], provenance(name), smooth_image(12, 20)
    assert published_for(vae) is rgb
    assert rgb.factors.shape == (PUBLISHED[name].channels, 3)
    as_fed = latent_of(rgb, image)
    stored = as_fed / PUBLISHED[name].scaling + PUBLISHED[name].shift
    shown = rgb.image(scaled(stored[None], vae)[0])
    assert np.abs(shown.astype(int) - image).max() <= 1
    assert "ComfyUI" in rgb.source


@pytest.mark.parametrize("name", sorted(LATENT_RGB))
def test_published_factors_see_colours_apart(name: str) -> None:
    values = np.linalg.svd(LATENT_RGB[name].factors, compute_uv=False)
    assert values[2] > 0.05 * values[0]


def test_a_vae_of_other_constants_has_no_published_factors() -> None:
    assert vae_family_of(provenance("sd") | {"scaling_factor": 0.45108}) is None
    assert published_for(provenance("wan")) is None
    assert published_for({}) is None


def test_values_that_are_not_finite_are_shown_as_none() -> None:
    rgb = LATENT_RGB["sd"]
    broken = np.zeros((4, 3, 3), dtype=np.float32)
    broken[0, 1, 1] = np.nan
    broken[2, 0, 0] = np.inf
    assert (rgb.image(broken) == rgb.image(np.zeros((4, 3, 3)))).all()


def test_false_colours_show_what_differs_most_as_brightness() -> None:
    random = np.random.default_rng(0)
    latent = random.normal(size=(16, 8, 8)) * 0.01 + 3.0
    latent[5, :, 4:] += 1.0
    image = false_colours([latent]).image(latent).astype(int)
    assert abs(int(image[:, 4:].mean()) - int(image[:, :4].mean())) > 80
    assert 100 < image.mean() < 155


def test_false_colours_of_latents_without_a_finite_value_are_grey() -> None:
    latent = np.full((4, 2, 2), np.nan)
    assert (false_colours([latent]).image(latent) == 128).all()


# In the browser of this machine; on one that has none, the record that a browser tried the pages holds instead.


@pytest.mark.slow
def test_a_report_works_in_a_browser(tmp_path: Path) -> None:
    program = find_browser()
    if program is None:
        check_record()
        return
    store = write_store(tmp_path / "photos.store", "constant", "duplicates", "crops", scaling_factor=0.45)
    assert call("store", "report", store.path, "-o", tmp_path / "report.html").code == 0
    with Browser(program) as browser:
        assert "search and buckets" in check_page(browser, tmp_path / "report.html")
        # a page that does what is forbidden is noticed
        text = (
            (tmp_path / "report.html")
            .read_text(encoding="utf-8")
            .replace('"use strict";', '"use strict"; console.log("mine");')
        )
        (tmp_path / "changed.html").write_text(text, encoding="utf-8")
        with pytest.raises(AssertionError):
            check_page(browser, tmp_path / "changed.html")
