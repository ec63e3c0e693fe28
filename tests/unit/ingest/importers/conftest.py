"""The known images of each family, by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.ingest.importers.known import Known


@pytest.fixture
def sd(known: Callable[[str], Known]) -> Known:
    return known("sd")


@pytest.fixture
def sdxl(known: Callable[[str], Known]) -> Known:
    return known("sdxl")


@pytest.fixture
def flux(known: Callable[[str], Known]) -> Known:
    return known("flux")
