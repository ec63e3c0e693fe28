"""A manifest is never written that no reader opens: in its compact form where the usual one is too long, or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bucketline.errors import CorruptError, StoreError
from bucketline.store import Store
from bucketline.store.change.drop import drop
from bucketline.store.format.manifest import dump_manifest, parse_manifest, read_manifest, sealed, write_manifest
from bucketline.store.verify.verify import verify
from tests.building import make_store, samples_of, tree

if TYPE_CHECKING:
    from pathlib import Path

BUCKETS = {f"train/{8 * n}x64": 2 for n in range(1, 9)}
ID = "train/8x64/0.png"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "s", *(samples_of(BUCKETS, f"{n}/") for n in range(3))).path


def limit(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Let readers and writers have another limit, so that a small store's manifest is beyond it."""
    for module in ("format.manifest", "write.newest", "verify.strays"):
        monkeypatch.setattr(f"bucketline.store.{module}.MAX_MANIFEST_BYTES", num_bytes)


def test_a_manifest_that_is_too_long_is_written_in_its_compact_form(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (store / "manifest.json").read_bytes()
    with monkeypatch.context() as patched:
        limit(patched, len(before) - 1)
        with pytest.raises(CorruptError):
            read_manifest(store)
    limit(monkeypatch, len(before) + 20)  # the next one lists a dropped row as well
    drop(store, ["0/" + ID])
    after = (store / "manifest.json").read_bytes()
    assert len(after) < len(before) * 0.6
    assert json.loads(after)["format_version"] == 2
    opened = Store.open(store)
    assert opened.manifest.samples == 47
    assert verify(opened, lambda _: None).corrupt == ()
    assert Store.open(store, 3).manifest.samples == 48  # of the usual form
    drop(store, ["1/" + ID])
    assert (Store.open(store).manifest.format_version, Store.open(store).manifest.samples) == (2, 46)


def test_a_manifest_that_is_too_long_in_any_form_is_refused_before_anything_is_written(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, manifest = tree(store), read_manifest(store)
    limit(monkeypatch, 1000)
    with pytest.raises(
        StoreError,
        match=r"manifest of 3 shards and 8 buckets has \d+ bytes, at most 1000 are read.*larger shards.*second store",
    ):
        write_manifest(store, replace(manifest, generation=9))
    assert tree(store) == before


def test_the_usual_form_is_what_it_was(store: Path) -> None:
    manifest = read_manifest(store)
    assert manifest.format_version == 1
    assert b'\n  "groups": {' in (store / "manifest.json").read_bytes().replace(b"   ", b"  ")


def test_both_forms_say_the_same(store: Path) -> None:
    manifest = read_manifest(store)
    compact = sealed(replace(manifest, format_version=2))
    data = dump_manifest(compact)
    assert parse_manifest(data, "m") == compact
    assert replace(parse_manifest(data, "m"), format_version=1, digest=manifest.digest) == manifest
    assert parse_manifest(b" " + data, "m") == compact  # the same, laid out otherwise


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda groups: groups.update(text=[1, 2, 3]), "text is"),
        (lambda groups: groups.update(text={"rows": 1, "blocks": 1, "first_block": 0, "dropped": 0}), "text is"),
        (lambda groups: groups.update(text=[1, 2, 3, "4"]), "dropped"),
        (lambda groups: groups.update(text=[-1, 2, 3, 4]), "rows"),
    ],
)
def test_groups_of_the_compact_form_that_are_no_four_numbers_are_refused(change: object, message: str, store: Path) -> None:
    document = json.loads(dump_manifest(sealed(replace(read_manifest(store), format_version=2))))
    change(document["shards"][0]["groups"])  # type: ignore[operator]
    with pytest.raises(CorruptError, match=message):
        parse_manifest(json.dumps(document).encode(), "m")


@pytest.mark.parametrize("shards", [None, 5, [5], [{"groups": 5}], [{}]])
def test_a_compact_manifest_of_another_shape_is_refused(shards: object, store: Path) -> None:
    document = json.loads(dump_manifest(sealed(replace(read_manifest(store), format_version=2))))
    with pytest.raises(CorruptError):
        parse_manifest(json.dumps({**document, "shards": shards}).encode(), "m")
