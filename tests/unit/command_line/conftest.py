"""A pack of a few images, as the command line does it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import Ran, call
from tests.models import SMALL, write_images


def pack(source: Path, store: Path, model: Path, *more: object) -> Ran:
    return call("ingest", "pack", source, store, "--model", model, *SMALL, *more)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("packed")
    write_images(folder / "photos", 14)
    pack(folder / "photos", folder / "s", model, "--val-fraction", "0.2:id").done()
    return folder / "photos", folder / "s"
