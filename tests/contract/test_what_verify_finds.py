"""`store verify` finds the same faults and strays in a store's folder on a disk and in a bucket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bucketline.store.change.drop import drop
from bucketline.store.folder import Folder, LocalFolder
from bucketline.store.verify.verify import Verified, verify_folder
from tests.kit import make_store, samples_of
from tests.object_storage import in_memory

BUCKET = "train/64x64"


def flipped(folder: Folder, name: str) -> None:
    data = bytearray(folder.read(name))
    data[len(data) // 2] ^= 1
    folder.write(name, bytes(data))


@pytest.fixture
def places(tmp_path: Path) -> list[Folder]:
    """Folders with the same files: of a store that has lost a sample twice, and then another shard."""
    store = tmp_path / "a.store"
    samples = samples_of({BUCKET: 8})
    make_store(store, samples, samples_of({BUCKET: 4}, "second/"))
    for sample in samples[:2]:
        drop(store, [sample.id])
    disk, bucket = LocalFolder(store), in_memory()
    for file in disk.names():
        if not file.name.startswith("pending/"):
            bucket.write(file.name, disk.read(file.name))
    return [disk, bucket]


def found(folder: Folder, tmp_path: Path) -> Verified:
    return verify_folder(folder, lambda _: None, 1)


DAMAGE: dict[str, tuple[Callable[[Folder], None], str, str]] = {
    "nothing": (lambda _: None, "", ""),
    "an older manifest": (lambda folder: flipped(folder, "generations/3.json"), "generations/3.json", "not one"),
    "an older list": (lambda folder: flipped(folder, "shards/g0.dropped-3"), "g0.dropped-3 has the digest", ""),
    "a missing older list": (lambda folder: folder.remove(["shards/g0.dropped-3"]), "", "missing; only generation 3"),
    "the newest document": (lambda folder: folder.remove(["generations/4.json"]), "copy manifest.json to", ""),
    "a document with other bytes": (
        lambda folder: folder.write("manifest.json", folder.read("manifest.json") + b"\n"),
        "differs in its bytes",
        "",
    ),
    "a file of somebody's": (lambda folder: folder.write("notes.txt", b"mine"), "", "not one of the store's files"),
    "a shard that nobody lists": (lambda folder: folder.write("shards/late.lmdb", b"late"), "", "no generation lists"),
    "a shard's file": (lambda folder: flipped(folder, "shards/g1.extents"), "g1.extents", ""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_same_is_found_on_a_disk_and_in_a_bucket(damage: str, places: list[Folder], tmp_path: Path) -> None:
    change, error, what = DAMAGE[damage]
    said = []
    for folder in places:
        change(folder)
        result = found(folder, tmp_path)
        assert all(error in fault.error for fault in result.corrupt)
        assert bool(result.corrupt) == bool(error)
        assert [what in stray.what for stray in result.strays] == ([True] if what else [])
        faults = {(fault.shard, fault.bucket, fault.block, fault.row) for fault in result.corrupt}
        said.append((result.blocks, result.rows, faults, result.strays))
    assert said[0] == said[1]
