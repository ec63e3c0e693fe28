from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.ingest.importers.known import make_known

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.ingest.importers.known import Known


@pytest.fixture(scope="session")
def known(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Known]:
    """Return the known images of a text family; they are packed once for all tests."""
    made: dict[str, Known] = {}

    def of(family: str) -> Known:
        if family not in made:
            made[family] = make_known(tmp_path_factory.mktemp(family.replace(" ", "-")), family)
        return made[family]

    return of
