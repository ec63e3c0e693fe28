"""Dropping, restoring and merging: exactly the samples that are asked for, or nothing has happened."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bucketline.errors import FingerprintError, LockedError, StoreError, UsageError
from bucketline.files.atomic_write import FileLock, staging_path
from bucketline.store import Store, read_manifest
from bucketline.store.change.commit import drop, read_ids, restore
from bucketline.store.change.compact import compact
from bucketline.store.change.merge import merge
from bucketline.store.change.repair import repair
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import adopt, changing, lock_store
from tests.commands import call
from tests.fault.apart import killed_at
from tests.kit import (
    IMAGES,
    Held,
    Sample,
    by_id,
    contents,
    dropped_list,
    empty_store,
    faults,
    flip_bit,
    ids_of,
    images,
    leave_pending,
    make_sample,
    make_store,
    rewrite_manifest,
    samples_of,
    store_writer,
    tree,
    untouched,
    without_locks,
)

BUCKET = "train/64x64"


def test_dropped_samples_are_gone_the_others_stay_in_order(tmp_path: Path) -> None:
    first, second = samples_of({BUCKET: 9, "val/64x64": 3}, "first/"), samples_of({BUCKET: 5}, "second/")
    make_store(tmp_path, first, second)
    gone = [first[0].id, second[4].id, "first/val/64x64/2.png"]
    done = drop(tmp_path, [*gone, gone[0]])
    assert (done.generation, done.ids, done.samples) == (3, tuple(gone), 14)
    store = Store.open(tmp_path)
    assert sorted(ids_of(store)) == sorted(s.id for s in (*first, *second) if s.id not in gone)
    assert not faults(store)
    with pytest.raises(StoreError, match="has no sample"):
        store.sample(gone[0])


def test_ids_that_are_not_there_are_named_and_nothing_is_dropped(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 4})
    make_store(tmp_path, samples)
    drop(tmp_path, [samples[0].id])
    with untouched(tmp_path, without_locks):
        with pytest.raises(StoreError, match=r"has already withdrawn '.*/0.png' \(1 of 2 ids given\); nothing"):
            drop(tmp_path, [samples[1].id, samples[0].id])
        with pytest.raises(StoreError, match=r"has no sample 'no0', 'no1', 'no2', 'no3', 'no4' and others \(8 of 8 ids"):
            drop(tmp_path, [f"no{n}" for n in range(8)])


def test_a_dry_run_checks_and_changes_nothing(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 4})
    make_store(tmp_path, samples)
    with untouched(tmp_path):
        assert drop(tmp_path, [samples[0].id], dry_run=True).samples == 3
        with pytest.raises(StoreError, match="has no sample 'no'"):
            drop(tmp_path, ["no"], dry_run=True)


def test_a_sample_that_an_interrupted_run_left_pending_is_dropped_too(tmp_path: Path) -> None:
    """Else the next pack would adopt it, and the sample would be back."""
    sample = make_sample("a.png", BUCKET)
    make_store(tmp_path, [sample, make_sample("b.png", BUCKET)])
    leave_pending(tmp_path, "left", [make_sample("a.png", BUCKET, version=1)])
    drop(tmp_path, ["a.png"])
    assert ids_of(Store.open(tmp_path)) == ["b.png"]
    assert not (tmp_path / "pending" / "left.lmdb").exists()


def test_what_an_interrupted_first_run_committed_is_said(tmp_path: Path) -> None:
    empty_store(tmp_path)
    leave_pending(tmp_path, "left", samples_of({BUCKET: 3, OTHER: 2}))
    for name in ("writer", "left"):
        with FileLock(tmp_path / "pending" / f"{name}.lock"):
            assert "a process is writing to it now\n" in call("store", "info", tmp_path).out
    (tmp_path / "pending" / "left.lock").unlink()
    with untouched(tmp_path):
        assert call("store", "info", tmp_path, "--json").json["unpublished"] == {"rows": 5, "is_being_written": False}
        first, second, *_ = call("store", "info", tmp_path).out.splitlines()
        assert first.startswith("no generation is published yet, so readers see no samples; ")
        told = f"the same command continues it (`ingest pack SOURCE {tmp_path}`)"
        assert second == f"an interrupted run committed 5 rows; {told}"
    with changing(tmp_path):
        pass
    os.mkfifo(tmp_path / "pending" / "other.lock")  # which nobody opens at its other end
    assert call("store", "info", tmp_path, "--json").json["unpublished"] == {"rows": 0, "is_being_written": False}


def test_who_only_looks_whether_a_shard_is_written_keeps_no_one_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`store info` has each shard's lock for a moment; without another try, a pack that begins a shard just then would end."""
    with (tmp_path / "a.lock").open("wb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
        FileLock(tmp_path / "a.lock").release()


@pytest.mark.usefixtures("no_wait")
def test_a_store_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 2})
    make_store(tmp_path, samples)
    refused: tuple[Callable[[], object], ...] = (
        lambda: drop(tmp_path, [samples[0].id]),
        lambda: restore(tmp_path, 0),
        lambda: compact(tmp_path, shard_bytes=1 << 30),
        lambda: repair(tmp_path),
    )
    for run in refused:
        with lock_store(tmp_path), pytest.raises(LockedError, match="is being written by another process"):
            run()
    assert read_manifest(tmp_path).generation == 1


