"""Caches of kohya's scripts, written here as its `strategy_*.py` write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.ingest.importers.known import assert_as_packed, run_import
from tests.unit.ingest.importers.writers import kohya

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.ingest.importers.known import Known


@pytest.mark.parametrize("family", ["sd", "sdxl", "sd3", "flux"])
def test_latents_and_embeddings_are_those_that_pack_makes(known: Callable[[str], Known], family: str, tmp_path: Path) -> None:
    own = known(family)
    source = kohya(tmp_path / "cache", own)
    ran = run_import("auto", source, tmp_path / "s.store", own)
    assert ran.code == 0, ran.err
    assert (ran.json["found"], ran.json["imported"], ran.json["rejected"]) == (6, 6, 0)
    assert ran.json["text"] == ("encode" if family == "sd" else "source")
    assert_as_packed(tmp_path / "s.store", own, has_text=True)
