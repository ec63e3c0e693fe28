"""Compacting: the same rows in the same order in fewer bytes. Collecting: what a generation needs or a run may adopt stays."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from bucketline.errors import CorruptError, StoreError, UsageError
from bucketline.files.atomic_write import refuse_too_little_disk
from bucketline.loader.prefetch.ahead import ColdDetector
from bucketline.option_value import Duration
from bucketline.store import Store, read_manifest
from bucketline.store.change import compact as garbage_collect
from bucketline.store.change.commit import drop
from bucketline.store.change.compact import collect, compact, plan_runs
from bucketline.store.format.manifest import Manifest, parse_manifest
from bucketline.store.write.publish import adopt, changing, lock_store
from tests.commands import call
from tests.fault.apart import killed_at
from tests.kit import (
    dropped_list,
    everything,
    faults,
    flip_bit,
    flip_caption,
    flip_row,
    make_sample,
    make_store,
    samples_of,
    tree,
    untouched,
    without_locks,
    write_shard,
)
from tests.loading import loaders_of, rows_of

BUCKET = "train/64x64"
ROWS = {BUCKET: 23, "train/96x64": 9, "train/64x128": 1, "val/64x64": 6}
LARGE = 1 << 30


SHARDS = [samples_of(ROWS, "first/"), samples_of({BUCKET: 12, "val/64x64": 2}, "second/"), samples_of({BUCKET: 4}, "third/")]


def made(path: Path, every: int = 0) -> Store:
    store = make_store(path, *SHARDS)
    if every:
        drop(path, [sample.id for shard in SHARDS for sample in shard[::every]])
    return store


@pytest.mark.parametrize("shard_bytes", [LARGE, 12_000, 4_000])
def test_every_row_keeps_its_number_and_its_bytes(shard_bytes: int, tmp_path: Path) -> None:
    make_store(tmp_path, *SHARDS, [make_sample(SHARDS[0][2].id, "train/96x64", ("changed",), version=1)])
    drop(tmp_path, [sample.id for shard in SHARDS for sample in shard[::5]])
    before = Store.open(tmp_path)
    held = everything(before)
    done = compact(tmp_path, shard_bytes=shard_bytes)
    store = Store.open(tmp_path)
    assert everything(store) == held
    assert not faults(store)
    assert (done.generation, store.manifest.generation) == (before.manifest.generation + 1,) * 2
    assert done.rows == sum(shard.samples for shard in store.manifest.shards if shard.name.startswith("copy-"))
    assert done.dropped == sum(shard.samples for shard in before.manifest.shards) - before.manifest.samples
    assert store.manifest.dropped is None
    assert done.written == tuple(shard.name for shard in store.manifest.shards if shard.name.startswith("copy-"))
    assert done.after_bytes < done.before_bytes or shard_bytes == 4_000
    assert everything(before) == held
    assert everything(Store.open(tmp_path, before.manifest.generation)) == held


def test_small_shards_are_joined_and_large_ones_left(tmp_path: Path) -> None:
    samples = [samples_of({BUCKET: 2}, f"{n}/") for n in range(2)]
    large = samples_of({BUCKET: 60}, "large/")
    more = [samples_of({BUCKET: 2}, f"{n}/") for n in range(2, 5)]
    make_store(tmp_path, *samples, large, *more)
    held = everything(Store.open(tmp_path))
    compact(tmp_path, shard_bytes=40_000)
    store = Store.open(tmp_path)
    assert [shard.samples for shard in store.manifest.shards] == [4, 60, 6]
    assert store.manifest.shards[1].name == "g2"
    assert everything(store) == held


def test_a_small_shard_between_large_ones_is_left(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples_of({BUCKET: 60}, "a/"), samples_of({BUCKET: 1}, "b/"), samples_of({BUCKET: 60}, "c/"))
    assert plan_runs(store.manifest, 40_000) == []


def test_shards_are_rewritten_full_but_for_the_last_and_then_left(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 300})
    make_store(tmp_path, samples)
    drop(tmp_path, [samples[7].id])
    compact(tmp_path, shard_bytes=40_000)
    store = Store.open(tmp_path)
    *full, last = [shard.samples for shard in store.manifest.shards]
    assert len(full) > 1
    assert len(set(full)) == 1 >= last / full[0]
    assert sum(full) + last == 299
    assert all(40_000 <= shard.data_bytes < 80_000 for shard in store.manifest.shards[:-1])
    assert compact(tmp_path, shard_bytes=40_000).rewritten == ()


def test_only_captions_that_live_rows_use_are_kept(tmp_path: Path) -> None:
    samples = [make_sample(f"{n}.png", BUCKET, (f"caption {n}", "shared")) for n in range(6)]
    make_store(tmp_path, samples)
    drop(tmp_path, ["1.png", "4.png"])
    compact(tmp_path, shard_bytes=LARGE)
    store = Store.open(tmp_path)
    assert store.manifest.shards[0].groups["text"].rows == 6  # four of their own, the shared one, the empty one
    assert store.read_caption(0, 0)["tokens"].tobytes() == Store.open(tmp_path, 1).read_caption(0, 0)["tokens"].tobytes()


def test_nothing_to_do_writes_nothing(tmp_path: Path) -> None:
    make_store(tmp_path, samples_of(ROWS))
    with untouched(tmp_path, without_locks):
        done = compact(tmp_path, shard_bytes=LARGE)
        assert (done.rewritten, done.written, done.generation) == ((), (), 1)


def test_a_dry_run_says_what_a_run_does_and_writes_nothing(tmp_path: Path) -> None:
    made(tmp_path, 3)
    with untouched(tmp_path):
        planned = compact(tmp_path, shard_bytes=LARGE, gc_older_than_s=0, dry_run=True)
    done = compact(tmp_path, shard_bytes=LARGE)
    assert (planned.rewritten, planned.rows, planned.dropped) == (done.rewritten, done.rows, done.dropped)
    assert planned.before_bytes == done.before_bytes


def test_a_store_of_which_all_is_dropped_ends_without_shards(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 3})
    make_store(tmp_path, samples)
    drop(tmp_path, [sample.id for sample in samples])
    compact(tmp_path, shard_bytes=LARGE, gc_older_than_s=0)
    assert Store.open(tmp_path).manifest.shards == ()
    assert tree(tmp_path / "shards") == {}


def test_an_open_loader_keeps_delivering_while_its_shards_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ColdDetector, "is_cold", property(lambda _: False))  # out of the map, which outlasts the files
    held = made(tmp_path)
    bucket, rows = held.bucket(BUCKET), np.arange(39)
    loaders = loaders_of(held)

    def read() -> bytes:
        return rows_of(loaders)[BUCKET]["latents"].tobytes()

    before = read()
    assert before == bucket.read(rows, "latent").tobytes()
    drop(tmp_path, [sample.id for shard in SHARDS for sample in shard[::2]])
    assert read() == before
    compact(tmp_path, shard_bytes=LARGE)
    assert read() == before
    assert bucket.sample_ids(rows) == [s.id for shard in SHARDS for s in shard if s.bucket == BUCKET]
    compact(tmp_path, shard_bytes=LARGE, gc_older_than_s=0)
    assert read() == before
    with pytest.raises(StoreError, match=r"shards/g0.lmdb is missing"):
        bucket.read(rows, "latent")
    with pytest.raises(StoreError, match=r"has no generation 3 any more; open the newest one"):
        Store.open(tmp_path, 3)


@pytest.mark.parametrize("kind", ["row", "caption"])
def test_what_is_damaged_is_named_and_nothing_is_published(kind: str, tmp_path: Path) -> None:
    store = made(tmp_path, 99)
    if kind == "row":
        expected = rf"sample '{flip_row(tmp_path, BUCKET, 25)}', row 4 of {BUCKET} in shard g1: its bytes do not match"
    else:
        flip_caption(store, 2)
        expected = "shard g0, caption 2: its bytes do not match their checksum"
    with untouched(tmp_path, without_locks), pytest.raises(CorruptError, match=expected):
        compact(tmp_path, shard_bytes=LARGE)


def test_a_damaged_row_that_was_dropped_is_left_behind(tmp_path: Path) -> None:
    drop(tmp_path, [flip_row(made(tmp_path), BUCKET, 25)])
    compact(tmp_path, shard_bytes=LARGE)
    left = faults(tmp_path)
    assert left
    assert all("generation" in fault.error for fault in left)  # of the older ones, which still list the damaged shard
    compact(tmp_path, shard_bytes=LARGE, gc_older_than_s=0.0)
    assert not faults(tmp_path)


def test_ctrl_c_in_the_middle_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    made(tmp_path, 4)
    with untouched(tmp_path, without_locks):
        calls = [0]

        def interrupt(done: int, total: int) -> None:
            assert 0 < done <= total
            calls[0] += 1
            if calls[0] == 6:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            compact(tmp_path, shard_bytes=4_000, on_bytes=interrupt)


MOMENTS = {
    "while rows are written": ("write.shard_writer._put_block", 9),
    "before a shard is sealed": ("write.seal._put_in_order", 1),
    "before its sidecar is written": ("write.seal.write_durably", 2),
    "before it is moved": ("write.seal.move_durably", 2),
    "after all are sealed": ("change.compact.read_meta", 1),
    "before they are published": ("write.publish.write_manifest", 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_a_killed_compact_leaves_is_removed_and_never_adopted(moment: str, tmp_path: Path) -> None:
    """Else a sample that is dropped after it would come back with the copy of its row."""
    made(tmp_path, 4)
    before, held = without_locks(tmp_path), everything(Store.open(tmp_path))
    function, count = MOMENTS[moment]
    killed_at(f"store.{function}", count, lambda: compact(tmp_path, shard_bytes=6_000))
    assert [name for name in tree(tmp_path) if "copy-" in name] != []
    assert everything(Store.open(tmp_path)) == held
    gone = SHARDS[0][1].id
    drop(tmp_path, [gone])
    with changing(tmp_path) as manifest:  # what a pack begins with
        assert adopt(tmp_path, manifest) == []
    store = Store.open(tmp_path)
    held[BUCKET] = [sample for sample in held[BUCKET] if sample.record.id != gone]
    assert everything(store) == held
    after = without_locks(tmp_path)
    assert [name for name in after if "copy-" in name] == []
    assert set(after) - set(before) == {"generations/5.json", f"generations/{dropped_list(tmp_path).name}"}
    compact(tmp_path, shard_bytes=6_000)
    assert everything(Store.open(tmp_path)) == held


def test_a_copy_that_a_newer_generation_lists_stays_where_an_older_manifest_was_put_back(tmp_path: Path) -> None:
    made(tmp_path, 4)
    compact(tmp_path, shard_bytes=LARGE)
    held = everything(Store.open(tmp_path))
    shutil.copy(tmp_path / "generations" / "4.json", tmp_path / "manifest.json")
    drop(tmp_path, [SHARDS[0][1].id])
    assert everything(Store.open(tmp_path, 5)) == held
    assert Store.open(tmp_path).manifest.generation == 6


def test_shards_that_were_written_anew_are_retired_and_never_adopted(tmp_path: Path) -> None:
    made(tmp_path, 4)
    compact(tmp_path, shard_bytes=LARGE)
    manifest = read_manifest(tmp_path)
    assert manifest.retired == ("g0", "g1", "g2")
    drop(tmp_path, [SHARDS[0][1].id])
    compact(tmp_path, shard_bytes=LARGE)
    manifest = read_manifest(tmp_path)
    assert len(manifest.retired) == 4
    with lock_store(tmp_path):
        assert adopt(tmp_path, manifest) == []
    shutil.rmtree(tmp_path / "generations")
    with lock_store(tmp_path):
        assert adopt(tmp_path, manifest) == []


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "g1"])
def test_a_manifest_that_retires_what_is_no_shard_or_is_listed_is_refused(name: str, tmp_path: Path) -> None:
    manifest = make_store(tmp_path, samples_of({BUCKET: 1}), samples_of({BUCKET: 1}, "b/")).manifest
    data = (tmp_path / "manifest.json").read_bytes()
    assert parse_manifest(data, "m") == manifest
    edited = data.replace(b'"retired":[]', b'"retired":["%s"]' % name.encode())
    with pytest.raises(CorruptError, match="is not the name of a retired shard"):
        parse_manifest(edited, "m")


def test_what_the_disk_cannot_hold_is_refused_with_both_figures(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"s needs about 1099511627776 MiB in .*, but only \d+ MiB are free"):
        refuse_too_little_disk(tmp_path, 1 << 60, "compacting s")
    refuse_too_little_disk(tmp_path, 1, "compacting s")


def test_a_shard_size_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the shard size is 0 bytes"):
        compact(tmp_path, shard_bytes=0)


def test_the_command_reports_and_says_where_there_is_nothing_to_do(tmp_path: Path) -> None:
    made(tmp_path, 99)
    told = call("store", "compact", tmp_path, "--dry-run").out
    assert "3 shards would be rewritten; 54 rows kept, 3 dropped rows left" in told
    ran = call("store", "compact", tmp_path, "--gc", "--older-than", "0s", "--json").done()
    report = ran.json
    assert (report["generation"], report["rewritten"], len(report["written"])) == (5, ["g0", "g1", "g2"], 1)
    assert report["collected"]["generations"] == [0, 1, 2, 3, 4]
    assert [p.name for p in sorted((tmp_path / "shards").glob("*.lmdb"))] == [f"{name}.lmdb" for name in report["written"]]
    again = call("store", "compact", tmp_path)
    assert (again.code, "nothing to compact" in again.out) == (0, True)
    for wrong in (("--shard-size", 0), ("--shard-size-mib", 8), ("--gc", "--older-than", "soon"), ("--older-than", "0s")):
        assert call("store", "compact", tmp_path, *wrong).code == 2


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
    when = time.time() - seconds
    os.utime(path / "generations" / f"{generation}.json", (when, when))


def names(path: Path) -> list[str]:
    return sorted(name for name in tree(path) if not name.endswith("/") and "lock" not in name)


def test_a_generation_goes_when_its_successor_is_old_enough_and_its_files_with_it(tmp_path: Path) -> None:
    changed_store(tmp_path)
    for generation in range(5):
        age(tmp_path, generation, 30 * HOUR_S)
    held = everything(Store.open(tmp_path, 4))
    found = collect(tmp_path, 24 * HOUR_S)
    assert found.generations == (0, 1, 2, 3)  # the fourth was superseded a moment ago
    (name,) = found.files
    assert name.startswith("generations/3-")
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
    assert len(names(tmp_path)) == 6 + 1 + 3 * 2 + 2
    found = collect(tmp_path, 0)
    assert found == wanted
    copy = newest.shards[0].name
    left = ["generations/5.json", "manifest.json", *(f"shards/{copy}.{kind}" for kind in ("lmdb", "meta"))]
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
    assert {"left.lmdb", "left.meta", "notes.txt"} <= {p.name for p in (tmp_path / "shards").iterdir()}
    with lock_store(tmp_path):
        assert adopt(tmp_path, newest) == ["left"]


def test_the_copies_of_an_interrupted_compact_go(tmp_path: Path) -> None:
    make_store(tmp_path, samples_of({BUCKET: 2}))
    write_shard(tmp_path, "copy-000002-0000", samples_of({BUCKET: 2}))
    found = collect(tmp_path, 0)
    assert found.files == tuple(f"copy-000002-0000.{kind}" for kind in ("lmdb", "meta"))  # in the order of removal


@pytest.mark.parametrize(
    "gone", [("shards/g0.lmdb", "shards/g1.lmdb", "shards/g1.meta"), tuple(f"generations/{n}.json" for n in range(5))]
)
def test_a_collection_that_was_cut_off_is_finished_by_the_next(gone: tuple[str, ...], tmp_path: Path) -> None:
    newest = changed_store(tmp_path)
    for name in gone:
        (tmp_path / name).unlink()
    with lock_store(tmp_path):
        assert adopt(tmp_path, newest) == []
    drop(tmp_path, ["second/train/64x64/0.png"])
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
    for run in (
        lambda: collect(tmp_path, HOUR_S),
        lambda: compact(tmp_path, shard_bytes=LARGE, gc_older_than_s=HOUR_S, dry_run=True),
    ):
        with pytest.raises(StoreError, match=r"generations/4.json cannot be read, so .* unknown .*nothing was removed"):
            run()
        assert names(tmp_path) == before
    assert collect(tmp_path, 0).generations == (0, 1, 2, 3, 4)
    assert len(names(tmp_path)) == 4


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("24h", 86400), ("90m", 5400), ("7d", 604800), ("0s", 0), ("1.5h", 5400)),
        *((text, None) for text in ("", "24", "h", "-1h", "1  h", "1w", "1h30m", "nanh", "٣h")),
    ],
)
def test_durations_are_a_number_and_a_unit(text: str, seconds: float | None) -> None:
    if seconds is not None:
        assert Duration.parse(text, "it").seconds == seconds
        return
    with pytest.raises(UsageError, match=r"^it is .*, expected a number and s, m, h or d"):
        Duration.parse(text, "it")


@pytest.mark.parametrize("moment", ["listed_generations", "newest_after", "_unlisted"])
def test_a_dry_run_beside_a_collection_tells_what_was_or_is(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run takes no lock: what it looks at may go, at any moment."""
    changed_store(tmp_path)
    whole, own = collect(tmp_path, 0, dry_run=True), getattr(garbage_collect, moment)

    def late(*arguments: object, **more: object) -> object:
        monkeypatch.undo()
        assert collect(tmp_path, 0) == whole
        return own(*arguments, **more)

    monkeypatch.setattr(garbage_collect, moment, late)
    found = compact(tmp_path, shard_bytes=LARGE, gc_older_than_s=0, dry_run=True).collected
    assert found is not None
    assert found.generations in ((), whole.generations)
    assert set(found.files) <= set(whole.files)


