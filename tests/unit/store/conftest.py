"""Fixtures that the tests of several folders use."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bucketline.store import Store
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.push_pull import push
from tests.object_storage import in_memory


@pytest.fixture
def copy(store: Store, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store.path, tmp_path / "copy"))


@pytest.fixture
def objects(copy: Path) -> ObjectFolder:
    """The copy's store in this process's memory, as in object storage."""
    folder = in_memory()
    push(copy, folder)
    return folder
