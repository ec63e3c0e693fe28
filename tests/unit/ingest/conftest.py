"""The images of `source` packed once a session, for tests of what a later pack does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.models import pack, write_images


@pytest.fixture(scope="session")
def packed_once(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A folder with the images of `source`, and the store `s` of them; only to be read."""
    folder = tmp_path_factory.mktemp("packed once")
    write_images(folder / "photos", 14)
    pack(folder / "photos", folder / "s", model).done()
    return folder


@pytest.fixture
def packed(packed_once: Path, tmp_path: Path) -> Path:
    """A folder of 14 images, some of them captioned, that the store `s` next to it was packed from."""
    shutil.copytree(packed_once, tmp_path, dirs_exist_ok=True)
    return tmp_path / "photos"
