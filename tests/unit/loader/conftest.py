"""A service that the tests of this folder share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bucketline.store import Store


@pytest.fixture(scope="package")
def socket_path(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a service that reads `store`."""
    path = tmp_path_factory.mktemp("service") / "s"
    with serving(path, store.path):
        yield path
