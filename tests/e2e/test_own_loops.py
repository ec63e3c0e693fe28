"""The loops of `docs/your-own-loop.md` run as they stand, over a store with held-out samples; and the help texts name all.

Those of the README, of this page and of `docs/loader.md` also run over photographs that `ingest pack` has encoded.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from bucketline.loader import Loader, LoaderConfig
from tests.commands import BIN, ROOT, spawn
from tests.kit import make_store, samples_of
from tests.photographs import crop_of

PAGE = ROOT / "docs" / "your-own-loop.md"
BLOCKS = dict(re.findall(r"\n## ([^\n]+)\n(?:(?!\n## ).)*?```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
EACH = 7 // 2 + 4 // 2 + 1  # batches of an epoch of `partial`


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_store(tmp_path / "photos.store", samples_of({"train/64x64": 7, "train/96x64": 4, "val/64x64": 3}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(title: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(next(block for name, block in BLOCKS.items() if title in name), str(PAGE), "exec"), names)
    return names


def test_the_page_has_these_loops() -> None:
    assert [name.partition(" ")[0] for name in BLOCKS] == ["Plain", "Accelerate", "Lightning", "A"]


def test_the_plain_loop_trains_its_epochs_and_is_over_when_it_is_run_again(folder: Path) -> None:
    first = run("Plain PyTorch")
    state = json.loads((folder / "checkpoint.json").read_text())
    assert (state["epoch"], state["step"]) == (3, -(-3 * 7 // 2) + 3 * 4 // 2)
    assert len(first["losses"]) == 2
    assert "batch" not in run("Plain PyTorch")  # nothing remained


@pytest.mark.slow
def test_the_loop_of_accelerate_resumes(folder: Path) -> None:
    names = run("Accelerate")
    assert names["loader"].state_dict()["epoch"] == 3
    assert (folder / "accelerate-state").is_dir()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_the_loop_of_lightning_resumes(folder: Path) -> None:
    names = run("Lightning")
    assert names["trainer"].global_step == 2 * EACH
    assert (folder / "run.ckpt").is_file()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # in a single process
def test_a_loader_in_a_distributed_checkpoint_resumes(folder: Path) -> None:
    assert run("A data loader with a state")["steps"] == list(range(10))
    assert (folder / "step-5").is_dir()


def test_help_says_what_each_field_of_the_configuration_means() -> None:
    told = re.findall(r"^        (\w+): \S", LoaderConfig.__doc__ or "", re.MULTILINE)
    assert sorted(told) == sorted(field.name for field in fields(LoaderConfig))
    for shown in ("for epoch in range(E):", "rewind=True", "load_state_dict(state)"):
        assert shown in (Loader.__doc__ or "")


SERVED = "127.0.0.1:9401"  # of the block that reads from another machine; tests/unit/loader/service/test_tcp.py has one


def blocks(page: str) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    return [block for block in found if "photos.store" in block]


ON_PHOTOGRAPHS = [
    (page, number) for page in ("README.md", "docs/loader.md", "docs/your-own-loop.md") for number in range(len(blocks(page)))
]


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
    if SERVED not in block:
        names: dict[str, Any] = {}
        exec(compile(block, page, "exec"), names)
        for loader in (own for own in names.values() if isinstance(own, Loader)):
            loader.close()


@pytest.mark.slow
def test_what_a_loop_trains_on_has_the_spread_that_the_vae_is_scaled_for(packed_photographs: Path) -> None:
    with Loader(packed_photographs, LoaderConfig(batch_size=4)) as loader:
        batches = list(loader)
    scaled, stored = (
        torch.cat([own.flatten() for own in some]) for some in zip(*((b.scaled(), b.latents) for b in batches), strict=True)
    )
    assert 0.7 < float(scaled.std()) < 1.4 < float(stored.float().std())


def test_no_loop_of_the_docs_or_the_examples_takes_unscaled_latents() -> None:
    pages = [ROOT / page for page in ("README.md", "docs/loader.md", "docs/your-own-loop.md")]
    for path in (*pages, *(ROOT / "examples").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        code = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)) if path.suffix == ".md" else text
        used = re.findall(r"^.*batch\.latents(?!\.shape).*$", re.sub(r"#.*", "", code), re.MULTILINE)
        assert not used, f"{path.name}: {used}; a model is trained on batch.scaled()"