def test_no_id_at_all_and_no_store_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no id to drop"):
        drop(tmp_path, [])
    with pytest.raises(StoreError, match="is not a store"):
        drop(tmp_path, ["a"])
    assert tree(tmp_path) == {}


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
    again = call("store", *asked).fails("(3 of 3 ids given); nothing was dropped")
    assert again.out == ""
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


OTHER = "val/64x96"


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
    leave_pending(store, "left", [make_sample("left.png", BUCKET)])
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
    with (
        untouched(store),
        pytest.raises(StoreError, match=r"has no generation 1: it was removed by `store compact --gc`.*there are 4"),
    ):
        restore(store, 1)


def test_a_generation_that_has_lost_a_file_is_refused_and_nothing_is_adopted(tmp_path: Path) -> None:
    store = changed_store(tmp_path / "s")
    leave_pending(store, "left", [make_sample("left.png", BUCKET)])
    (store / "shards" / "g0.meta").unlink()
    with untouched(store):
        for dry_run in (True, False):
            with pytest.raises(StoreError, match=r"generation 2 of .* cannot be restored: files of 1 shard are gone.*g0.meta"):
                restore(store, 2, dry_run=dry_run)


def test_the_command_says_what_it_did_and_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    store = changed_store(tmp_path / "s")
    with untouched(store):
        assert "would restore generation 1, 9 samples (there were 12)\n" in call("store", "restore", store, 1, "--dry-run").out
        listed = call("store", "restore", store).out.splitlines()
        assert [line.partition(",")[0] for line in listed] == [
            f"generation {number}: {samples}"
            for number, samples in ((4, "12 samples"), (3, "12 samples"), (2, "14 samples"), (1, "9 samples"), (0, "0 samples"))
        ]
        assert listed[0].endswith(", the newest")
    assert "generation 1 restored, 9 samples (there were 12); generation 5\n" in call("store", "restore", store, 1).out
    assert "nothing to restore, generation 5 already has what 1 had" in call("store", "restore", store, 1).out
    report = call("store", "restore", store, 4, "--json").json
    numbers = {"restored": 4, "generation": 6, "samples_before": 9, "samples": 12}
    assert report == {**numbers, "is_changed": True, "dry_run": False}
    listed = call("store", "restore", store, "--json").json["generations"]
    assert [entry["generation"] for entry in listed] == [6, 5, 4, 3, 2, 1, 0]
    assert call("store", "restore", store, 9).code == 1


def expect(store: Path, samples: list[Sample]) -> None:
    opened = Store.open(store)
    IMAGES.expect(opened, samples)
    assert not faults(opened)


