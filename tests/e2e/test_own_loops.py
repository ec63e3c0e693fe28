"""The loops of `docs/your-own-loop.md` run as they stand, over a store with held-out samples; and the help texts name all."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest

from bucketline.loader import Loader, LoaderConfig
from tests.commands import ROOT
from tests.kit import make_store, samples_of

if TYPE_CHECKING:
    from pathlib import Path

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
