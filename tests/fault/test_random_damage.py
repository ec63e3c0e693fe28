"""Random damage to a store's files, several at a time: a repair keeps what it can, and a pack brings back the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fault.random_damage import run
from tests.store_forms import FORMS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("form", FORMS)
def test_a_store_that_was_damaged_at_random_is_repaired_and_packed_again(form: str, tmp_path: Path) -> None:
    counts, failures = run(12, 2026, tmp_path, FORMS[form])
    assert failures == []
    assert counts.total() == 12
    assert min(counts["nothing"], counts["some"]) > 1
