"""Stores at `file://`: links below them, and what a writer on the same disk has there, are left alone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bucketline.errors import StoreError
from bucketline.store import Store
from bucketline.store.change.compact import compact
from bucketline.store.change.drop import drop
from bucketline.store.change.garbage_collect import collect
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.push_pull import push
from bucketline.store.transfer.sender import remove_pending
from bucketline.store.verify.verify import verify
from tests.kit import add, make_sample, make_store, open_writer, samples_of, tree

BUCKET = "train/64x64"
SAMPLES = samples_of({BUCKET: 4})
OLD_S = time.time() - 30 * 86400


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A store that was pushed to a folder, whose second generation drops a sample."""
    own, path = tmp_path / "own.store", tmp_path / "bucket" / "a.store"
    make_store(own, SAMPLES)
    folder = ObjectFolder.open(f"file://{path}")
    push(own, folder)
    drop(own, [SAMPLES[0].id])
    push(own, folder)
    return path


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("precious", "g7.lmdb", "7.json", "run"):
        (folder / name).write_text('["g7"]', encoding="ascii")
        os.utime(folder / name, (OLD_S, OLD_S))
    return folder


@pytest.mark.parametrize(
    "name", ["shards/more", "pending/more", "generations/more", "shards/g7.lmdb", "pending/run", "shards/g8.lmdb"]
)
def test_collecting_leaves_alone_what_a_link_leads_to(place: Path, outside: Path, name: str) -> None:
    target = {"shards/g7.lmdb": outside / "g7.lmdb", "pending/run": outside / "run"}.get(name, outside)
    (place / name).parent.mkdir(exist_ok=True)
    (place / name).symlink_to(target)
    before = tree(outside)
    folder = ObjectFolder.open(f"file://{place}")
    compact(folder, shard_bytes=1 << 24, gc_older_than_s=0)
    remove_pending(folder, {"g7"})
    assert tree(outside) == before
    assert Store.open(place).manifest.samples == 3


@pytest.mark.parametrize("name", ["shards", "pending", "generations"])
def test_a_store_whose_own_folder_is_a_link_is_not_changed(place: Path, tmp_path: Path, name: str) -> None:
    (place / name).mkdir(exist_ok=True)
    (place / name).rename(tmp_path / "elsewhere")
    (place / name).symlink_to(tmp_path / "elsewhere")
    before = tree(tmp_path / "elsewhere")
    folder = ObjectFolder.open(f"file://{place}")
    with pytest.raises(StoreError, match=rf"{name} is a link; a store is changed only where its folders are its own"):
        compact(folder, shard_bytes=1 << 24, gc_older_than_s=0)
    assert tree(tmp_path / "elsewhere") == before


@pytest.mark.parametrize("change", ["write", "create", "remove"])
def test_nothing_is_written_or_removed_through_a_link(place: Path, outside: Path, change: str) -> None:
    (place / "shards" / "more").symlink_to(outside)
    folder, before = ObjectFolder.open(f"file://{place}"), tree(outside)
    changes: dict[str, Callable[[], object]] = {
        "write": lambda: folder.write("shards/more/new", b"1"),
        "create": lambda: folder.create("shards/more/new", b"1"),
        "remove": lambda: folder.remove(["shards/more/precious"]),
    }
    with pytest.raises(StoreError, match="shards/more is a link"):
        changes[change]()
    assert tree(outside) == before


def test_a_link_in_the_place_of_an_object_is_replaced_not_followed(place: Path, outside: Path) -> None:
    folder, before = ObjectFolder.open(f"file://{place}"), tree(outside)
    for name in ("a", "b"):
        (place / "shards" / name).symlink_to(outside / "precious")
    folder.write("shards/a", b"1")
    folder.remove(["shards/b"])
    assert tree(outside) == before
    assert (place / "shards" / "a").read_bytes() == b"1"
    assert not os.path.lexists(place / "shards" / "b")


def test_what_is_not_named_as_an_object_of_a_shard_is_not_collected(place: Path) -> None:
    kept = ("shards/notes.txt", "shards/mine/g7.lmdb", "pending/left.lmdb", "pending/writer.lock", "pending/attempts/run/a")
    for name in kept:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("mine", encoding="ascii")
        os.utime(place / name, (OLD_S, OLD_S))
    (place / "shards" / "g7.index").write_text("left long ago", encoding="ascii")
    os.utime(place / "shards" / "g7.index", (OLD_S, OLD_S))
    assert "g7.index" in collect(ObjectFolder.open(f"file://{place}"), 0).files
    assert all((place / name).read_text() == "mine" for name in kept)


def test_what_a_local_writer_has_committed_is_not_removed_with_notes_of_packs(place: Path) -> None:
    """Every pack into a URL removes the notes of finished ones, next to which a writer on the disk has its pending shards."""
    folder = ObjectFolder.open(f"file://{place}")
    (place / "pending").mkdir(exist_ok=True)
    writer = open_writer(place, "left")
    add(writer, make_sample("left.png", BUCKET))
    writer.commit()
    writer.close()
    (place / "pending" / "run").write_text(json.dumps(["g0"]), encoding="ascii")
    (place / "pending" / "odd").write_text("no list", encoding="ascii")
    remove_pending(folder, {"g0"})
    assert sorted(path.name for path in (place / "pending").iterdir()) == ["left.lmdb", "odd"]
    drop(place, [SAMPLES[1].id])
    assert Store.open(place).manifest.samples == 3
    drop(folder, [SAMPLES[2].id])
    store = Store.open(place)
    assert store.manifest.samples == 2
    assert not verify(store, lambda _: None, 1).corrupt
