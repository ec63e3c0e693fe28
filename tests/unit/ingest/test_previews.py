"""`ingest previews`: previews next to decoded images, on real photographs and the demo's VAE; factors that fit are saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bucketline.bench.fixtures.photographs import PHOTOGRAPHS
from tests.commands import ROOT, Ran, call
from tests.models import write_model
from tests.photographs import photograph

pytestmark = pytest.mark.slow  # it encodes photographs


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A store of photographs, packed with the demo's VAE, and the model."""
    folder = tmp_path_factory.mktemp("previews")
    model = write_model(folder / "model")
    for name in ("config.json", "diffusion_pytorch_model.safetensors"):
        (model / "vae" / name).unlink()
        (model / "vae" / name).symlink_to(ROOT / "demo" / "vae" / name)
    (folder / "photos").mkdir()
    for n, file in enumerate(PHOTOGRAPHS):
        image = photograph(file).copy()  # the other is kept for all tests
        image.thumbnail((160, 160))
        image.save(folder / "photos" / f"{n}.png")
    call("ingest", "pack", folder / "photos", folder / "s", "--model", model, "--grid", "area:96:32").done()
    return folder / "s", model


def previews(packed: tuple[Path, Path], page: Path, *more: object) -> Ran:
    return call("ingest", "previews", packed[0], "--model", packed[1], "-o", page, *more)


def test_fitted_factors_show_photographs_that_they_were_not_fitted_to(packed: tuple[Path, Path], tmp_path: Path) -> None:
    factors = tmp_path / "factors.json"
    ran = previews(packed, tmp_path / "page.html", "--samples", 10, "--save-factors", factors, "--json").done()
    found = ran.json
    assert found["published"] is None
    assert found["samples"] + found["fitted_on"] in (9, 10)
    assert found["fitted_rms"] < 0.5 * found["gray_rms"]
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<figure>") == found["samples"]
    assert page.count("data:image/png") == page.count("data:image/jpeg") == found["samples"]
    assert len(json.loads(factors.read_text())["factors"]) == 4


def test_nothing_is_written_over_another_file(packed: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("mine", encoding="ascii")
    previews(packed, tmp_path / "page.html").fails("page.html exists", code=2)
    ran = previews(packed, tmp_path / "other.html", "--samples", 0)
    assert "--samples is 0, expected 1 or more" in ran.err
