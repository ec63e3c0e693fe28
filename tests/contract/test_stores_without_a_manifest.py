"""A store that has lost `manifest.json`, or whose one is damaged, on a disk and in a bucket: no generation is lost with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bucketline.errors import CorruptError, StoreError
from bucketline.store import Store
from bucketline.store.change.drop import drop
from bucketline.store.folder import Folder, LocalFolder
from bucketline.store.remote.generations import find_newest, newest_generation
from tests.kit import make_store, samples_of
from tests.object_storage import in_memory

SAMPLES = samples_of({"train/64x64": 8})


@pytest.fixture(params=["disk", "bucket"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """The folder of a store of three generations after its first, that have lost a sample each."""
    store = tmp_path / "a.store"
    make_store(store, SAMPLES)
    for sample in SAMPLES[:3]:
        drop(store, [sample.id])
    disk = LocalFolder(store)
    if request.param == "disk":
        return disk
    bucket = in_memory()
    for file in disk.names():
        if not file.name.startswith("pending/"):
            bucket.write(file.name, disk.read(file.name))
    return bucket


def change(folder: Folder) -> None:
    """Drop one more sample."""
    if isinstance(folder, LocalFolder):
        drop(folder.path, [SAMPLES[3].id])
    else:
        drop(folder, [SAMPLES[3].id])  # type: ignore[arg-type]


def test_a_writer_continues_from_the_newest_generation_that_is_left(folder: Folder) -> None:
    before = newest_generation(folder)
    folder.remove(["manifest.json"])
    found = find_newest(folder, lists=True)
    assert found == before
    change(folder)
    after = newest_generation(folder)
    assert (after.generation, after.samples, after.store_id) == (before.generation + 1, 4, before.store_id)


def test_without_a_manifest_the_newest_whole_generation_counts(folder: Folder) -> None:
    newest = newest_generation(folder).generation
    folder.remove(["manifest.json"])
    folder.write(f"generations/{newest}.json", b"{}")
    found = find_newest(folder, lists=True)
    assert found is not None
    assert found.generation == newest - 1


@pytest.mark.parametrize("is_damaged", [False, True])
def test_readers_and_writers_name_the_generation_to_copy(folder: Folder, *, is_damaged: bool) -> None:
    newest = newest_generation(folder).generation
    folder.remove(["manifest.json"])
    if is_damaged:
        folder.write("manifest.json", b"{}")
    expected = CorruptError if is_damaged else StoreError
    advice = rf"manifest\.json.*; copy .*generations/{newest}\.json to .*manifest\.json"
    with pytest.raises(expected, match=advice):
        Store.open(folder.path) if isinstance(folder, LocalFolder) else newest_generation(folder)
    if is_damaged:
        with pytest.raises(CorruptError, match=advice):
            change(folder)


def test_a_folder_without_generations_is_not_a_store(folder: Folder) -> None:
    folder.remove([file.name for file in folder.names()])
    assert find_newest(folder, lists=True) is None
    with pytest.raises(StoreError, match="is not a store"):
        newest_generation(folder)
