"""The known images of each family, by its name."""

from __future__ import annotations

from typing import Any

import pytest


def of(name: str) -> Any:
    return pytest.fixture(name=name)(lambda known: known(name))


sd, sdxl, flux = map(of, ("sd", "sdxl", "flux"))
