"""Restoring an earlier generation: exactly its rows are the newest again, and nothing that came later comes back by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from bucketline.errors import LockedError, StoreError
from bucketline.store import Store, read_manifest
from bucketline.store.change.commit import restore
from bucketline.store.change.compact import compact
from bucketline.store.change.drop import drop
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import changing, lock_store
from tests.commands import call
from tests.kit import Held, add, by_id, make_sample, make_store, open_writer, samples_of, store_writer, tree

BUCKET, OTHER = "train/64x64", "val/64x96"


def contents_of(path: Path, generation: int | None = None) -> dict[str, Held]:
    return by_id(Store(path, read_manifest(path, generation)))


def changed_store(path: Path) -> Path:
    """Make a store of four generations: packed, packed again with a replaced and new samples, two dropped, compacted."""
    first, second = samples_of({BUCKET: 9}, "first/"), samples_of({BUCKET: 3, OTHER: 2}, "second/")
    replaced = make_sample(first[0].id, BUCKET, ("snow",), version=1)
    make_store(path, first, [*second, replaced])
    drop(path, [first[1].id, first[2].id])
    compact(path, shard_bytes=1 << 30)
    return path


def leave_pending(store: Path) -> None:
    """Leave what a killed run leaves: a shard that was committed and neither sealed nor published."""
    writer = open_writer(store, "left")
    add(writer, make_sample("left.png", BUCKET))
    writer.commit()
    writer.close()


@pytest.mark.parametrize("generation", [0, 1, 2, 3, 4])
def test_a_restored_generation_has_exactly_the_samples_it_had(tmp_path: Path, generation: int) -> None:
    store = changed_store(tmp_path / "s")
    before = contents_of(store, generation)
    newest = contents_of(store)
    was, done = restore(store, generation)
    assert (was.samples, done.samples) == (len(newest), len(before))
    assert contents_of(store) == before
    assert done.generation == (4 if generation == 4 else 5)
    assert read_manifest(store).buckets == read_manifest(store, generation).buckets
    found = verify(Store.open(store), lambda _: None)
    assert (found.corrupt, [stray.path for stray in found.strays if "shards" in stray.path]) == ((), [])
    assert contents_of(store, 4) == newest  # what was newest can be restored in turn
    restore(store, 4)
    assert contents_of(store) == newest


def test_what_came_later_is_not_adopted_again_and_a_following_writer_continues(tmp_path: Path) -> None:
    store = changed_store(tmp_path / "s")
    restore(store, 1)
    before = contents_of(store, 1)
    with changing(store) as manifest:
        assert manifest.generation == 5  # nothing to adopt
    new = make_sample("new.png", BUCKET)
    with store_writer(store) as writer:
        writer.add(new.id, BUCKET, {"latent": new.latent}, {})
    assert {key: value for key, value in contents_of(store).items() if key != "new.png"} == before
    drop(store, ["new.png"])
    assert contents_of(store) == before
    compact(store, shard_bytes=1 << 30, gc_older_than_s=0.0)
    assert contents_of(store) == before
    found = verify(Store.open(store), lambda _: None)
    assert (found.corrupt, found.strays) == ((), ())
    with changing(store):
        assert contents_of(store) == before


def test_what_an_interrupted_run_left_becomes_a_generation_and_does_not_come_back(tmp_path: Path) -> None:
    store = changed_store(tmp_path / "s")
    before = contents_of(store, 2)
    leave_pending(store)
    assert list((store / "pending").glob("left.lmdb"))
    _, done = restore(store, 2)
    assert (done.generation, contents_of(store)) == (6, before)
    assert "left.png" in contents_of(store, 5)
    with changing(store) as manifest:
        assert manifest.generation == 6
    assert contents_of(store) == before


def test_a_generation_whose_shards_were_collected_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    store = changed_store(tmp_path / "s")
    compact(store, shard_bytes=1 << 30, gc_older_than_s=0.0)
    before = tree(store)
    with pytest.raises(StoreError, match=r"has no generation 1: it was removed by `store compact --gc`.*there are 4"):
        restore(store, 1)
    assert tree(store) == before


def test_a_generation_that_has_lost_a_file_is_refused_and_nothing_is_adopted(tmp_path: Path) -> None:
    store = changed_store(tmp_path / "s")
    leave_pending(store)
    (store / "shards" / "g0.index").unlink()
    before = tree(store)
    for dry_run in (True, False):
        with pytest.raises(StoreError, match=r"generation 2 of .* cannot be restored: files of 1 shard are gone.*g0.index"):
            restore(store, 2, dry_run=dry_run)
    assert tree(store) == before


def test_a_store_that_is_being_written_is_not_changed(tmp_path: Path) -> None:
    store = changed_store(tmp_path / "s")
    with lock_store(store), pytest.raises(LockedError):
        restore(store, 1)
    assert read_manifest(store).generation == 4


def test_the_command_says_what_it_did_and_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    store = changed_store(tmp_path / "s")
    before = tree(store)
    assert (
        call("store", "restore", store, 1, "--dry-run").out
        == f"{store}: would restore generation 1, 9 samples (there were 12)\n"
    )
    listed = call("store", "restore", store).out.splitlines()
    assert [line.partition(",")[0] for line in listed] == [
        f"generation {number}: {samples}"
        for number, samples in ((4, "12 samples"), (3, "12 samples"), (2, "14 samples"), (1, "9 samples"), (0, "0 samples"))
    ]
    assert listed[0].endswith(", the newest")
    assert tree(store) == before
    assert (
        call("store", "restore", store, 1).out == f"{store}: generation 1 restored, 9 samples (there were 12); generation 5\n"
    )
    assert "nothing to restore, generation 5 already has what 1 had" in call("store", "restore", store, 1).out
    report = call("store", "restore", store, 4, "--json").json
    assert report == {
        "restored": 4,
        "generation": 6,
        "samples_before": 9,
        "samples": 12,
        "is_changed": True,
        "dry_run": False,
    }
    assert [entry["generation"] for entry in call("store", "restore", store, "--json").json["generations"]] == [
        6,
        5,
        4,
        3,
        2,
        1,
        0,
    ]
    assert call("store", "restore", store, 9).code == 1
