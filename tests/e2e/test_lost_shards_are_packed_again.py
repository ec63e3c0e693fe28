"""A store that lost or damaged its shards: pack refuses it, repair keeps what it can, the same pack brings back the rest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bucketline.store import Store
from tests.commands import call
from tests.kit import by_id, flip_row
from tests.models import pack, png, write_files, write_images

NUM_FIRST, NUM_ALL = 20, 23


def remove_shards(store: Path) -> None:
    for path in (store / "shards").glob("*.lmdb"):
        path.unlink()


def cut_shards(store: Path) -> None:
    for path in (store / "shards").glob("*.lmdb"):
        os.truncate(path, path.stat().st_size * 2 // 3)


def lose_a_shard(store: Path) -> None:
    for path in (store / "shards").glob(f"{Store.open(store).shards[0].name}.*"):
        path.unlink()


def lose_sidecars(store: Path) -> None:
    """Remove all but the shards' own files, with the list of dropped rows."""
    for path in (*(store / "shards").glob("*.*"), *(store / "generations").glob("*.dropped")):
        if path.suffix != ".lmdb":
            path.unlink()


def flip_two_rows(store: Path) -> None:
    """Flip a bit in two rows; no file has another length then, and only reading everything finds it."""
    bucket = Store.open(store).buckets()[0]
    for row in (0, bucket.num_rows - 1):
        flip_row(store, bucket.name, row)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A folder with `photos` and the store of them, of two packs; the second replaces a row of the first."""
    folder = tmp_path_factory.mktemp("packed")
    write_images(folder / "photos", NUM_FIRST)
    pack(folder / "photos", folder / "photos.store", model).done()
    write_files(
        folder / "photos", {f"{n}.png": png(20, 30, n) for n in range(NUM_FIRST, NUM_ALL)} | {"a/000.png": png(22, 31, 98)}
    )
    assert pack(folder / "photos", folder / "photos.store", model).json["packed"] == NUM_ALL - NUM_FIRST + 1
    return folder


@pytest.mark.parametrize(
    ("damage", "is_seen", "dropped"),
    [
        (remove_shards, True, range(NUM_ALL, NUM_ALL + 1)),
        (cut_shards, True, range(1, NUM_ALL + 1)),
        (lose_a_shard, True, range(NUM_FIRST - 1, NUM_FIRST)),
        (lose_sidecars, True, range(NUM_FIRST - 1, NUM_FIRST)),
        (flip_two_rows, False, range(2, 3)),
    ],
)
def test_a_damaged_store_is_whole_again_after_repair_and_the_same_pack(
    packed: Path,
    tmp_path: Path,
    model: Path,
    damage: Callable[[Path], None],
    is_seen: bool,  # noqa: FBT001 - by pack and info
    dropped: range,
) -> None:
    folder = shutil.copytree(packed, tmp_path / "own")
    photos, store = folder / "photos", folder / "photos.store"
    before = by_id(Store.open(store))
    assert len(before) == NUM_ALL

    damage(store)
    ran = pack(photos, store, model)
    if is_seen:
        assert (ran.code, ran.out) == (1, "")
        assert f"`store repair {store}`" in ran.err
        assert call("store", "info", store).code == 1
    assert call("store", "verify", store).code == 1

    repaired = call("store", "repair", store, "--json").done()
    assert repaired.json["dropped"] in dropped
    assert call("store", "info", store).code == 0
    report = pack(photos, store, model).json
    assert (report["packed"], report["found"]) == (repaired.json["dropped"], NUM_ALL)

    assert call("store", "compact", store, "--gc", "--older-than", "0s").code == 0
    verified = call("store", "verify", store, "--json")
    assert (verified.code, verified.json["corrupt"], verified.json["strays"]) == (0, [], [])
    after = by_id(Store.open(store))
    assert after.keys() == before.keys()
    assert all(after[i].columns["latent"] == before[i].columns["latent"] for i in before)
    assert all(after[i].record.captions == before[i].record.captions for i in before)
    assert pack(photos, store, model).json["unchanged"] == NUM_ALL
