"""A scan with a model of any family: what it says is what packing then does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bucketline.store import Store
from tests.commands import Ran, call
from tests.family_models import PIPELINES, tiny_dc, write_dit, write_pipeline
from tests.models import in_file, png, write_model

CAPTIONS = ("a red cat", "tabby", "cat " * 100, "", "2", "dog")
ASKED = ("--grid", "16x24", "--min-size-px", 8)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for n, text in enumerate(CAPTIONS):
        (folder / f"{n}.png").write_bytes(png(16, 24, seed=n))
        (folder / f"{n}.txt").write_text(text, encoding="utf-8")
    return folder


def scan(source: Path, model: Path, *more: object) -> Ran:
    return call("ingest", "scan", source, *ASKED, "--model", model, *more)


def packed(source: Path, store: Path, model: Path, *more: object) -> Any:
    ran = call("ingest", "pack", source, store, *ASKED, "--model", model, *more, "--json").done()
    return ran.json


def without_weights(folder: Path) -> Path:
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    return folder


@pytest.fixture
def long_captions(tmp_path: Path) -> Path:
    """Captions on both sides of every family's limit."""
    folder = tmp_path / "long"
    folder.mkdir()
    lengths = (3, 75, 76, 119, 120, 255, 256, 299, 300, 511, 512)
    texts = ["", *("cat " * length for length in lengths), "The GREEN house of dogs"]
    for n in range(0, len(texts), 3):
        (folder / f"{n}.png").write_bytes(png(16, 24, seed=n))
        (folder / f"{n}.txt").write_text("\n".join(texts[n : n + 3]), encoding="utf-8")
    return folder


TOO_LONG = {"sd": 9, "sdxl": 9, "sd3": 5, "sd3 without T5": 9, "flux": 1, "pixart_alpha": 7, "pixart_sigma": 3}
OPTIONS: dict[str, tuple[object, ...]] = {
    "sd": ("--latents", "moments"),
    "sdxl": ("--dtype", "F32", "--flip"),
    "sd3": ("--max-tokens", 20),
    "sd3 without T5": ("--max-tokens", 20),
    "flux": ("--max-tokens", 90, "--latents", "sample", "--dtype", "BF16"),
    "pixart_alpha": ("--max-tokens", 300, "--latents", "moments", "--flip"),
    "pixart_sigma": ("--latents", "sample"),
}


@pytest.mark.parametrize("more", [pytest.param("as it is", marks=pytest.mark.slow), "with options"])
@pytest.mark.parametrize("family", list(PIPELINES))
def test_a_scan_foretells_what_packing_stores_of_captions_and_reads_no_weight(
    family: str, more: str, long_captions: Path, tmp_path: Path
) -> None:
    folder = write_pipeline(tmp_path / "model", family)
    options = OPTIONS[family] if more == "with options" else ()
    summary = packed(long_captions, tmp_path / "s", folder, *options)
    ran = scan(long_captions, without_weights(folder), *options, "--json").done()
    report = ran.json
    assert report["text_family"] == family.removesuffix(" without T5")
    assert report["captions_too_long"] == summary["captions_truncated"]
    assert report["payload_bytes"] == pytest.approx(summary["payload_bytes"], rel=0.002)
    manifest = Store.open(tmp_path / "s").manifest
    assert report["text_bytes"] == sum(shard.caption_bytes for shard in manifest.shards)
    assert report["max_tokens"] == manifest.encoders["text_encoder"]["max_tokens"]  # type: ignore[call-overload,index]
    assert report["text_padding"] == manifest.encoders["text_encoder"]["padding"]  # type: ignore[call-overload,index]
    if not options:
        assert (report["captions"], report["captions_too_long"]) == (12, TOO_LONG[family])


def test_a_scan_tells_people_what_the_text_takes(images: Path, tmp_path: Path) -> None:
    out = scan(images, without_weights(write_pipeline(tmp_path / "sd3", "sd3"))).out
    assert "text, sd3: 5 captions of 333 tokens, " in out
    assert "use --model" not in out
    out = scan(images, without_weights(write_pipeline(tmp_path / "pixart", "pixart_sigma"))).out
    assert "text, pixart_sigma: 5 captions of at most 300 tokens, " in out


