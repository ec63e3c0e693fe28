"""A shard that is gone or cut short is seen before any work: by pack, by `store info`, and when a loader opens the store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bucketline.errors import CorruptError, StoreError
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.folder import LocalFolder
from bucketline.store.read.lost_files import lost_shards, refuse_lost_shards
from tests.commands import call
from tests.kit import make_store, samples_of, tree
from tests.models import SMALL, write_images

BUCKET = "train/64x64"
PARTS = ("lmdb", "extents", "index")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A folder with photos and their store."""
    folder = tmp_path_factory.mktemp("lost")
    write_images(folder / "photos", 10)
    call("ingest", "pack", folder / "photos", folder / "s", "--model", model, *SMALL).done()
    return folder


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("damage", [Path.unlink, cut])
def test_pack_refuses_a_store_that_lost_a_file_before_it_does_anything(
    packed: Path, tmp_path: Path, model: Path, part: str, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(packed / "s", tmp_path / "s")
    (path,) = (tmp_path / "s" / "shards").glob(f"*.{part}")
    damage(path)
    before = tree(tmp_path / "s")
    ran = call("ingest", "pack", packed / "photos", tmp_path / "s", "--model", model, *SMALL)
    assert (ran.code, ran.out) == (1, "")
    (line,) = ran.err.splitlines()
    assert f"{tmp_path / 's'} has lost files of 1 shard with 10 samples: shard {path.stem} (10 samples): {path.name} " in line
    assert f"run `store repair {tmp_path / 's'}`" in line
    assert tree(tmp_path / "s") == before


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("damage", [Path.unlink, cut])
def test_info_names_what_is_lost_and_ends_with_one(
    store: Store, tmp_path: Path, part: str, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(store.path, tmp_path / "s")
    path = tmp_path / "s" / "shards" / f"g1.{part}"
    expected = path.stat().st_size
    damage(path)
    ran = call("store", "info", tmp_path / "s", "--json")
    assert ran.code == 1
    found = expected // 2 if path.exists() else None
    lost = {"name": path.name, "found_bytes": found, "expected_bytes": expected}
    assert ran.json["lost_shards"] == [{"shard": "g1", "samples": 14, "files": [lost]}]
    assert ran.json["samples"] == 53
    ran = call("store", "info", tmp_path / "s")
    assert ran.code == 1
    assert "53 samples" in ran.out
    assert f"shard g1 (14 samples): {path.name} " in ran.err
    assert f"`store repair {tmp_path / 's'}`" in ran.err


def test_a_store_that_lost_nothing_is_said_to_have_lost_nothing(store: Store) -> None:
    ran = call("store", "info", store.path, "--json")
    assert (ran.code, ran.json["lost_shards"]) == (0, [])
    assert lost_shards(LocalFolder(store.path), store.manifest.shards) == ()


def test_a_lost_list_of_dropped_rows_is_seen(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 9})
    store = make_store(tmp_path, samples, samples[:3])
    (path,) = (tmp_path / "shards").glob("g0.dropped-*")
    path.unlink()
    (lost,) = lost_shards(LocalFolder(tmp_path), store.manifest.shards)
    assert (lost.shard, lost.samples, [file.name for file in lost.files]) == ("g0", 6, [path.name])


def test_many_lost_shards_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    store = make_store(tmp_path, *(samples_of({BUCKET: 2}, f"{n}/") for n in range(5)))
    for path in (tmp_path / "shards").glob("*.lmdb"):
        path.unlink()
    with pytest.raises(CorruptError, match=r"5 shards with 10 samples: .*g0.*; shard g1.*; shard g2.*, and 2 shards more; "):
        refuse_lost_shards(LocalFolder(tmp_path), store.manifest)


def test_a_file_that_may_not_be_looked_at_is_not_taken_for_a_lost_one(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", samples_of({BUCKET: 2}))
    (tmp_path / "s" / "shards").rename(tmp_path / "moved")
    (tmp_path / "s" / "shards").symlink_to("shards")
    with pytest.raises(StoreError, match=r"cannot look up .*: Too many levels of symbolic links"):
        lost_shards(LocalFolder(tmp_path / "s"), store.manifest.shards)


@pytest.mark.parametrize("damage", [Path.unlink, cut])
def test_a_loader_refuses_to_open_what_it_could_not_read_to_the_end(
    store: Store, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(store.path, tmp_path / "s")
    damage(tmp_path / "s" / "shards" / "g1.lmdb")
    with pytest.raises(CorruptError, match=r"has lost files of 1 shard with 14 samples: .*store repair"):
        Loader(tmp_path / "s", LoaderConfig(batch_size=2))
    assert call("loader", "plan", tmp_path / "s", "--batch", 2).code == 1


def test_an_older_generation_that_cannot_be_read_is_said_to_be_old(tmp_path: Path) -> None:
    make_store(tmp_path, samples_of({BUCKET: 2}, "a/"), samples_of({BUCKET: 2}, "b/"))
    (tmp_path / "shards" / "g0.lmdb").unlink()
    with pytest.raises(CorruptError, match="generation 1 cannot be read completely; restore the files, or open generation 2"):
        refuse_lost_shards(LocalFolder(tmp_path), Store.open(tmp_path, 1).manifest)