@pytest.mark.usefixtures("no_wait")
def test_the_command_lists_what_it_removes(tmp_path: Path) -> None:
    changed_store(tmp_path)
    asked = ("store", "compact", tmp_path, "--gc", "--older-than", "0s")
    with lock_store(tmp_path):
        assert "5 generations and 6 files would be removed" in call(*asked, "--dry-run").out
        call(*asked).fails("is being written by another process")
    ran = call(*asked)
    assert "5 generations and 6 files removed" in ran.out
    assert "generations/3-" in ran.out
    assert "stay" not in ran.out


def test_the_command_says_what_stays(tmp_path: Path) -> None:
    changed_store(tmp_path)
    superseded = time.time() - 3600
    for path in (tmp_path / "generations").iterdir():
        os.utime(path, (superseded, superseded))
    ran = call("store", "compact", tmp_path, "--gc")
    assert "  nothing removed\n" in ran.out
    assert "  5 generations superseded less than 1d ago are kept, with the files only they use" in ran.out
    assert "`--gc --older-than 0s` removes them now" in ran.out
    ran = call("store", "compact", tmp_path, "--gc", "--older-than", "2h", "--json")
    assert ran.json["collected"]["waiting"] == [0, 1, 2, 3, 4]
    ran = call("store", "compact", tmp_path, "--gc", "--older-than", "30m", "--json")
    assert (ran.json["collected"]["generations"], ran.json["collected"]["waiting"]) == ([0, 1, 2, 3, 4], [])
