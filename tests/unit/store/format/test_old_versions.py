"""Stores that earlier versions of the format wrote, kept as files: they hold, deliver and continue what they did."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.verify.verify import verify
from tests.building import tree
from tests.data.old_versions.make import NAMES, read_as_json

DATA = Path(__file__).parents[3] / "data" / "old_versions"
EXPECTED: dict[str, Any] = json.loads((DATA / "expected.json").read_text())


@pytest.fixture(params=NAMES)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a store of an earlier version."""
    name: str = request.param
    with tarfile.open(DATA / f"{name}.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    (tmp_path / name / "pending").mkdir(exist_ok=True)
    return tmp_path / name


def test_an_old_store_holds_and_delivers_what_it_did_and_reading_changes_no_byte(old: Path) -> None:
    before = tree(old)
    assert json.loads(json.dumps(read_as_json(old))) == EXPECTED[old.name]
    found = verify(Store.open(old), lambda _: None)
    assert (found.corrupt, found.strays) == ((), ())
    assert tree(old) == before


def test_a_state_taken_on_an_old_store_still_fits_it(old: Path) -> None:
    with Loader(Store.open(old), LoaderConfig(batch_size=2, seed=3)) as loader:
        state = loader.state_dict()
        loader.load_state_dict(EXPECTED[old.name]["state"])
        assert loader.state_dict() == EXPECTED[old.name]["state"] != state
