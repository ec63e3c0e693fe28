"""Several imports into one store: of another folder, of a folder that was moved, of a data set that has grown."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.ingest.importers.known import Known, assert_as_packed, read_store, run_import
from tests.unit.ingest.importers.writers import FORMS, WRITERS, kohya


def brighter(own: Known) -> Known:
    """Return other images of the same names."""
    return replace(own, samples=tuple(replace(one, latent=one.latent * np.float32(1.25)) for one in own.samples))


def dated(folder: Path, seconds: int) -> None:
    for path in folder.rglob("*"):
        os.utime(path, ns=(seconds * 10**9, seconds * 10**9))


def test_rows_of_another_folder_are_not_replaced(known: Callable[[str], Known], tmp_path: Path) -> None:
    own, store = known("sdxl"), tmp_path / "s.store"
    first, second = kohya(tmp_path / "first", own), kohya(tmp_path / "second", brighter(own))
    dated(first, 1)
    assert run_import("kohya", first, store, own).json["replaced"] == 0
    run_import("kohya", second, store, own).fails(
        "6 rows of the store would be replaced by other files of the same names: 'cats/1.png' came from", "a store of its own"
    )
    assert_as_packed(store, own, FORMS["kohya"])
    run_import("kohya", second, store, own, "--dry-run").fails()


def test_what_was_cached_again_is_replaced_and_counted_and_a_moved_folder_is_unchanged(
    known: Callable[[str], Known], tmp_path: Path
) -> None:
    own, store = known("sdxl"), tmp_path / "s.store"
    source = kohya(tmp_path / "cache", own)
    assert run_import("kohya", source, store, own).code == 0
    shutil.copytree(source, tmp_path / "moved")
    moved = run_import("kohya", tmp_path / "moved", store, own).done()
    assert moved.json["unchanged"] == 6
    dated(source, 2)
    again = run_import("kohya", source, store, own).done()
    assert (again.json["imported"], again.json["replaced"]) == (6, 6)
    shown = run_import("kohya", source, store, own)
    assert (shown.json["unchanged"], shown.json["replaced"]) == (6, 0)


@pytest.mark.parametrize("kind", ["simpletuner", "onetrainer", "diffusion-pipe"])
def test_a_folder_added_to_a_data_set_changes_no_ids(kind: str, known: Callable[[str], Known], tmp_path: Path) -> None:
    own, store, source = known(WRITERS[kind][1]), tmp_path / "s.store", tmp_path / "cache"
    cats = replace(own, samples=tuple(one for one in own.samples if one.id.startswith("cats/")))
    options: tuple[Any, ...] = ("--text", "none", "--captions", tmp_path / "captions")
    (tmp_path / "captions").mkdir()
    WRITERS[kind][0](source, cats)
    dated(source, 1)
    run_import(kind, source, store, own, *options).done()
    before = {one.id for one in read_store(store)}
    assert before == {one.id.removeprefix("cats/") for one in cats.samples}
    shutil.rmtree(source)
    WRITERS[kind][0](source, own)
    dated(source, 1)
    grown = run_import(kind, source, store, own, *options).done()
    assert grown.json["not_in_source"] == 0
    dogs = {one.id for one in read_store(store)} - before
    assert len(dogs) == 3
    assert all(name.partition("dogs/")[1] for name in dogs)
    again = run_import(kind, source, store, own, *options)
    assert (again.json["imported"], again.json["unchanged"]) == (0, 6)
