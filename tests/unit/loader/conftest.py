"""A service that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bucketline.store import Store
from tests.serving import serving


@pytest.fixture(scope="package")
def socket_path(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("service") / "s"
    with serving(path, store.path):
        yield path
