"""Each form's tiny pipeline, written and packed once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.family_models import FORMS, write_pipeline
from tests.unit.families.forms import Packed, pack

# All forms are tried by `make test-full`, and these by `make test`: a UNet of one and of two encoders, transformers with a
# pooled embedding and three or two encoders, and one with a language model and its chat.
QUICK = {"sd", "sdxl", "sd3", "flux", "qwenimage"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test of another form as slow."""
    form = item.callspec.params.get("form") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
    if form is not None and form not in QUICK:
        item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def every_run_is_quick(quick_runs: None) -> None:
    """Apply `quick_runs` to all tests here."""


@pytest.fixture(scope="session", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="session")
def written(form: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("families") / re.sub(r"\W", "-", form), form)


@pytest.fixture(scope="session")
def packed(form: str, written: Path, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return pack(form, written, tmp_path_factory.mktemp("packed"))
