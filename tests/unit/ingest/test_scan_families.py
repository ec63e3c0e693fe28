"""A scan with a model of any family: what it says is what packing then does, and what it cannot know it says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.commands import Ran, call
from tests.family_models import PIPELINES, tiny_dc, write_dit, write_pipeline
from tests.models import png, write_model

if TYPE_CHECKING:
    from pathlib import Path

CAPTIONS = ("a red cat", "tabby", "cat " * 100, "", "2", "dog")
ASKED = ("--grid", "16x24", "--min-size-px", 8)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for n, text in enumerate(CAPTIONS):
        (folder / f"{n}.png").write_bytes(png(16, 24, seed=n))
        (folder / f"{n}.txt").write_text(text, encoding="utf-8")
    return folder


def scan(source: Path, model: Path, *more: object) -> Ran:
    return call("ingest", "scan", source, *ASKED, "--model", model, *more)


def packed(source: Path, store: Path, model: Path) -> Any:
    ran = call("ingest", "pack", source, store, *ASKED, "--model", model, "--json")
    assert ran.code == 0, ran.err
    return ran.json


def test_a_scan_knows_the_captions_of_one_clip(pictures: Path, tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "model", "sd")
    report, summary = scan(pictures, folder, "--json").json, packed(pictures, tmp_path / "s", folder)
    assert report["text_family"] == "sd"
    assert report["captions_too_long"] == summary["captions_truncated"] == 1
    assert report["payload_bytes"] == pytest.approx(summary["payload_bytes"], rel=0.05)


@pytest.mark.parametrize("family", [family for family in PIPELINES if family != "sd"])
def test_a_scan_says_that_it_does_not_know_what_other_families_make_of_captions(
    family: str, pictures: Path, tmp_path: Path
) -> None:
    folder = write_pipeline(tmp_path / "model", family)
    report = scan(pictures, folder, "--json").json
    assert (report["rejected"], report["captions_too_long"], report["captions_too_long_texts"]) == (0, None, [])
    assert report["text_family"] == family.removesuffix(" without T5")
    out = scan(pictures, folder).out
    assert f"without its text: what {report['text_family']} makes of captions" in out
    assert "give --model" not in out


def test_a_scan_refuses_the_captions_that_name_no_class(pictures: Path, tmp_path: Path) -> None:
    (pictures / "0.txt").write_text("1\ntabby\nhorse", encoding="utf-8")
    folder = write_dit(tmp_path / "model", {0: "tabby", 1: "dog"})
    more = ("--grid", "16x16", "--max-captions", 2, "--min-size-px", 8, "--model", folder, "--json")
    report = call("ingest", "scan", pictures, *more).json
    summary = call("ingest", "pack", pictures, tmp_path / "s", *more).json
    assert report["text_family"] == "class_labels"
    assert report["rejected_by_reason"] == summary["rejected_by_reason"] == {"unknown class": 1}
    assert "is no class of the model" in report["rejects"][0]["detail"]
    assert report["captions_too_long"] == summary["captions_truncated"] == 0
    assert report["payload_bytes"] == pytest.approx(summary["payload_bytes"], rel=0.05)


def test_a_scan_knows_the_latents_of_an_autoencoder_without_a_distribution(pictures: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    tiny_dc().save_pretrained(folder / "vae")
    report, summary = scan(pictures, folder, "--json").json, packed(pictures, tmp_path / "s", folder)
    assert report["payload_bytes"] == pytest.approx(summary["payload_bytes"], rel=0.05)


@pytest.mark.parametrize("config", ["{}", '{"_class_name": "VQModel", "block_out_channels": [4], "latent_channels": 4}'])
def test_a_scan_refuses_a_vae_that_packing_would_refuse(config: str, pictures: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "vae" / "config.json").write_text(config, encoding="utf-8")
    ran = scan(pictures, folder)
    assert ran.code == 1
    assert "vae/config.json is not that of an AutoencoderKL" in ran.err