@pytest.mark.parametrize(
    ("family", "more", "words"),
    [
        ("sd", ("--max-tokens", 20), "the tokenizer determines the length of sd captions; leave the option out"),
        ("flux", ("--max-tokens", 5000), "--max-tokens is 5000, expected 512 or fewer"),
        ("flux", ("--max-tokens", 0), "--max-tokens is 0, expected 1 or more"),
        ("class_labels", ("--max-tokens", 3), "takes a class, not text; leave the option out"),
        ("transformers", ("--max-tokens", 13), "accepts at most 12"),
        ("transformers", ("--latents", "moments"), "AutoencoderDC has no distribution, only one latent"),
    ],
)
def test_a_scan_refuses_the_options_that_packing_would_refuse(
    family: str, more: tuple[object, ...], words: str, images: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    if family == "class_labels":
        write_dit(folder, {0: "tabby"})
    elif family == "transformers":
        write_model(folder)
        tiny_dc().save_pretrained(folder / "vae")
    else:
        write_pipeline(folder, family)
    asked = (*ASKED, "--grid", "16x16", "--model", folder, *more)
    for ran in (call("ingest", "scan", images, *asked), call("ingest", "pack", images, tmp_path / "s", *asked)):
        assert ran.code == 2, ran.err
        assert words in ran.err


def test_moments_and_mirror_images_are_counted_without_a_model_too(images: Path) -> None:
    def row_bytes(*more: object) -> int:
        report = call("ingest", "scan", images, *ASKED, *more, "--json").json
        return int(report["payload_bytes"])

    latents = len(CAPTIONS) * 4 * 2 * 3 * 2  # 16x24 px at an eighth, in F16
    assert row_bytes("--latents", "moments") - row_bytes() == latents
    assert row_bytes("--flip") - row_bytes() == latents
    assert row_bytes("--flip", "--latents", "moments") - row_bytes() == 3 * latents
    call("ingest", "scan", images, *ASKED, "--max-tokens", 20).fails("requires --model", code=2)


def test_a_scan_refuses_the_captions_that_name_no_class(images: Path, tmp_path: Path) -> None:
    (images / "0.txt").write_text("1\ntabby\nhorse", encoding="utf-8")
    folder = write_dit(tmp_path / "model", {0: "tabby", 1: "dog"})
    more = ("--grid", "16x16", "--min-size-px", 8, "--model", folder, "--json")
    file = in_file(tmp_path / "d.toml", images, max_captions=2)
    report = call("ingest", "scan", file, *more).json
    summary = call("ingest", "pack", file, tmp_path / "s", *more).json
    assert report["text_family"] == "class_labels"
    assert report["rejected_by_reason"] == summary["rejected_by_reason"] == {"caption that the model does not take": 1}
    assert "is not a class of the model" in report["rejects"][0]["detail"]
    assert report["captions_too_long"] == summary["captions_truncated"] == 0
    assert report["payload_bytes"] == pytest.approx(summary["payload_bytes"], rel=0.002)


def test_a_scan_knows_the_latents_of_an_autoencoder_without_a_distribution(images: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    tiny_dc().save_pretrained(folder / "vae")
    report, summary = scan(images, folder, "--json").json, packed(images, tmp_path / "s", folder)
    assert report["payload_bytes"] == pytest.approx(summary["payload_bytes"], rel=0.002)


@pytest.mark.parametrize("config", ["{}", '{"_class_name": "VQModel", "block_out_channels": [4], "latent_channels": 4}'])
def test_a_scan_refuses_a_vae_that_packing_would_refuse(config: str, images: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "vae" / "config.json").write_text(config, encoding="utf-8")
    ran = scan(images, folder)
    assert ran.code == 1
    assert any(found in ran.err for found in ("vae/config.json is not that of an AutoencoderKL", "vae/ is a VQModel, expected"))
