"""Files of `store export --format kohya` are where sd-scripts looks: by each image's own size, its latents in one file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.commands import call
from tests.unit.ingest.importers.known import Known, make_known, run_import
from tests.unit.ingest.importers.writers import ai_toolkit, ai_toolkit_file, diffusion_pipe, kohya, kohya_latent


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    return make_known(tmp_path_factory.mktemp("flux"), "flux")


def found_by_size(images: Path, out: Path, family: str) -> dict[str, set[str]]:
    """Return the keys of the cache that sd-scripts looks for by an image's name and size; of images that have one."""
    found = {}
    for path in images.rglob("*.png"):
        with Image.open(path) as image:
            width, height = image.size
        name = path.relative_to(images).with_name(f"{path.stem}_{width:04d}x{height:04d}_{family}.npz")
        if (out / name).is_file():
            with np.load(out / name) as arrays:
                found[str(path.relative_to(images))] = set(arrays.files)
    return found


def exported(store: Path, out: Path, *options: Any) -> dict[str, Any]:
    """Export; it takes no more than was estimated."""
    asked = ("store", "export", store, out, "--format", "kohya", "--json", *options)
    planned, ran = call(*asked, "--dry-run"), call(*asked)
    assert ran.code == 0, ran.err
    files = [path for path in out.rglob("*") if path.is_file()]
    assert (ran.json["files"], ran.json["bytes"]) == (len(files), sum(path.stat().st_size for path in files))
    assert planned.json == {**ran.json, "files": None, "bytes": None, "dry_run": True}
    return ran.json


@pytest.mark.parametrize("with_images", [False, True], ids=["cache only", "next to the images"])
def test_several_sizes_of_an_image_go_into_one_file_as_they_came(*, with_images: bool, known: Known, tmp_path: Path) -> None:
    source = tmp_path / "cache"
    if with_images:
        kohya(source, known)
    for sample in known.samples:
        sizes: dict[str, Any] = {}
        path = source
        for cut in (slice(None), slice(0, 8)):
            latent = known.fed(sample.latent[:, cut, cut])
            path = kohya_latent(source, sample, "flux", latent)
            with np.load(path) as arrays:
                sizes |= dict(arrays)
        np.savez(path, **sizes)
    imported = run_import("kohya", source, tmp_path / "s.store", known, "--text", "none", "--dtype", "F32")
    assert imported.json["imported"] == 12
    assert exported(tmp_path / "s.store", tmp_path / "out")["samples"] == 12
    found = found_by_size(known.images, tmp_path / "out", "flux")
    assert found.keys() == {sample.id for sample in known.samples}
    for sample in known.samples:
        _, h, w = sample.latent.shape
        keys = ("latents", "original_size", "crop_ltrb")
        assert found[sample.id] == {f"{key}_{size}" for key in keys for size in (f"{h}x{w}", "8x8")}
    for path in source.rglob("*_flux.npz"):
        with np.load(path) as before, np.load(tmp_path / "out" / path.relative_to(source)) as after:
            for key in (key for key in before.files if key.startswith("latents")):
                np.testing.assert_allclose(after[key], before[key], rtol=1e-6, atol=1e-6)


def test_two_images_of_one_name_are_not_taken_for_two_sizes(known: Known, tmp_path: Path) -> None:
    source = kohya(tmp_path / "cache", known)
    sample = known.samples[0]
    assert run_import("kohya", source, tmp_path / "s.store", known, "--text", "none").code == 0
    other = kohya(tmp_path / "other", replace(known, samples=(replace(sample, latent=sample.latent[:, :8, :8]),)))
    (other / f"{sample.stem}.png").rename(other / f"{sample.stem}.jpg")
    store = tmp_path / "s.store"
    assert run_import("kohya", source, store, known, "--text", "none").code == 0
    assert run_import("kohya", other, store, known, "--text", "none").code == 0
    call("store", "export", store, tmp_path / "out", "--format", "kohya").fails("have one name in kohya's caches")


def test_a_sample_is_refused_if_the_size_of_its_image_is_unknown(known: Known, tmp_path: Path) -> None:
    source = diffusion_pipe(tmp_path / "cache", known)
    assert run_import("diffusion-pipe", source, tmp_path / "s.store", known, "--text", "none").code == 0
    call("store", "export", tmp_path / "s.store", tmp_path / "out", "--format", "kohya").fails("size of its image is unknown")
    assert not (tmp_path / "out").exists()


def test_the_latent_of_a_mirrored_image_is_refused_by_name(tmp_path: Path) -> None:
    own = make_known(tmp_path / "known", "sdxl", count=2)
    source = ai_toolkit(tmp_path / "cache", own)
    ai_toolkit_file(source, own, own.samples[0], "sdxl", flip_x=True)
    assert run_import("ai-toolkit", source, tmp_path / "s.store", own, "--text", "none").code == 0
    refused = call("store", "export", tmp_path / "s.store", tmp_path / "out", "--format", "kohya")
    assert refused.code == 1
    assert f"'{own.samples[0].id}/flip_x' is of the mirrored image" in refused.err
