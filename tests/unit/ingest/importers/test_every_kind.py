"""What holds for every format: latents and embeddings as `ingest pack` makes them, and nothing half-imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.ingest.importers.known import assert_as_packed, run_import
from tests.unit.ingest.importers.writers import WRITERS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.ingest.importers.known import Known

TEXT = {"onetrainer": "encode", "diffusion-pipe": "encode"}  # the others keep the embeddings of the cache
KNOWS_CROPS = ("simpletuner", "onetrainer", "nemo")
BY_NAME = ("musubi",)  # its ids have neither folder nor extension


def options(kind: str, own: Known) -> tuple[Any, ...]:
    """Return what the user has to say about a cache of this kind."""
    return {"onetrainer": ("--captions", own.images), "mds": ("--variant", "latents_256")}.get(kind, ())


@pytest.fixture(params=list(WRITERS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def own(kind: str, known: Callable[[str], Known]) -> Known:
    return known(WRITERS[kind][1])


@pytest.fixture
def source(kind: str, own: Known, tmp_path: Path) -> Path:
    return WRITERS[kind][0](tmp_path / "cache", own)


def test_latents_and_embeddings_are_those_that_pack_makes(kind: str, own: Known, source: Path, tmp_path: Path) -> None:
    ran = run_import("auto", source, tmp_path / "s.store", own, *options(kind, own))
    assert ran.code == 0, ran.err
    summary = ran.json
    assert summary["kind"] == kind
    assert (summary["found"], summary["imported"], summary["rejected"]) == (6, 6, 0)
    assert summary["text"] == TEXT.get(kind, "source")
    ids = {sample.id: sample.stem.rpartition("/")[2] for sample in own.samples} if kind in BY_NAME else None
    if kind == "ai-toolkit":
        return  # its originals' sizes are unknown; a test of its own has the rest
    assert_as_packed(
        tmp_path / "s.store",
        own,
        has_text=True,
        crops="source" if kind in KNOWS_CROPS else "unknown",
        ids=ids,
        has_size=kind != "diffusion-pipe",
        is_half=kind in ("mds", "nemo"),
    )
