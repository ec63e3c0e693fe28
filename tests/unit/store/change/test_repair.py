"""Repairing a store: what can be read stays, every other sample is dropped and named, and one generation says so."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from bucketline.errors import StoreError
from bucketline.store import Store, read_manifest
from bucketline.store.change.commit import drop
from bucketline.store.change.repair import Repaired, repair
from bucketline.store.format.block import file_digest
from bucketline.store.shard.sidecar import encode_sidecar
from bucketline.store.sync.push_pull import pull, push
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import adopt, lock_store, publish
from tests.commands import call
from tests.fault.apart import killed_at
from tests.kit import (
    IMAGES,
    Sample,
    by_id,
    dropped_list,
    faults,
    flip_bit,
    flip_caption,
    flip_row,
    ids_of,
    make_store,
    parts_of,
    replace_file,
    samples_of,
    write_shard,
)
from tests.kit import without_locks as files
from tests.object_storage import in_memory

BUCKET = "train/64x64"
PARTS = ("offset", "length", "first_row", "rows")  # of a sidecar
ROWS = {BUCKET: 23, "train/96x64": 9, "train/64x128": 1, "val/64x64": 6}


@pytest.fixture
def every(samples: list[list[Sample]]) -> dict[str, Sample]:
    return {sample.id: sample for own in samples for sample in own}


def expect(path: Path, every: dict[str, Sample], lost: Iterable[str]) -> None:
    """Compare a repaired store with what it must have: every sample but those lost, and no fault in a shard."""
    IMAGES.expect(Store.open(path), [sample for name, sample in every.items() if name not in set(lost)])
    assert verify(Store.open(path), lambda _: None, shards_only=True).corrupt == ()
    before = files(path)
    again = repair(path)
    assert (again.shards, again.dropped, again.generation) == ((), 0, read_manifest(path).generation)
    assert files(path) == before


def repaired(path: Path) -> Repaired:
    generation = read_manifest(path).generation
    done = repair(path)
    assert done.generation in (generation, generation + 1)
    return done


def test_a_sound_store_is_left_as_it_is(copy: Path, every: dict[str, Sample]) -> None:
    before = files(copy)
    done = repaired(copy)
    assert (done.generation, done.samples, done.dropped, done.shards) == (2, 53, 0, ())
    assert files(copy) == before
    expect(copy, every, set())


def test_a_missing_shard_is_dropped_whole(copy: Path, samples: list[list[Sample]], every: dict[str, Sample]) -> None:
    (copy / "shards" / "g0.lmdb").unlink()
    done = repaired(copy)
    assert (done.generation, done.samples, done.dropped) == (3, 14, 39)
    (shard,) = done.shards
    assert (shard.shard, shard.kept, shard.dropped, shard.dropped_ids, shard.written) == ("g0", 0, 39, (), ())
    expect(copy, every, {own.id for own in samples[0]})


def test_all_shards_may_be_lost_with_all_their_files(copy: Path, every: dict[str, Sample]) -> None:
    shutil.rmtree(copy / "shards")
    assert repair(copy).dropped == 53
    assert read_manifest(copy).shards == ()
    expect(copy, every, set(every))


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.6, 0.97])
def test_a_shard_may_end_anywhere(copy: Path, every: dict[str, Sample], share: float) -> None:
    path = copy / "shards" / "g0.lmdb"
    os.truncate(path, int(path.stat().st_size * share))
    (shard,) = repaired(copy).shards
    assert shard.kept + shard.dropped == 39
    assert share < 0.9 or shard.kept > 0, "what is before its end stays"
    still = set(by_id(Store.open(copy)))
    assert set(shard.dropped_ids) <= set(every) - still
    assert len(set(every) - still) == shard.dropped
    expect(copy, every, set(every) - still)


def test_a_shard_with_more_behind_its_end_keeps_all(copy: Path, every: dict[str, Sample]) -> None:
    with (copy / "shards" / "g0.lmdb").open("ab") as file:
        file.write(b"\0" * 5000)
    assert repaired(copy).dropped == 0
    expect(copy, every, set())


@pytest.mark.parametrize("suffixes", [("meta",)])
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "empty"])
def test_sidecars_are_rebuilt_from_the_shard(
    store: Store, copy: Path, every: dict[str, Sample], suffixes: tuple[str, ...], damage: str
) -> None:
    for suffix in suffixes:
        path = copy / "shards" / f"g0.{suffix}"
        match damage:
            case "missing":
                path.unlink()
            case "flipped":
                flip_bit(path, path.stat().st_size * 4)
            case _:
                os.truncate(path, path.stat().st_size // 2 if damage == "truncated" else 0)
    done = repaired(copy)
    assert (done.generation, done.dropped) == (2, 0)
    (shard,) = done.shards
    assert shard.restored == tuple(f"g0.{suffix}" for suffix in suffixes)
    assert files(copy) == files(store.path)
    assert faults(copy) == ()
    expect(copy, every, set())


@pytest.mark.parametrize("wrong", PARTS)
def test_places_that_are_intact_but_wrong_are_made_again_from_the_shard(
    copy: Path, every: dict[str, Sample], wrong: str
) -> None:
    before = files(copy)["shards/g0.meta"]
    tensors, metadata = parts_of(copy / "shards" / "g0.meta")
    changed = [(name, dtype, values + values.dtype.type(8 * (name == wrong))) for name, dtype, values in tensors]
    replace_file(copy, "meta", encode_sidecar(changed, metadata))
    assert {fault.shard for fault in faults(copy)} == {"g0"}
    assert repaired(copy).dropped == 0
    expect(copy, every, ())
    assert files(copy)["shards/g0.meta"] == before


@pytest.mark.parametrize("suffix", ["meta"])
def test_a_shard_without_file_and_sidecar_is_dropped(
    copy: Path, samples: list[list[Sample]], every: dict[str, Sample], suffix: str
) -> None:
    flip_bit(copy / "shards" / f"g1.{suffix}", 8 * 200)
    flip_bit(copy / "shards" / "g1.lmdb", 8 * 9000)
    assert repaired(copy).dropped == 14
    expect(copy, every, {own.id for own in samples[1]})


@pytest.mark.parametrize("column", ["latent", "checksum", "captions", "crop", "id"])
def test_of_flipped_rows_only_these_are_dropped_and_all_are_named(copy: Path, every: dict[str, Sample], column: str) -> None:
    flipped = [flip_row(copy, BUCKET, row, column) for row in (0, 9, 10, 30)]
    done = repaired(copy)
    assert (done.generation, done.dropped) == (3, 4)
    assert [(shard.shard, shard.kept, set(shard.dropped_ids)) for shard in done.shards] == [
        ("g0", 36, set(flipped[:3])),
        ("g1", 13, set(flipped[3:])),
    ]
    expect(copy, every, set(flipped))


def test_rows_keep_their_order_and_shards_their_place(copy: Path) -> None:
    order = ids_of(copy)
    gone = flip_row(copy, BUCKET, 5)
    repair(copy)
    assert ids_of(copy) == [sample_id for sample_id in order if sample_id != gone]


def test_a_flip_where_nothing_is_read_costs_no_sample(copy: Path, every: dict[str, Sample]) -> None:
    flip_bit(copy / "shards" / "g0.lmdb", 8 * 60)  # in LMDB's first page, which no reader of rows looks at
    done = repaired(copy)
    assert (done.generation, done.dropped) == (3, 0)
    expect(copy, every, set())


def test_a_damaged_caption_drops_the_samples_that_use_it(copy: Path, every: dict[str, Sample]) -> None:
    store = Store.open(copy)
    _, record = store.sample(f"first/{BUCKET}/3.png")
    flip_caption(store, record.caption_rows[0])
    users = {i for i, s in every.items() if i.startswith("first/") and record.captions[0] in s.captions}
    done = repaired(copy)
    assert set(done.shards[0].dropped_ids) == users
    assert 0 < len(users) < 39
    expect(copy, every, users)


def test_a_damaged_empty_caption_is_taken_from_another_shard(copy: Path, every: dict[str, Sample]) -> None:
    flip_caption(copy, 0)
    assert repaired(copy).dropped == 0
    expect(copy, every, set())


def test_a_damaged_record_drops_its_sample(copy: Path, every: dict[str, Sample]) -> None:
    store = Store.open(copy)
    shard, record = store.sample(f"first/{BUCKET}/3.png")
    data = shard.paths.lmdb.read_bytes()
    shard.paths.lmdb.write_bytes(data.replace(b"first/train/64x64/3.png", b"first/train/64x64/X.png"))
    done = repaired(copy)
    assert (done.dropped, done.shards[0].dropped_ids) == (1, ())  # its name is what was lost
    expect(copy, every, {record.id})


def test_a_shard_replaced_by_another_is_dropped(copy: Path, samples: list[list[Sample]], every: dict[str, Sample]) -> None:
    shutil.copy(copy / "shards" / "g1.lmdb", copy / "shards" / "g0.lmdb")
    assert repaired(copy).dropped == 39
    expect(copy, every, {own.id for own in samples[0]})


def test_dropped_and_replaced_rows_do_not_come_back(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 12})
    newer = samples_of({BUCKET: 3})
    make_store(tmp_path, samples, newer)
    drop(tmp_path, [samples[7].id])
    gone = flip_row(tmp_path, BUCKET, 4)  # of the older shard's live rows: 3, 4, 5, 6, 8, …
    assert gone == samples[8].id
    done = repaired(tmp_path)
    assert done.shards[0].dropped_ids == (samples[8].id,)
    expect(tmp_path, {s.id: s for s in samples}, {samples[7].id, samples[8].id})


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_shard_that_has_lost_its_list_of_dropped_rows_is_dropped_whole(tmp_path: Path, damage: str) -> None:
    """Else a sample that someone dropped could be back."""
    samples, own = samples_of({BUCKET: 12}), tmp_path / "s"
    make_store(own, samples)
    drop(own, [samples[1].id])
    path = dropped_list(own)
    path.unlink() if damage == "missing" else os.truncate(path, 10)
    (shard,) = repaired(own).shards
    assert (shard.kept, shard.dropped) == (0, 11)
    expect(own, {s.id: s for s in samples}, {own.id for own in samples})


def test_a_store_at_a_url_is_repaired_where_it_is(copy: Path, every: dict[str, Sample], tmp_path: Path) -> None:
    folder = in_memory()
    push(copy, folder)
    gone = flip_row(copy, BUCKET, 3)
    folder.write("shards/g0.lmdb", (copy / "shards" / "g0.lmdb").read_bytes())
    index = folder.read("shards/g1.meta")
    folder.remove(["shards/g1.meta"])
    done = repair(folder)
    assert (done.generation, done.samples, done.dropped) == (3, 52, 1)
    assert [(shard.shard, shard.kept, shard.dropped_ids, shard.restored) for shard in done.shards] == [
        ("g0", 38, (gone,), ()),
        ("g1", 14, (), ("g1.meta",)),
    ]
    assert folder.read("shards/g1.meta") == index
    pull(folder, tmp_path / "pulled")
    expect(tmp_path / "pulled", every, {gone})
    folder.remove([file.name for file in folder.names("shards") if file.name.startswith("shards/g1.")])
    assert repair(folder).dropped == 14
    assert repair(folder).shards == ()


def test_a_damaged_shard_is_retired_and_never_adopted_not_even_when_its_file_is_put_back(
    copy: Path, samples: list[list[Sample]], every: dict[str, Sample], tmp_path: Path
) -> None:
    shutil.move(copy / "shards" / "g0.lmdb", tmp_path / "away")
    repair(copy)
    shutil.move(tmp_path / "away", copy / "shards" / "g0.lmdb")
    write_shard(copy, "more", samples_of({BUCKET: 2}, "more/"))
    with lock_store(copy):
        manifest = read_manifest(copy)
        assert adopt(copy, manifest) == ["more"]
        publish(copy, manifest, ["more"], ())
        assert adopt(copy, read_manifest(copy)) == []
    assert len(by_id(Store.open(copy))) == len(every) - len(samples[0]) + 2


@pytest.mark.parametrize(("function", "call"), [("copy_rows.RowCopier.copy", 2), ("commit.publish_shards", 1)])
def test_a_killed_repair_leaves_the_store_as_it_was_and_the_next_one_cleans_up(
    copy: Path, every: dict[str, Sample], function: str, call: int
) -> None:
    flipped = [flip_row(copy, BUCKET, row) for row in (3, 30)]
    manifest = (copy / "manifest.json").read_bytes()
    killed_at(f"store.change.{function}", call, lambda: repair(copy))
    assert (copy / "manifest.json").read_bytes() == manifest
    left = {path.name for path in (copy / "shards").glob("copy-*.lmdb")}
    assert left
    assert repaired(copy).generation == 3
    assert not left & {path.name for path in (copy / "shards").iterdir()}
    expect(copy, every, flipped)


@pytest.mark.parametrize("part", ["shards", "shards/g0.lmdb"])
def test_files_that_lie_on_a_disk_that_is_not_there_are_not_given_up(copy: Path, tmp_path: Path, part: str) -> None:
    shutil.move(copy / part, tmp_path / "elsewhere")
    (copy / part).symlink_to(tmp_path / "not-mounted")
    before = (copy / "manifest.json").read_bytes()
    with pytest.raises(StoreError, match=r"is a dangling link|a store is changed only where its folders are its own"):
        repair(copy)
    assert (copy / "manifest.json").read_bytes() == before


def test_what_an_interrupted_pack_left_stays_for_the_next_one(copy: Path, every: dict[str, Sample]) -> None:
    """Adoption reads every shard's index, which is what may be damaged."""
    write_shard(copy, "late", samples_of({BUCKET: 2}, "late/"))
    (copy / "shards" / "g0.lmdb").unlink()
    (copy / "shards" / "g0.meta").unlink()
    repair(copy)
    with lock_store(copy):
        manifest = read_manifest(copy)
        publish(copy, manifest, adopt(copy, manifest), ())
    assert {f"late/{BUCKET}/0.png", f"late/{BUCKET}/1.png"} <= set(by_id(Store.open(copy)))


