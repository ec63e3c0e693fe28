"""A little of each family of changes at URLs, and of writers that threads share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fault.changed_at_urls import killed_pushes, names_used_again, threads, wrong_clocks
from tests.fault.record import Asked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.fault.record import Record


@pytest.mark.parametrize("family", [names_used_again, killed_pushes, wrong_clocks, threads])
def test_nothing_that_is_listed_is_missing_or_other_than_it_was(
    family: Callable[[Asked], Iterator[Record]], tmp_path: Path
) -> None:
    for record in family(Asked(seed=1, is_quick=True, folder=tmp_path)):
        assert record.trials
        assert record.said == []