@pytest.fixture
def with_gaps(tmp_path: Path) -> list[Sample]:
    """A store `a` with two shards, of which some rows are dropped; give what is live."""
    samples = samples_of({BUCKET: 9, "val/64x64": 3}, "a/")
    more = samples_of({BUCKET: 4}, "a/more/")
    make_store(tmp_path / "a", samples, more)
    gone = [samples[2].id, samples[11].id, more[0].id]
    drop(tmp_path / "a", gone)
    return [sample for sample in (*samples, *more) if sample.id not in gone]


@pytest.fixture
def second(tmp_path: Path) -> list[Sample]:
    samples = samples_of({BUCKET: 5, "train/96x64": 2}, "b/")
    make_store(tmp_path / "b", samples)
    return samples


def test_a_merge_has_all_samples_and_leaves_its_sources(tmp_path: Path, with_gaps: list[Sample], second: list[Sample]) -> None:
    before = tree(tmp_path)
    seen: list[tuple[int, int]] = []
    done = merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"], on_bytes=lambda *at: seen.append(at))
    assert (done.samples, done.shards) == (len(with_gaps) + len(second), 3)
    assert seen[-1] == (done.num_bytes, done.num_bytes)
    expect(tmp_path / "out", [*with_gaps, *second])
    assert {name: data for name, data in tree(tmp_path).items() if not name.startswith("out/")} == before
    assert [bucket.name for bucket in Store.open(tmp_path / "out").buckets()] == [BUCKET, "train/96x64", "val/64x64"]
    manifests = [read_manifest(tmp_path / name) for name in ("out", "a", "b")]
    assert len({manifest.store_id for manifest in manifests}) == 3
    assert manifests[0].generation == 1
    assert [s.shard_id for s in manifests[0].shards] == [s.shard_id for m in manifests[1:] for s in m.shards]
    assert [s.name for s in manifests[0].shards] == ["g0", "g1", f"g0-{manifests[2].shards[0].shard_id[:8]}"]
    assert manifests[0].payload_bytes == sum(manifest.payload_bytes for manifest in manifests[1:])
    for name in ("lmdb", "meta"):
        assert (tmp_path / "out" / "shards" / f"g1.{name}").read_bytes() == (tmp_path / f"a/shards/g1.{name}").read_bytes()


def test_a_merged_store_is_changed_and_merged_again(tmp_path: Path, with_gaps: list[Sample], second: list[Sample]) -> None:
    merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"])
    drop(tmp_path / "out", [with_gaps[0].id])
    compact(tmp_path / "out", shard_bytes=1 << 30, gc_older_than_s=0)
    expect(tmp_path / "out", [*with_gaps[1:], *second])
    with lock_store(tmp_path / "out"):
        assert adopt(tmp_path / "out", read_manifest(tmp_path / "out")) == []
    more = samples_of({BUCKET: 2}, "more/")
    with IMAGES.writer(tmp_path / "out") as writer:
        IMAGES.add(writer, more)
    make_store(tmp_path / "c", samples_of({BUCKET: 1}, "c/"))
    merge(tmp_path / "again", [tmp_path / "c", tmp_path / "out"])
    expect(tmp_path / "again", [*with_gaps[1:], *second, *more, *samples_of({BUCKET: 1}, "c/")])


