"""A scan with a model of any family: what it says is what packing then does."""

from __future__ import annotations

from pathlib import Path

import pytest

from bucketline.store import Store
from tests.commands import Ran, call
from tests.family_models import tiny_dc, write_pipeline
from tests.models import png, write_model

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


def row_bytes(source: Path, store: Path, model: Path, *more: object) -> int:
    """Pack, and return the bytes of the store's rows without text."""
    packed = call("ingest", "pack", source, store, *ASKED, "--model", model, *more, "--json").done().json
    return int(packed["payload_bytes"]) - sum(shard.caption_bytes for shard in Store.open(store).manifest.shards)


def test_moments_and_mirror_images_are_counted_without_a_model_too(images: Path) -> None:
    def counted(*more: object) -> int:
        report = call("ingest", "scan", images, *ASKED, *more, "--json").json
        return int(report["payload_bytes"])

    latents = len(CAPTIONS) * 4 * 2 * 3 * 2  # 16x24 px at an eighth, in F16
    assert counted("--latents", "moments") - counted() == latents
    assert counted("--flip") - counted() == latents
    assert counted("--flip", "--latents", "moments") - counted() == 3 * latents


def test_a_scan_knows_the_latents_of_an_autoencoder_without_a_distribution(images: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    tiny_dc().save_pretrained(folder / "vae")
    report = scan(images, folder, "--json").json
    assert report["payload_bytes"] == pytest.approx(row_bytes(images, tmp_path / "s", folder), rel=0.002)
    assert "AutoencoderDC has no distribution" in scan(images, folder, "--latents", "moments").err


@pytest.mark.parametrize("config", ["{}", '{"_class_name": "VQModel", "block_out_channels": [4], "latent_channels": 4}'])
def test_a_scan_refuses_a_vae_that_packing_would_refuse(config: str, images: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "vae" / "config.json").write_text(config, encoding="utf-8")
    ran = scan(images, folder)
    assert ran.code == 1
    assert any(found in ran.err for found in ("vae/config.json is not that of an AutoencoderKL", "vae/ is a VQModel, expected"))


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("sd", ("--latents", "moments")),
        ("sdxl", ("--dtype", "F32", "--flip")),
        ("flux", ("--latents", "sample", "--dtype", "BF16")),
    ],
)
def test_a_scan_foretells_the_bytes_of_rows_and_reads_no_weight(
    family: str, more: tuple[object, ...], images: Path, tmp_path: Path
) -> None:
    folder = write_pipeline(tmp_path / "model", family)
    expected = row_bytes(images, tmp_path / "s", folder, *more)
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    assert scan(images, folder, *more, "--json").done().json["payload_bytes"] == pytest.approx(expected, rel=0.002)