def test_the_command_says_what_it_kept_and_what_it_dropped(copy: Path) -> None:
    flipped = flip_row(copy, BUCKET, 3)
    os.truncate(copy / "shards" / "g1.meta", 100)
    shutil.copytree(copy, copy.with_name("other"))
    ran = call("store", "repair", copy.with_name("other")).done()
    assert "shard g0: 38 of 39 samples can be read in copy-" in ran.out
    assert f"dropped: {flipped}" in ran.out
    assert "shard g1: g1.meta rebuilt, nothing lost" in ran.out
    assert f"{copy.with_name('other')}: 1 sample dropped, 52 stay; generation 3" in ran.out
    ran = call("store", "repair", copy, "--json").done()
    report = ran.json
    assert (report["generation"], report["samples"], report["dropped"]) == (3, 52, 1)
    assert [shard["dropped_ids"] for shard in report["shards"]] == [[flipped], []]
    assert "nothing to repair, all of 52 samples can be read" in call("store", "repair", copy).out
    assert call("store", "repair", copy, "--threads", 0).code == 2
    (copy / "shards" / "g1.lmdb").unlink()
    ran = call("store", "repair", copy)
    assert "dropped: 14 samples, 14 of them without a readable name" in ran.out
    assert "run the same `ingest pack` again" in ran.out


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_only_what_the_medium_lost_is_given_up(
    copy: Path, every: dict[str, Sample], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(path: Path) -> tuple[int, str]:
        if path.name in ("g0.lmdb", "g0.meta"):
            raise OSError(number, os.strerror(number), str(path))
        return file_digest(path)

    before = files(copy)
    with monkeypatch.context() as patched:
        patched.setattr("bucketline.store.change.repair.file_digest", fail)
        patched.setattr("bucketline.store.verify.shard.file_digest", fail)
        if number != errno.EIO:
            with pytest.raises(StoreError, match=f"cannot be read: {os.strerror(number)}; fix this and rerun the command"):
                repair(copy)
            assert files(copy) == before
            return
        assert repair(copy).dropped == 39
    expect(copy, every, {sample_id for sample_id in every if sample_id.startswith("first/")})