def test_ids_stay_withdrawn_in_copies_unless_another_store_has_them(tmp_path: Path) -> None:
    a, b = samples_of({BUCKET: 4}, "a/"), samples_of({BUCKET: 4}, "b/")
    make_store(tmp_path / "a", a)
    make_store(tmp_path / "b", [*b, make_sample(a[0].id, BUCKET, version=1)])
    drop(tmp_path / "a", [a[1].id, a[0].id])
    drop(tmp_path / "b", [b[0].id])
    compact(tmp_path / "a", shard_bytes=1 << 30)
    merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"])
    assert read_manifest(tmp_path / "out").withdrawn == (a[1].id, b[0].id)
    restore(tmp_path / "a", 1)
    assert read_manifest(tmp_path / "a").withdrawn == ()
    restore(tmp_path / "a", 2)
    with IMAGES.writer(tmp_path / "a") as writer:
        assert a[1].id in writer
        with pytest.raises(UsageError, match=rf"'{a[1].id}' is withdrawn \(`store drop`\): leave it out, or call take_back"):
            IMAGES.add(writer, [a[1]])
        writer.take_back([a[1].id])
        IMAGES.add(writer, [a[1]])
    assert read_manifest(tmp_path / "a").withdrawn == (a[0].id,)
    expect(tmp_path / "a", [*a[2:], a[1]])


def test_one_store_alone_is_copied_without_its_past(tmp_path: Path, with_gaps: list[Sample]) -> None:
    merge(tmp_path / "out", [tmp_path / "a"])
    expect(tmp_path / "out", with_gaps)
    found = {path.name for path in (tmp_path / "out" / "generations").iterdir()}
    assert found == {"1.json", dropped_list(tmp_path / "out").name}


def test_equal_ids_in_two_stores_are_refused_by_name(tmp_path: Path, with_gaps: list[Sample]) -> None:
    make_store(tmp_path / "b", [make_sample(sample.id, BUCKET, version=1) for sample in with_gaps[:7]])
    expected = (
        r"7 samples are in two stores: '.*' is in .*/a and in .*/b; .*, and 2 more; `store drop` them from one of the stores"
    )
    with untouched(tmp_path), pytest.raises(StoreError, match=expected):
        merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"])


def test_stores_that_were_copied_from_one_another_are_refused_whatever_is_live(tmp_path: Path, with_gaps: list[Sample]) -> None:
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    drop(tmp_path / "b", [sample.id for sample in with_gaps])
    with pytest.raises(StoreError, match=r"/a and .*/b both have the shard g0, as copies of one store do"):
        merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"])


def test_a_shard_without_live_rows_is_left_out(tmp_path: Path) -> None:
    samples, more = samples_of({BUCKET: 3}), samples_of({BUCKET: 2}, "more/")
    make_store(tmp_path / "a", samples, more)
    drop(tmp_path / "a", [sample.id for sample in samples])
    assert merge(tmp_path / "out", [tmp_path / "a"]).shards == 1
    expect(tmp_path / "out", more)


def other_encoder(path: Path) -> None:
    given = contents({"vae": {"scaling_factor": 0.13}, "text_encoder": {"width": 5}})
    rewrite_manifest(path, encoders=given.encoders)


def other_form(path: Path, dtype: str = "F16", **more: Any) -> None:
    shutil.rmtree(path)
    images(dtype).make_store(path, [make_sample("x", BUCKET, dtype=dtype)], **more)


OTHERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "captions": (lambda path: other_form(path, max_captions=2), "max_captions = 3, .*/b with 2"),
    "encoders": (other_encoder, r"encoders.vae.scaling_factor = 0.18215, .*/b with 0.13; only stores with the same settings"),
    "rules": (lambda path: rewrite_manifest(path, rules={"grid": "other"}), "rules.grid = made by hand, .*/b with other"),
    "columns": (lambda path: other_form(path, "F32"), rf"buckets.{BUCKET}.columns.latent.dtype = F16, .*/b with F32"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_stores_not_made_alike_are_refused_by_field(
    case: str, tmp_path: Path, with_gaps: list[Sample], second: list[Sample]
) -> None:
    change, message = OTHERS[case]
    change(tmp_path / "b")
    with untouched(tmp_path), pytest.raises(FingerprintError, match=rf"{tmp_path}/a was made with {message}"):
        merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"])


@pytest.mark.parametrize("change", ["lmdb", "meta", "missing", "truncated", "longer"])
def test_a_damaged_or_missing_file_is_named_and_nothing_left(change: str, tmp_path: Path, with_gaps: list[Sample]) -> None:
    kind = change if change in ("lmdb", "meta") else "lmdb"
    path = tmp_path / "a" / "shards" / f"g1.{kind}"
    data = path.read_bytes()
    if kind == change:
        flip_bit(path, 8 * len(data) // 2)
    elif change == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-100] if change == "truncated" else data + b"more")
    with untouched(tmp_path):
        said = "is missing" if change == "missing" else "" if kind == change else r"has \d+ bytes, the manifest says \d+"
        with pytest.raises(StoreError, match=rf"g1.{kind}.*{said}"):
            merge(tmp_path / "out", [tmp_path / "a"])


