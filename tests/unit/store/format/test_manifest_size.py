"""A manifest is never written that no reader opens, and its groups take little room."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bucketline.errors import CorruptError, StoreError
from bucketline.store.format.manifest import dump_manifest, parse_manifest, read_manifest, write_manifest
from tests.kit import make_store, samples_of, tree

BUCKETS = {f"train/{8 * n}x64": 2 for n in range(1, 9)}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "s", *(samples_of(BUCKETS, f"{n}/") for n in range(3))).path


def test_a_manifest_that_is_too_long_is_refused_before_anything_is_written(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, manifest = tree(store), read_manifest(store)
    for module in ("format.manifest", "write.change_base", "verify.verify"):
        monkeypatch.setattr(f"bucketline.store.{module}.MAX_MANIFEST_BYTES", 1000)
    with pytest.raises(
        StoreError,
        match=r"manifest of 3 shards and 8 buckets has \d+ bytes, at most 1000 are read.*larger shards.*second store",
    ):
        write_manifest(store, replace(manifest, generation=9))
    assert tree(store) == before


def test_a_group_takes_four_numbers(store: Path) -> None:
    manifest = read_manifest(store)
    group = manifest.shards[0].groups["text"]
    document = json.loads(dump_manifest(manifest))
    assert document["shards"][0]["groups"]["text"] == [group.rows, group.blocks, group.first_block, group.dropped]
    assert b"\n" not in dump_manifest(manifest)[:-1]


def test_a_manifest_laid_out_otherwise_is_the_same(store: Path) -> None:
    manifest = read_manifest(store)
    assert parse_manifest(json.dumps(json.loads(dump_manifest(manifest)), indent=3).encode(), "m") == manifest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda groups: groups.update(text=[1, 2, 3]), "groups.text is .*expected 4 values: rows, blocks"),
        (lambda groups: groups.update(text={"rows": 1, "blocks": 1, "first_block": 0, "dropped": 0}), "groups.text is"),
        (lambda groups: groups.update(text=[1, 2, 3, "4"]), "dropped"),
        (lambda groups: groups.update(text=[-1, 2, 3, 4]), "rows"),
    ],
)
def test_groups_that_are_no_four_numbers_are_refused(change: object, message: str, store: Path) -> None:
    document = json.loads(dump_manifest(read_manifest(store)))
    change(document["shards"][0]["groups"])  # type: ignore[operator]
    with pytest.raises(CorruptError, match=message):
        parse_manifest(json.dumps(document).encode(), "m")


@pytest.mark.parametrize("shards", [None, 5, [5], [{"groups": 5}], [{}]])
def test_a_manifest_of_another_shape_is_refused(shards: object, store: Path) -> None:
    document = json.loads(dump_manifest(read_manifest(store)))
    with pytest.raises(CorruptError):
        parse_manifest(json.dumps({**document, "shards": shards}).encode(), "m")
