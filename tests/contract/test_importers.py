"""The contract of every importer: rows and captions are those of the cache, and nothing is half-imported."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bucketline.ingest.importers.cache import IMPORTERS
from bucketline.ingest.importers.config import ImportConfig
from tests.commands import call
from tests.kit import untouched
from tests.unit.ingest.importers.known import assert_as_packed, read_store, run_import
from tests.unit.ingest.importers.writers import FORMS, LATENTS, WRITERS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.ingest.importers.known import Known

BY_NAME = ("musubi",)  # its ids have neither folder nor extension


def crops(kind: str) -> str:
    return "source" if FORMS[kind].has_crop else "unknown"


def ids(kind: str, own: Known) -> dict[str, str] | None:
    return {sample.id: sample.stem.rpartition("/")[2] for sample in own.samples} if kind in BY_NAME else None


def options(kind: str, own: Known) -> tuple[Any, ...]:
    """Return what the user has to say about a cache of this kind."""
    return {"onetrainer": ("--captions", own.images), "mds": ("--variant", "latents_256")}.get(kind, ())


def test_each_of_our_importers_has_a_writer_of_its_format_and_is_named_by_the_help_text() -> None:
    assert {*WRITERS} == {*IMPORTERS} == {*FORMS} == {*LATENTS}
    assert all(f"{name} " in str(ImportConfig.__doc__) or f"{name}," in str(ImportConfig.__doc__) for name in IMPORTERS)


SLOW = pytest.mark.slow
# one of each family of texts, and each way of storing them; the others as well by `make test-full`
QUICK = ("kohya", "onetrainer", "mds")


@pytest.fixture(params=[pytest.param(name, marks=() if name in QUICK else SLOW) for name in WRITERS])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def own(kind: str, known: Callable[[str], Known]) -> Known:
    return known(WRITERS[kind][1])


@pytest.fixture
def source(kind: str, own: Known, tmp_path: Path) -> Path:
    return WRITERS[kind][0](tmp_path / "cache", own)


@pytest.mark.parametrize("kind", WRITERS, indirect=True)
def test_latents_texts_and_sizes_are_those_of_pack_to_the_bit(kind: str, own: Known, source: Path, tmp_path: Path) -> None:
    ran = run_import(kind, source, tmp_path / "s.store", own, *options(kind, own), "--dtype", "F32").done()
    summary = ran.json
    assert summary["kind"] == kind
    assert (summary["found"], summary["imported"], summary["rejected"]) == (6, 6, 0)
    assert summary["text"] == "encode"
    assert_as_packed(tmp_path / "s.store", own, FORMS[kind], crops=crops(kind), ids=ids(kind, own))


@pytest.mark.parametrize("kind", ["musubi", "simpletuner", "onetrainer", "ai-toolkit", "diffusion-pipe"], indirect=True)
def test_latents_that_a_trainer_stores_in_bf16_are_unscaled_from_its_bits(kind: str, own: Known, tmp_path: Path) -> None:
    halved = replace(own, dtype=torch.bfloat16)
    source = WRITERS[kind][0](tmp_path / "cache", halved)
    run_import(kind, source, tmp_path / "s.store", own, *options(kind, own), "--text", "none", "--dtype", "F32").done()
    form = replace(FORMS[kind], has_text=False)
    assert_as_packed(tmp_path / "s.store", halved, form, crops=crops(kind), ids=ids(kind, own))


def test_a_second_run_finds_all_unchanged_and_a_dry_run_writes_nothing(
    kind: str, own: Known, source: Path, tmp_path: Path
) -> None:
    store = tmp_path / "s.store"
    dry = run_import(kind, source, store, own, *options(kind, own), "--dry-run").done()
    assert (dry.json["imported"], dry.json["dry_run"], store.exists()) == (6, True, False)
    assert run_import(kind, source, store, own, *options(kind, own)).json["buckets"] == dry.json["buckets"]
    with untouched(store):
        again = run_import(kind, source, store, own, *options(kind, own)).done()
        assert (again.json["imported"], again.json["unchanged"]) == (0, 6)


@pytest.mark.parametrize("how", ["truncated", pytest.param("damaged", marks=SLOW), pytest.param("empty", marks=SLOW)])
def test_a_damaged_file_is_a_reject_that_names_it_and_the_others_are_imported(
    how: str, kind: str, own: Known, source: Path, tmp_path: Path
) -> None:
    path = max(source.glob(LATENTS[kind]))
    data, is_shard = path.read_bytes(), kind in ("mds", "diffusion-pipe")  # of a shard, its last sample
    ends = {"truncated": data[:-100] if is_shard else data[: len(data) // 2], "empty": data[:-1] if is_shard else b""}
    ends["damaged"] = data[:-100] + bytes(50) if kind == "mds" else bytes(200) + data[200:]
    path.write_bytes(ends[how])
    ran = run_import(kind, source, tmp_path / "s.store", own, *options(kind, own)).done()
    assert (ran.json["imported"], ran.json["rejected"]) == (5, 1)
    (reject,) = ran.json["rejects"]
    assert reject["reason"] == "unusable cache entry"
    assert str(path.relative_to(source)) in reject["detail"]
    assert json.loads((tmp_path / "s.store" / "rejects.jsonl").read_text(encoding="utf-8")) == reject
    assert len(read_store(tmp_path / "s.store")) == 5
    assert call("store", "verify", tmp_path / "s.store").code == 0
