"""Attempts: their shards count once the store's writer has taken them, and what nobody took is removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bucketline.errors import StoreError
from bucketline.store import Store
from bucketline.store.verify.verify import FolderCheck, verify
from bucketline.store.write.attempts import attempt_path, begin_attempt, begin_attempts, seal_rest, take_shards
from tests.kit import IMAGES, Sample, everything, make_sample


def samples(*names: str) -> list[Sample]:
    return [make_sample(name, "train/64x64", ("a cat",)) for name in names]


def ids_of(store: Path) -> list[str]:
    return sorted(held.record.id for rows in everything(Store.open(store)).values() for held in rows)


def test_only_taken_shards_count_and_the_rest_is_removed(tmp_path: Path) -> None:
    store = tmp_path / "s"
    with IMAGES.writer(store) as writer:
        begin_attempts(store, "run")
        sealed = {}
        for name, ids in (("a0", ["1.png", "2.png"]), ("a1", ["2.png", "3.png"])):
            with IMAGES.part(begin_attempt(store, "run", name), f"run-{name}") as part:
                IMAGES.add(part, samples(*ids))
            sealed[name] = part.sealed
        assert not list((store / "shards").iterdir())
        take_shards(store, attempt_path(store, "run", "a1"), sealed["a1"])
        writer.publish(sealed["a1"])
        strays = FolderCheck(Store.open(store).folder, Store.open(store).manifest, lambda _: None)
        strays.run()
        assert any("the next pack uses or removes it" in stray.what for stray in strays.strays)
    assert ids_of(store) == ["2.png", "3.png"]
    with IMAGES.writer(store):
        pass
    assert not (store / "pending" / "attempts").exists()
    assert ids_of(store) == ["2.png", "3.png"]
    assert not verify(Store.open(store), lambda _: None, 1).corrupt


def test_a_taken_shard_that_was_not_published_is_adopted(tmp_path: Path) -> None:
    store = tmp_path / "s"
    with IMAGES.writer(store):
        begin_attempts(store, "run")
        with IMAGES.part(begin_attempt(store, "run", "a0"), "run-a0") as part:
            IMAGES.add(part, samples("1.png"))
        take_shards(store, attempt_path(store, "run", "a0"), part.sealed)
    with IMAGES.writer(store):
        pass
    assert ids_of(store) == ["1.png"]


def test_what_a_stopped_attempt_had_committed_is_sealed(tmp_path: Path) -> None:
    store = tmp_path / "s"
    with IMAGES.writer(store) as writer:
        begin_attempts(store, "run")
        folder = begin_attempt(store, "run", "a0")
        part = IMAGES.part(folder, "run-a0")
        IMAGES.add(part, samples("1.png"))
        part.commit()
        part.close()
        names = seal_rest(folder)
        take_shards(store, folder, names)
        writer.publish(names)
    assert ids_of(store) == ["1.png"]


def test_a_machine_that_does_not_see_the_runs_folder_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"pending/attempts/run is not on .*must be on a disk that all machines share"):
        begin_attempt(tmp_path / "s", "run", "a0")


def test_attempts_are_not_made_through_a_link(tmp_path: Path) -> None:
    store, outside = tmp_path / "s", tmp_path / "outside"
    outside.mkdir()
    with IMAGES.writer(store):
        (store / "pending" / "attempts").symlink_to(outside)
        with pytest.raises(StoreError, match="pending/attempts is a link"):
            begin_attempts(store, "run")
    assert list(outside.iterdir()) == []
