"""The trainer's fixtures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.train.packed_families import FAMILIES, Packed, pack_family
from tests.unit.train.tiny_run import make_training_store, write_unet, write_vae

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a store and a model in it, ready to train."""
    make_training_store(tmp_path / "tiny.store")
    write_vae(write_unet(tmp_path / "model"))
    return tmp_path


@pytest.fixture(scope="session", params=FAMILIES)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """A family's model folder, and a store that `ingest` packed with it; each once."""
    return pack_family(tmp_path_factory.mktemp("families"), request.param)
