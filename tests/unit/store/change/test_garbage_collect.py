"""Collecting: what no generation needs any more goes, what one needs or the next run may adopt stays."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bucketline.errors import StoreError, UsageError
from bucketline.option_value import Duration
from bucketline.store import Store, read_manifest
from bucketline.store.change.compact import compact
from bucketline.store.change.drop import drop
from bucketline.store.change.garbage_collect import collect
from bucketline.store.format.manifest import Manifest
from bucketline.store.write.publish import adopt, lock_store
from tests.commands import call
from tests.kit import everything, flip_bit, make_store, samples_of, tree, write_shard

BUCKET = "train/64x64"
HOUR_S = 3600.0


def changed_store(path: Path) -> Manifest:
    """Make a store whose generation 5 is a compacted 4, which is a 3 that has lost a sample more."""
    first = samples_of({BUCKET: 8})
    make_store(path, first, samples_of({BUCKET: 3}, "second/"))
    drop(path, [first[0].id])
    drop(path, [first[1].id])
    compact(path, shard_bytes=1 << 30)
    return read_manifest(path)


def age(path: Path, generation: int, seconds: float) -> None:
    """Make a generation's file as old as that."""
    when = time.time() - seconds
    os.utime(path / "generations" / f"{generation}.json", (when, when))


def names(path: Path) -> list[str]:
    return sorted(name for name in tree(path) if not name.endswith("/") and "lock" not in name)


def test_what_was_superseded_lately_stays(tmp_path: Path) -> None:
    changed_store(tmp_path)
    before = names(tmp_path)
    found = collect(tmp_path, 24 * HOUR_S)
    assert (found.generations, found.files, found.disk_bytes) == ((), (), 0)
    assert names(tmp_path) == before


def test_a_generation_goes_when_its_successor_is_old_enough_and_its_files_with_it(tmp_path: Path) -> None:
    changed_store(tmp_path)
    for generation in range(5):
        age(tmp_path, generation, 30 * HOUR_S)
    held = everything(Store.open(tmp_path, 4))
    found = collect(tmp_path, 24 * HOUR_S)
    assert found.generations == (0, 1, 2, 3)  # the fourth was superseded a moment ago
    assert found.files == ("g0.dropped-3",)
    assert found.disk_bytes > 0
    assert everything(Store.open(tmp_path, 4)) == held
    with pytest.raises(StoreError, match="has no generation 3 any more"):
        Store.open(tmp_path, 3)


@pytest.mark.parametrize("ahead_s", [48 * HOUR_S, -48 * HOUR_S])
def test_ages_are_by_the_clock_that_dates_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float) -> None:
    """A file server's clock may differ from this machine's."""
    now = time.time
    changed_store(tmp_path)
    monkeypatch.setattr(time, "time", lambda: now() + ahead_s)
    found = collect(tmp_path, 24 * HOUR_S)
    assert (found.generations, found.files) == ((), ())
    assert found.waiting == (0, 1, 2, 3, 4)
    assert collect(tmp_path, 0).generations == (0, 1, 2, 3, 4)
    assert {path.name for path in (tmp_path / "pending").iterdir()} <= {"writer.lock"}


def test_with_no_age_at_all_the_newest_generation_alone_stays(tmp_path: Path) -> None:
    newest = changed_store(tmp_path)
    held = everything(Store.open(tmp_path))
    wanted = collect(tmp_path, 0, dry_run=True)
    assert len(names(tmp_path)) == 6 + 1 + 3 * 3 + 2
    found = collect(tmp_path, 0)
    assert found == wanted
    copy = newest.shards[0].name
    left = ["generations/5.json", "manifest.json", *(f"shards/{copy}.{kind}" for kind in ("extents", "index", "lmdb"))]
    assert names(tmp_path) == sorted(left)
    assert everything(Store.open(tmp_path)) == held
    assert collect(tmp_path, 0).files == ()
    drop(tmp_path, ["second/train/64x64/0.png"])
    assert read_manifest(tmp_path).retired == ()


def test_a_shard_that_no_generation_has_listed_yet_stays_and_is_adopted(tmp_path: Path) -> None:
    newest = changed_store(tmp_path)
    write_shard(tmp_path, "left", samples_of({BUCKET: 2}, "left/"))
    (tmp_path / "shards" / "notes.txt").write_text("mine", encoding="ascii")
    collect(tmp_path, 0)
    assert {"left.lmdb", "left.extents", "left.index", "notes.txt"} <= {p.name for p in (tmp_path / "shards").iterdir()}
    with lock_store(tmp_path):
        assert adopt(tmp_path, newest) == ["left"]


def test_the_copies_of_an_interrupted_compact_go(tmp_path: Path) -> None:
    make_store(tmp_path, samples_of({BUCKET: 2}))
    write_shard(tmp_path, "copy-000002-0000", samples_of({BUCKET: 2}))
    found = collect(tmp_path, 0)
    assert found.files == tuple(f"copy-000002-0000.{kind}" for kind in ("lmdb", "extents", "index"))  # in the order of removal


