"""The loops of `docs/your-own-loop.md` run as they stand, over stores packed with tiny models of the real classes.

Those of the README, `docs/loader.md` and `docs/seen-samples.md` run over photographs that `ingest pack` has encoded.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.batch import noise_like
from bucketline.store import LatentColumn, MaskColumn, ReferenceColumn, Store, StoreWriter
from bucketline.train.noise import draw_timesteps
from tests.commands import BIN, ROOT, spawn
from tests.photographs import crop_of
from tests.unit.train.packed_families import Packed, pack_family
from tests.unit.train.tiny_run import built

PAGE = ROOT / "docs" / "your-own-loop.md"
BLOCKS = dict(re.findall(r"\n## ([^\n]+)\n(?:(?!\n## ).)*?```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))


MODELS = {"Stable Diffusion": "sd", "SDXL": "sdxl", "Flux": "flux"}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Packed]:
    """Return what packs a dozen images with a family's own tiny pipeline, once."""
    return functools.cache(lambda family: pack_family(tmp_path_factory.mktemp(family), family))


def in_a_folder(packed: Packed, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "photos.store").symlink_to(packed.store)
    (folder / {"sd": "sd15"}.get(packed.family, packed.family)).symlink_to(packed.model)
    monkeypatch.chdir(folder)


def run(title: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "loop"}
    exec(compile(next(block for name, block in BLOCKS.items() if title in name), str(PAGE), "exec"), names)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("title", MODELS)
def test_a_loop_of_the_page_has_the_trainers_loss(
    title: str, packed: Callable[[str], Packed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = packed(MODELS[title])
    in_a_folder(own, tmp_path, monkeypatch)
    names = run(title)
    assert (tmp_path / "trained" / own.part / "config.json").is_file()
    trainer = built(own.config(tmp_path / "run"))
    with trainer.loader as loader:
        batch = next(loader.forever())
    training, prep = trainer.training, trainer.training.prep
    indices = draw_timesteps(prep.options, batch.keys, prep.schedule.num_timesteps)
    noise = noise_like(batch.latents, batch.latent_kind, batch.keys)
    monkeypatch.setattr(torch, "randn_like", lambda _: noise)
    monkeypatch.setattr(torch, "randint", lambda *_, **__: indices)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: (indices + 1) / prep.schedule.num_timesteps)
    names["model"].load_state_dict(training.bare_model.state_dict())
    with torch.no_grad():
        expected = training.errors(training.model, prep.for_training(batch), batch).mean()
        assert float(names["loss_of"](batch)) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.slow
def test_the_loop_of_pairs_sees_references_and_leaves_out_what_a_mask_does(
    packed: Callable[[str], Packed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = packed("flux")
    in_a_folder(own, tmp_path, monkeypatch)
    store = Store.open(own.store)
    channels = store.buckets()[0].column("latent").shape[0]
    columns = [LatentColumn(channels=channels), ReferenceColumn(0, channels=channels), MaskColumn()]
    text, random = store.manifest.text.spec(), np.random.default_rng(0)
    with StoreWriter(
        "pairs.store", columns=columns, encoders=store.encoders, text=text, empty_caption=store.read_caption(0, 0)
    ) as writer:
        for n in range(4):
            arrays: dict[str, Any] = {
                role: random.normal(size=(channels, 8, 8)).astype("<f2") for role in ("target", "reference/0")
            }
            mask = np.full((8, 8), 255, dtype="u1")
            mask[:4] = 0
            writer.add(f"{n}", "train", {**arrays, "mask": mask}, {"a cat": store.read_caption(0, 1)})
    names = run("Edit pairs")
    assert (tmp_path / "trained" / "transformer" / "config.json").is_file()
    batch = next(Loader("pairs.store", LoaderConfig(batch_size=4)).forever())

    def loss(**changes: torch.Tensor) -> float:
        torch.manual_seed(0)
        with torch.no_grad():
            return float(names["loss_of"](replace(batch, columns={**batch.columns, **changes})))

    whole = loss(mask=torch.full_like(batch.columns["mask"], 255))
    other = loss(mask=255 - batch.columns["mask"])
    assert loss() + other == pytest.approx(whole, rel=1e-5)
    assert loss(**{"reference/0": batch.references[0] + 1}) != loss()


@pytest.fixture
def folder(packed: Callable[[str], Packed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    in_a_folder(packed("sd"), tmp_path, monkeypatch)
    return tmp_path


@pytest.mark.slow
def test_the_loop_that_saves_is_over_when_it_is_run_again(folder: Path) -> None:
    first = run("Validation")
    state = json.loads((folder / "checkpoint" / "loader.json").read_text())
    assert state["epoch"] == 3
    assert first["losses"]
    assert "batch" not in run("Validation")  # nothing remained


@pytest.mark.slow
def test_the_loop_of_accelerate_resumes(folder: Path) -> None:
    names = run("Accelerate")
    assert names["loader"].state_dict()["epoch"] == 3
    assert (folder / "accelerate-state").is_dir()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_the_loop_of_lightning_resumes(folder: Path) -> None:
    names = run("Lightning")
    with Loader("photos.store", LoaderConfig(batch_size=2, remainder="partial")) as loader:
        assert names["trainer"].global_step == 2 * len(loader)
    assert (folder / "run.ckpt").is_file()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # in a single process
def test_a_loader_in_a_distributed_checkpoint_resumes(folder: Path) -> None:
    assert run("A data loader with a state")["steps"] == list(range(10))
    assert (folder / "step-5").is_dir()


def blocks(page: str) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    return [block for block in found if "photos.store" in block]


PAGES = ("README.md", "docs/loader.md", "docs/seen-samples.md")
ON_PHOTOGRAPHS = [(page, number) for page in PAGES for number in range(len(blocks(page)))]


@pytest.fixture(scope="module")
def packed_photographs(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """A store of photographs in two buckets, a fourth of them held out, packed by the demo's VAE."""
    folder = tmp_path_factory.mktemp("photographs")
    (folder / "photos").mkdir()
    for number in range(40):
        crop_of(number, 128, 128 + 64 * (number % 2)).save(folder / "photos" / f"{number}.png")
        (folder / "photos" / f"{number}.txt").write_text(f"photograph {number}\n", encoding="utf-8")
    packed = ("ingest", "pack", folder / "photos", folder / "photos.store", "--model", demo_model, "--val-fraction", 0.25)
    spawn([BIN / packed[0], *packed[1:]]).done()
    return folder / "photos.store"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize(("page", "number"), ON_PHOTOGRAPHS)
def test_a_loop_of_the_docs_runs_on_packed_photographs(
    page: str, number: int, packed_photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos.store").symlink_to(packed_photographs)
    monkeypatch.chdir(tmp_path)
    block = blocks(page)[number]
    names: dict[str, Any] = {}
    exec(compile(block, page, "exec"), names)
    for loader in (own for own in names.values() if isinstance(own, Loader)):
        loader.close()
    assert names.get("state", {"step": 1})["step"] >= 1


@pytest.mark.slow
def test_what_a_loop_trains_on_has_the_spread_that_the_vae_is_scaled_for(packed_photographs: Path) -> None:
    with Loader(packed_photographs, LoaderConfig(batch_size=4)) as loader:
        batches = list(loader)
    scaled, stored = (
        torch.cat([own.flatten() for own in some]) for some in zip(*((b.scaled(), b.latents) for b in batches), strict=True)
    )
    assert 0.7 < float(scaled.std()) < 1.4 < float(stored.float().std())
