"""Dropping samples by id: they are gone from the next generation, or nothing has happened."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bucketline.errors import LockedError, StoreError, UsageError
from bucketline.store import Store, read_manifest
from bucketline.store.change.drop import drop, read_ids
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import lock_store
from tests.commands import call
from tests.kit import add, make_sample, make_store, open_writer, samples_of, tree
from tests.loading import loaders_of, rows_of

BUCKET = "train/64x64"


def ids_of(store: Store) -> list[str]:
    return [i for bucket in store.buckets() for i in bucket.sample_ids(np.arange(bucket.num_rows))]


def test_dropped_samples_are_gone_the_others_stay_in_order(tmp_path: Path) -> None:
    first, second = samples_of({BUCKET: 9, "val/64x64": 3}, "first/"), samples_of({BUCKET: 5}, "second/")
    make_store(tmp_path, first, second)
    gone = [first[0].id, second[4].id, "first/val/64x64/2.png"]
    done = drop(tmp_path, [*gone, gone[0]])
    assert (done.generation, done.ids, done.samples) == (3, tuple(gone), 14)
    store = Store.open(tmp_path)
    assert sorted(ids_of(store)) == sorted(s.id for s in (*first, *second) if s.id not in gone)
    assert verify(store, lambda _: None).corrupt == ()
    with pytest.raises(StoreError, match="has no sample"):
        store.sample(gone[0])


def test_ids_that_are_not_there_are_named_and_nothing_is_dropped(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 4})
    make_store(tmp_path, samples)
    drop(tmp_path, [samples[0].id])
    before = {name: data for name, data in tree(tmp_path).items() if "lock" not in name}
    with pytest.raises(StoreError, match=r"has no sample '.*/0.png' \(1 of 2 ids given\); nothing was dropped"):
        drop(tmp_path, [samples[1].id, samples[0].id])
    with pytest.raises(StoreError, match=r"has no sample 'no0', 'no1', 'no2', 'no3', 'no4' and others \(8 of 8 ids"):
        drop(tmp_path, [f"no{n}" for n in range(8)])
    assert {name: data for name, data in tree(tmp_path).items() if "lock" not in name} == before


def test_a_reader_that_was_open_keeps_what_it_had(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 8})
    held = make_store(tmp_path, samples)
    drop(tmp_path, [samples[3].id])
    loaded = rows_of(loaders_of(held))[BUCKET]
    assert np.array_equal(loaded["latents"], np.stack([sample.latent for sample in samples]))
    assert ids_of(held) == [sample.id for sample in samples]


def test_a_dry_run_checks_and_changes_nothing(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 4})
    make_store(tmp_path, samples)
    before = tree(tmp_path)
    assert drop(tmp_path, [samples[0].id], dry_run=True).samples == 3
    with pytest.raises(StoreError, match="has no sample 'no'"):
        drop(tmp_path, ["no"], dry_run=True)
    assert tree(tmp_path) == before


def test_a_sample_that_an_interrupted_run_left_pending_is_dropped_too(tmp_path: Path) -> None:
    """Else the next pack would adopt it, and the sample would be back."""
    sample = make_sample("a.png", BUCKET)
    make_store(tmp_path, [sample, make_sample("b.png", BUCKET)])
    writer = open_writer(tmp_path, "left")
    add(writer, make_sample("a.png", BUCKET, version=1))
    writer.commit()
    writer.close()
    drop(tmp_path, ["a.png"])
    assert ids_of(Store.open(tmp_path)) == ["b.png"]
    assert not (tmp_path / "pending" / "left.lmdb").exists()


def test_a_store_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 2})
    make_store(tmp_path, samples)
    with lock_store(tmp_path), pytest.raises(LockedError, match="is being written by another process"):
        drop(tmp_path, [samples[0].id])


def test_no_id_at_all_and_no_store_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no id to drop"):
        drop(tmp_path, [])
    with pytest.raises(StoreError, match="is not a store"):
        drop(tmp_path, ["a"])
    assert tree(tmp_path) == {}


def test_all_samples_of_a_store_may_be_dropped(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 3, "val/64x64": 1})
    make_store(tmp_path, samples)
    drop(tmp_path, [sample.id for sample in samples])
    store = Store.open(tmp_path)
    assert (store.buckets(), store.manifest.samples) == ([], 0)


def test_a_file_of_ids_is_read_a_line_each_whatever_the_names(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    path.write_bytes(b"a.png\r\n\n  spaced .png\n\xff\xfe.png\nlast")
    assert read_ids(path) == ["a.png", "  spaced .png", "\udcff\udcfe.png", "last"]
    with pytest.raises(UsageError, match="nowhere cannot be read: No such file"):
        read_ids(tmp_path / "nowhere")


def test_the_command_drops_ids_of_its_line_and_of_a_file(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 6})
    make_store(tmp_path / "s", samples)
    (tmp_path / "ids").write_text(f"{samples[1].id}\n{samples[2].id}\n", encoding="ascii")
    asked = ("drop", tmp_path / "s", samples[0].id, "--from-file", tmp_path / "ids")
    assert "would drop 3 samples, 3 would stay" in call("store", *asked, "--dry-run").out
    ran = call("store", *asked, "--json").done()
    assert ran.json == {"generation": 2, "dropped": [s.id for s in samples[:3]], "samples": 3, "dry_run": False}
    assert read_manifest(tmp_path / "s").samples == 3
    again = call("store", *asked)
    assert (again.code, again.out) == (1, "")
    assert "(3 of 3 ids given); nothing was dropped" in again.err
    assert call("store", "drop", tmp_path / "s").code == 2


@pytest.mark.parametrize("is_url", [False, True])
def test_a_pattern_drops_what_store_ls_lists_by_it(tmp_path: Path, is_url: bool) -> None:  # noqa: FBT001
    make_store(tmp_path / "a.store", samples_of({BUCKET: 9, "val/64x64": 3}, "cats/"), samples_of({BUCKET: 5}, "dogs/"))
    place = str(tmp_path / "a.store")
    if is_url:
        url = (tmp_path / "bucket" / "a.store").as_uri()
        assert call("store", "push", place, url).code == 0
        place = url
    listed = [line.split("\t")[0] for line in call("store", "ls", place, "--match", "dogs/*").out.splitlines()]
    assert len(listed) == 5
    looked = call("store", "drop", place, "--match", "dogs/*", "--dry-run")
    assert "would drop 5 samples, 12 would stay" in looked.out, looked.err
    done = call("store", "drop", place, "--match", "dogs/*", "cats/val/64x64/2.png", "--json")
    assert sorted(json.loads(done.out)["dropped"]) == sorted([*listed, "cats/val/64x64/2.png"])
    assert len(call("store", "ls", place).out.splitlines()) == 11
    call("store", "drop", place, "--match", "dogs/*").fails("has no sample that matches 'dogs/*'; nothing was dropped")