def test_places_that_make_no_sense_are_refused(tmp_path: Path, with_gaps: list[Sample], second: list[Sample]) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    (tmp_path / "link").symlink_to(a)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with untouched(tmp_path / "a"):
        cases: list[tuple[Path, list[Path], str]] = [
            (b, [a], "b exists; name a path"),
            (tmp_path / "dangling", [a], "dangling exists"),
            (a / "out", [a, b], "out is inside the store .*/a;"),
            (tmp_path / "link" / "shards" / "out", [b, a], "is inside the store .*/a;"),
            (tmp_path / "out", [a, b, tmp_path / "link"], "link is named twice"),
            (tmp_path / "out", [], "nothing to merge"),
            (tmp_path / "no" / "out", [a], "no is not a folder"),
        ]
        for out, sources, message in cases:
            with pytest.raises(UsageError, match=message):
                merge(out, sources)
        with pytest.raises(StoreError, match="nowhere is not a store"):
            merge(tmp_path / "out", [a, tmp_path / "nowhere"])
    assert not (tmp_path / "out").exists()


def test_a_dry_run_checks_everything_and_writes_nothing(tmp_path: Path, with_gaps: list[Sample], second: list[Sample]) -> None:
    with untouched(tmp_path):
        planned = merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"], dry_run=True)
    assert planned == merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"])


def test_what_a_killed_merge_leaves_is_hidden_and_replaced(
    tmp_path: Path, with_gaps: list[Sample], second: list[Sample]
) -> None:
    before = tree(tmp_path)
    killed_at("store.change.merge._copy_file", 4, lambda: merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"]))
    assert {name.partition("/")[0] for name in set(tree(tmp_path)) - set(before)} == {staging_path(tmp_path / "out").name}
    merge(tmp_path / "out", [tmp_path / "b"])
    expect(tmp_path / "out", second)
    assert {name.partition("/")[0] for name in set(tree(tmp_path)) - set(before)} == {"out"}


def test_ctrl_c_leaves_nothing(tmp_path: Path, with_gaps: list[Sample]) -> None:
    with untouched(tmp_path):

        def interrupt(done: int, total: int) -> None:
            if 2 * done > total:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            merge(tmp_path / "out", [tmp_path / "a"], on_bytes=interrupt)


def test_two_merges_into_one_name_at_once_are_refused(tmp_path: Path, with_gaps: list[Sample]) -> None:
    def another(done: int, total: int) -> None:
        with pytest.raises(LockedError, match=r"/out is being written by another process"):
            merge(tmp_path / "out", [tmp_path / "a"])

    merge(tmp_path / "out", [tmp_path / "a"], on_bytes=another)
    expect(tmp_path / "out", with_gaps)


def test_the_command_reports_what_it_merged(tmp_path: Path, with_gaps: list[Sample], second: list[Sample]) -> None:
    asked = ("merge", tmp_path / "out", tmp_path / "a", tmp_path / "b")
    assert f"would get {len(with_gaps) + len(second)} samples in 3 shards" in call("store", *asked, "--dry-run").out
    ran = call("store", *asked, "--json").done()
    assert (ran.json["samples"], ran.json["shards"]) == (len(with_gaps) + len(second), 3)
    again = call("store", *asked).fails("out exists", code=2)
    assert again.out == ""
