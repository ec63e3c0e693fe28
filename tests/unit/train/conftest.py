"""The trainer's fixtures."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import once
from tests.unit.train.packed_families import FAMILIES, Packed, pack_family
from tests.unit.train.tiny_run import make_training_store, write_unet, write_vae


@pytest.fixture(autouse=True)
def every_run_is_quick(quick_runs: None) -> None:
    """Apply `quick_runs` to all tests here."""


@pytest.fixture(scope="session")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ready = tmp_path_factory.mktemp("ready")
    make_training_store(ready / "tiny.store")
    write_vae(write_unet(ready / "model"))
    return ready


@pytest.fixture
def folder(ready: Path, tmp_path: Path) -> Path:
    return shutil.copytree(ready, tmp_path, dirs_exist_ok=True)


@pytest.fixture(scope="session", params=FAMILIES)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    with once(tmp_path_factory, f"{request.param} packed") as (folder, is_first):
        made = Packed(family=request.param, model=folder / request.param, store=folder / f"{request.param}.store")
        if is_first:
            assert pack_family(folder, request.param) == made
    return made
