"""The parts of an installed package are used as ours are: `examples/own_parts`, installed as its users would."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bucketline.loader import Loader, LoaderConfig
from bucketline.train.main import main
from tests.commands import BIN, called, spawn
from tests.pages import parsed
from tests.unit.train.outputs.test_checkpoint import MOMENTS
from tests.unit.train.tiny_run import as_arguments, config, losses, make_training_store, write_unet

pytestmark = pytest.mark.slow
PACKAGE = Path(__file__).resolve().parents[2] / "examples" / "own_parts"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("own")
    source = folder / "source"
    source.mkdir()
    for path in PACKAGE.iterdir():
        if path.is_file():
            (source / path.name).write_bytes(path.read_bytes())
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    spawn([*install, "--target", folder / "there", source]).done()
    return {"PYTHONPATH": str(folder / "there")}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, random = tmp_path_factory.mktemp("cache"), np.random.default_rng(0)
    for number in range(3):
        np.save(folder / f"{number}.npy", (7 * random.standard_normal((4, 16, 24))).astype(np.float32))
        (folder / f"{number}.txt").write_text(f"photo {number}", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def imported(environment: dict[str, str], cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("imported") / "s"
    command = [sys.executable, "-m", "bucketline.ingest", "import", "npy", cache, place, "--vae", "sdxl"]
    ran = spawn([*command, "--text", "none", "--dtype", "F32", "--json"], **environment).done()
    assert json.loads(ran.out)["imported"] == 3
    return place


def test_an_installed_packages_importer_is_used_by_its_name(imported: Path, cache: Path) -> None:
    with Loader(imported, LoaderConfig(batch_size=1, epochs=1)) as loader:
        read = {name: batch.latents[0].numpy() for batch in loader for name in loader.names(batch)}
    assert sorted(read) == ["0", "1", "2"]
    assert all((latent == np.load(cache / f"{name}.npy")).all() for name, latent in read.items())


def test_an_installed_packages_exporter_writes_what_its_importer_reads(
    environment: dict[str, str], imported: Path, cache: Path, tmp_path: Path
) -> None:
    ran = spawn([BIN / "store", "export", imported, tmp_path / "out", "--format", "npy", "--json"], **environment).done()
    assert json.loads(ran.out)["files"] == 6
    own, written = ({np.load(path).tobytes() for path in folder.glob("*.npy")} for folder in (cache, tmp_path / "out"))
    assert own == written
    assert {path.read_text(encoding="utf-8") for path in (tmp_path / "out").glob("*.txt")} == {f"photo {n}" for n in range(3)}
    ran = spawn([BIN / "store", "export", imported, tmp_path / "other", "--format", "npy"])
    assert (ran.code, ran.err) == (2, "error: --format is 'npy', expected webdataset, safetensors, kohya\n")


def test_an_installed_packages_report_is_a_command_of_its_own(environment: dict[str, str], imported: Path) -> None:
    ran = spawn([BIN / "store", "caption-lengths", imported, "--json"], **environment)
    assert (ran.code, json.loads(ran.out)) == (0, {"2": 3}), ran.err
    helped = spawn([BIN / "store", "--help"], **environment)
    assert (helped.code, helped.err) == (0, "")
    assert "caption-lengths" in helped.out
    assert "Count samples by the words of their first caption" in helped.out
    assert spawn([BIN / "store", "caption-lengths", imported]).code == 2


def test_an_installed_packages_section_is_in_the_report(environment: dict[str, str], imported: Path, tmp_path: Path) -> None:
    spawn([BIN / "store", "report", imported, "-o", tmp_path / "there.html"], **environment).done()
    found = parsed(tmp_path / "there.html")
    assert found.ids[-2:] == ["plan", "caption-lengths"]
    assert "Caption lengths" in found.text
    assert "<td>2</td><td>3</td>" in (tmp_path / "there.html").read_text(encoding="utf-8").replace(' class="n"', "")
    broken = tmp_path / "broken"
    shutil.copytree(environment["PYTHONPATH"], broken)
    (broken / "own_report.py").write_text("import a_library_that_is_missing", encoding="utf-8")
    spawn([BIN / "store", "report", imported, "-o", tmp_path / "broken.html"], PYTHONPATH=str(broken)).done()
    assert "of own-parts 1.0 cannot be imported (ModuleNotFoundError" in parsed(tmp_path / "broken.html").text
    assert spawn([BIN / "store", "report", imported, "-o", tmp_path / "without.html"]).code == 0
    assert "caption-lengths" not in parsed(tmp_path / "without.html").ids


def test_a_package_whose_command_cannot_be_imported_leaves_the_others_alone(
    environment: dict[str, str], tmp_path: Path
) -> None:
    there = tmp_path / "there"
    shutil.copytree(environment["PYTHONPATH"], there)
    (there / "own_report.py").write_text("import a_library_that_is_missing", encoding="utf-8")
    helped = spawn([BIN / "store", "--help"], PYTHONPATH=str(there)).done()
    assert "verify" in helped.out
    assert "caption-lengths' of own-parts 1.0 cannot be imported (ModuleNotFoundError" in " ".join(helped.err.split())
    ran = spawn([BIN / "store", "caption-lengths", tmp_path], PYTHONPATH=str(there))
    assert ran.code == 2
    assert "install what that package needs" in " ".join(ran.err.split())
    assert spawn([BIN / "store", "version"], PYTHONPATH=str(there)).code == 0


def test_an_installed_packages_family_is_found_by_its_pipeline_and_its_model(environment: dict[str, str]) -> None:
    program = (
        "from bucketline.families.registry import family_of_model, family_of_pipeline as p; "
        "print(p('OwnChromaPipeline').name, family_of_model({'_class_name': 'OwnChromaTransformer2DModel'}).name)"
    )
    ran = spawn([sys.executable, "-c", program], **environment)
    assert (ran.code, ran.out) == (0, "own-chroma own-chroma\n"), ran.err


def test_an_installed_packages_optimizer_trains_and_a_run_in_two_parts_equals_one(
    environment: dict[str, str], tmp_path: Path, quick_runs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_training_store(tmp_path / "tiny.store")
    write_unet(tmp_path / "model")
    whole = config(tmp_path, output_dir=tmp_path / "whole", max_steps=4, log_every=1, optimizer="own_optimizer:Lion")
    parts = replace(whole, output_dir=tmp_path / "parts")
    ran = called(main, *as_arguments(replace(whole, output_dir=tmp_path / "other")))
    assert ran.code == 2
    assert "--optimizer own_optimizer:Lion cannot be imported: " in ran.err
    assert not (tmp_path / "other").exists()
    monkeypatch.syspath_prepend(environment["PYTHONPATH"])
    for asked in (whole, replace(parts, max_steps=2), replace(parts, resume=True)):
        called(main, *as_arguments(asked)).done()
    assert losses(whole.output_dir) == losses(parts.output_dir)
    first, second = (load_file(one.output_dir / "checkpoints" / "step-00000004" / MOMENTS) for one in (whole, parts))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