def test_a_collection_that_was_cut_off_is_finished_by_the_next(tmp_path: Path) -> None:
    newest = changed_store(tmp_path)
    (tmp_path / "shards" / "g0.lmdb").unlink()
    (tmp_path / "shards" / "g1.lmdb").unlink()
    (tmp_path / "shards" / "g1.index").unlink()
    with lock_store(tmp_path):
        assert adopt(tmp_path, newest) == []
    drop(tmp_path, ["second/train/64x64/0.png"])
    collect(tmp_path, 0)
    assert [name for name in names(tmp_path) if "g0" in name or "g1" in name] == []


def test_a_shard_stays_known_as_retired_when_only_its_file_is_left(tmp_path: Path) -> None:
    newest = changed_store(tmp_path)
    for generation in range(5):
        (tmp_path / "generations" / f"{generation}.json").unlink()
    with lock_store(tmp_path):
        assert adopt(tmp_path, newest) == []
    collect(tmp_path, 0)
    assert [name for name in names(tmp_path) if "g0" in name or "g1" in name] == []


def test_a_collection_leaves_no_manifest_behind_that_names_a_removed_generation(tmp_path: Path) -> None:
    """An old `manifest.json` was put back: readers begin there."""
    make_store(tmp_path, samples_of({BUCKET: 8}))
    hint = (tmp_path / "manifest.json").read_bytes()
    for sample in samples_of({BUCKET: 3}):
        drop(tmp_path, [sample.id])
    held = everything(Store.open(tmp_path))
    (tmp_path / "manifest.json").write_bytes(hint)
    collect(tmp_path, 0)
    assert everything(Store.open(tmp_path)) == held


def test_a_damaged_generation_that_is_to_stay_stops_the_collection(tmp_path: Path) -> None:
    changed_store(tmp_path)
    flip_bit(tmp_path / "generations" / "4.json", 999)
    before = names(tmp_path)
    with pytest.raises(
        StoreError, match=r"generations/4.json cannot be read, so the files that it needs are unknown .*nothing was removed"
    ):
        collect(tmp_path, HOUR_S)
    assert names(tmp_path) == before
    assert collect(tmp_path, 0).generations == (0, 1, 2, 3, 4)
    assert len(names(tmp_path)) == 5


@pytest.mark.parametrize(("text", "seconds"), [("24h", 86400), ("90m", 5400), ("7d", 604800), ("0s", 0), ("1.5h", 5400)])
def test_durations_are_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert Duration.parse(text, "it").seconds == seconds


@pytest.mark.parametrize("text", ["", "24", "h", "-1h", "1  h", "1w", "1h30m", "nanh", "٣h"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^it is .*, expected a number and s, m, h or d"):
        Duration.parse(text, "it")


def test_the_command_lists_what_it_removes(tmp_path: Path) -> None:
    changed_store(tmp_path)
    ran = call("store", "compact", tmp_path, "--gc", "--older-than", "0s", "--dry-run")
    assert "5 generations and 8 files would be removed" in ran.out
    ran = call("store", "compact", tmp_path, "--gc", "--older-than", "0s")
    assert "5 generations and 8 files removed" in ran.out
    assert "g0.dropped-3" in ran.out
    assert "stay" not in ran.out


def test_the_command_says_what_stays(tmp_path: Path) -> None:
    changed_store(tmp_path)
    superseded = time.time() - 3600
    for path in (tmp_path / "generations").iterdir():
        os.utime(path, (superseded, superseded))
    ran = call("store", "compact", tmp_path, "--gc")
    assert "  0 generations and 0 files removed" in ran.out
    assert "  5 generations superseded less than 1d ago are kept, with the files only they use," in ran.out
    assert "`--gc --older-than 0s` removes them now" in ran.out
    ran = call("store", "compact", tmp_path, "--gc", "--older-than", "2h", "--json")
    assert ran.json["collected"]["waiting"] == [0, 1, 2, 3, 4]
    ran = call("store", "compact", tmp_path, "--gc", "--older-than", "30m", "--json")
    assert (ran.json["collected"]["generations"], ran.json["collected"]["waiting"]) == ([0, 1, 2, 3, 4], [])


def test_a_time_without_gc_is_refused(tmp_path: Path) -> None:
    changed_store(tmp_path)
    call("store", "compact", tmp_path, "--older-than", "0s").fails("--older-than 0s requires --gc; add --gc", code=2)


def test_a_dry_run_that_cannot_read_a_generation_says_so(tmp_path: Path) -> None:
    store = tmp_path
    changed_store(store)
    flip_bit(store / "generations" / "1.json", 801)
    with pytest.raises(StoreError, match=r"1\.json cannot be read, so the files that it needs are unknown"):
        compact(store, shard_bytes=1 << 30, gc_older_than_s=3600.0, dry_run=True)
