"""Stores that earlier versions of the format wrote, kept as files: they hold, deliver and continue what they did."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from bucketline.errors import CorruptError
from bucketline.store import Store
from bucketline.store.change.drop import drop
from bucketline.store.change.repair import repair
from bucketline.store.format.manifest import dump_manifest, parse_manifest, read_manifest
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import RemoteOptions
from bucketline.store.sync.pull import pull
from bucketline.store.sync.push import push
from bucketline.store.verify.verify import verify
from tests.contract.kit import VERSIONS, unpacked
from tests.kit import everything, flip_bit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(params=VERSIONS)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return unpacked(request.param, tmp_path)


def is_clean(path: Path) -> bool:
    found = verify(Store.open(path), lambda _: None)
    return (found.corrupt, found.strays) == ((), ())


def test_lost_extents_of_an_old_store_are_rebuilt_with_the_checksums_of_lines(old: Path) -> None:
    held = everything(Store.open(old))
    flip_bit(Store.open(old).shards[0].paths.extents, 800)
    assert repair(old).dropped == 0
    assert read_manifest(old).shards[0].line_checksums
    assert everything(Store.open(old)) == held
    assert is_clean(old)


def test_an_old_store_is_pushed_read_there_changed_and_pulled(old: Path, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    url, digest = f"file://{tmp_path}/bucket/a.store", read_manifest(old).digest
    push(old, ObjectFolder.open(url))
    assert (tmp_path / "bucket/a.store/manifest.json").read_bytes() == (old / "manifest.json").read_bytes()
    held = everything(Store.open(old))
    assert everything(Store.open(url, remote=RemoteOptions(cache=tmp_path / "cache"))) == held
    pull(ObjectFolder.open(url), tmp_path / "pulled")
    assert read_manifest(tmp_path / "pulled").digest == digest
    assert is_clean(tmp_path / "pulled")
    drop(old, [next(iter(held.values()))[0].record.id])
    push(old, ObjectFolder.open(url))
    pull(ObjectFolder.open(url), tmp_path / "pulled")
    assert everything(Store.open(tmp_path / "pulled")) == everything(Store.open(old))
    assert everything(Store.open(url, remote=RemoteOptions(cache=tmp_path / "cache"))) == everything(Store.open(old))


def test_an_old_manifest_is_kept_as_its_bytes_whatever_its_layout(old: Path) -> None:
    data = (old / "manifest.json").read_bytes()
    manifest = parse_manifest(data, "m")
    other = parse_manifest(json.dumps(json.loads(data), indent=3).encode(), "m")
    assert (other, dump_manifest(other), dump_manifest(manifest)) == (manifest, data, data)


HOSTILE: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "columns in version 1": ("images", lambda d: d.update(columns={}), "unknown field 'columns'"),
    "axes in version 1": ("images", lambda d: d["buckets"][0].update(axes=[]), "unknown field 'axes'"),
    "a bucket without a height": ("images", lambda d: d["buckets"][0].pop("height_px"), "lacks the field 'height_px'"),
    "an error of text in version 1": ("images", lambda d: d["shards"][0].update(text_error=None), "unknown field 'text_error'"),
    "ragged groups in version 2": ("compact", lambda d: d.update(ragged={}), "unknown field 'ragged'"),
    "the long form in version 2": (
        "compact",
        lambda d: d["shards"][0]["groups"].update(text={"rows": 1}),
        "expected four numbers",
    ),
    "a height in version 3": ("columns", lambda d: d["buckets"][0].update(height_px=64), "unknown field 'height_px'"),
    "no ragged group in version 3": ("columns", lambda d: d.update(ragged={}), "ragged has no group"),
    "an added column in version 3": ("columns", lambda d: d.update(added={}), "unknown field 'added'"),
    "checksums of lines in version 3": (
        "columns",
        lambda d: d["shards"][0].update(line_checksums=True),
        "unknown field 'line_checksums'",
    ),
    "no base version": ("images_added", lambda d: d.pop("base_version"), "base_version"),
    "an impossible base version": ("images_added", lambda d: d.update(base_version=4), "base_version is 4"),
    "no added column in version 4": ("images_added", lambda d: d.update(added={}), "it has no added column"),
    "an edited version 1": ("images", lambda d: d.update(max_captions=2), "in another form"),
    "an edited rule of version 4": (
        "images_added",
        lambda d: d["rules"].update(grid="another"),
        "was edited by hand: its digest is",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_damaged_manifest_of_an_old_version_is_refused_by_field(case: str, tmp_path: Path) -> None:
    name, edit, said = HOSTILE[case]
    document = json.loads((unpacked(name, tmp_path) / "manifest.json").read_bytes())
    edit(document)
    with pytest.raises(CorruptError, match=said):
        parse_manifest(json.dumps(document).encode(), "m")
