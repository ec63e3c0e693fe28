"""Stores of every version of the format: read as they were when they were recorded, and changed as any store is."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bucketline.store.format.layout import FORMAT_VERSION
from tests.contract.kit import EXPECTED, READINGS, VERSIONS, done, info, rows_of, unpacked
from tests.kit import tree

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDED: dict[str, Any] = json.loads(EXPECTED.read_bytes())


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path) -> Iterator[None]:
    """Name stores relative to the current folder, so that what commands print does not depend on it."""
    with contextlib.chdir(tmp_path):
        yield


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("name", VERSIONS)
def test_a_store_is_read_as_it_was_recorded(name: str, reading: str, tmp_path: Path) -> None:
    store = unpacked(name, Path())
    before = tree(store)
    assert json.loads(json.dumps(READINGS[reading](store, tmp_path))) == RECORDED[name][reading]
    assert {file: data for file, data in tree(store).items() if file in before or "lock" not in file} == before


@pytest.mark.parametrize("name", VERSIONS)
def test_the_recorded_store_has_the_version_it_is_kept_for(name: str) -> None:
    manifest = json.loads((unpacked(name, Path()) / "manifest.json").read_bytes())
    assert manifest["format_version"] == VERSIONS[name]


@pytest.mark.parametrize("name", VERSIONS)
def test_a_store_of_any_version_is_changed_and_keeps_every_other_row(name: str, tmp_path: Path) -> None:
    store = unpacked(name, Path())
    rows = rows_of(store, tmp_path)
    first = next(iter(rows))
    generation, files = info(store, tmp_path)["generation"], tree(store)
    done("store", "drop", store, first)
    document = json.loads((store / "manifest.json").read_bytes())
    assert (document["format_version"], "base_version" in document) == (FORMAT_VERSION, False)
    assert files.items() - tree(store).items() == {("manifest.json", files["manifest.json"])}  # no other file is changed
    left = {one: value for one, value in rows.items() if one != first}
    assert rows_of(store, tmp_path) == left
    done("store", "restore", store, generation)
    assert rows_of(store, tmp_path) == rows
    done("store", "drop", store, first)
    done("store", "compact", store, "--gc", "--older-than", "0s")
    assert all(shard["line_checksums"] for shard in json.loads((store / "manifest.json").read_bytes())["shards"])
    assert rows_of(store, tmp_path) == left
    verified = done("store", "verify", store, "--json").json
    assert (verified["rows"], verified["corrupt"], verified["strays"]) == (len(left), [], [])


@pytest.mark.parametrize("name", VERSIONS)
def test_stores_of_any_version_are_merged(name: str, tmp_path: Path) -> None:
    store = unpacked(name, Path())
    done("store", "merge", "merged.store", store)
    assert rows_of("merged.store", tmp_path) == rows_of(store, tmp_path)


def test_the_compact_form_of_a_manifest_changes_nothing_but_its_version() -> None:
    images, compact = (json.loads(json.dumps(RECORDED[name]).replace(f"{name}.store", "S")) for name in ("images", "compact"))
    assert (images["info"].pop("format_version"), compact["info"].pop("format_version")) == (1, 2)
    assert images["plan"].pop("plan") != compact["plan"].pop("plan")  # a plan is of a manifest's digest
    assert images == compact
