"""Compacting: the same rows in the same order in fewer bytes, or the store as it was."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bucketline.errors import CorruptError, LockedError, StoreError, UsageError
from bucketline.files.disk_space import refuse_too_little_disk
from bucketline.loader.prefetch.readahead import ColdDetector
from bucketline.store import Store, read_manifest
from bucketline.store.change.compact import compact, plan_runs
from bucketline.store.change.drop import drop
from bucketline.store.format.manifest import parse_manifest
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import adopt, changing, lock_store
from tests.commands import call, spawn
from tests.kit import Sample, everything, make_sample, make_store, samples_of, tree
from tests.loading import loaders_of, rows_of

BUCKET = "train/64x64"
ROWS = {BUCKET: 23, "train/96x64": 9, "train/64x128": 1, "val/64x64": 6}
LARGE = 1 << 30


def shards() -> list[list[Sample]]:
    return [samples_of(ROWS, "first/"), samples_of({BUCKET: 12, "val/64x64": 2}, "second/"), samples_of({BUCKET: 4}, "third/")]


def some_of(samples: Sequence[Sequence[Sample]], every: int) -> list[str]:
    return [sample.id for shard in samples for sample in shard[::every]]


def without_locks(path: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree(path).items() if "lock" not in name}


def is_clean(store: Store) -> bool:
    return verify(store, lambda _: None).corrupt == ()


@pytest.mark.parametrize("shard_bytes", [LARGE, 12_000, 4_000])
def test_every_row_keeps_its_number_and_its_bytes(shard_bytes: int, tmp_path: Path) -> None:
    samples = shards()
    make_store(tmp_path, *samples, [make_sample(samples[0][2].id, "train/96x64", ("changed",), version=1)])
    drop(tmp_path, some_of(samples, 5))
    before = Store.open(tmp_path)
    held = everything(before)
    done = compact(tmp_path, shard_bytes=shard_bytes)
    store = Store.open(tmp_path)
    assert everything(store) == held
    assert is_clean(store)
    assert (done.generation, store.manifest.generation) == (before.manifest.generation + 1,) * 2
    assert done.rows == sum(shard.samples for shard in store.manifest.shards if shard.name.startswith("copy-"))
    assert done.dropped == sum(shard.samples for shard in before.manifest.shards) - before.manifest.samples
    assert all(shard.dropped is None for shard in store.manifest.shards)
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
    before = without_locks(tmp_path)
    done = compact(tmp_path, shard_bytes=LARGE)
    assert (done.rewritten, done.written, done.generation) == ((), (), 1)
    assert without_locks(tmp_path) == before


def test_a_dry_run_says_what_a_run_does_and_writes_nothing(tmp_path: Path) -> None:
    samples = shards()
    make_store(tmp_path, *samples)
    drop(tmp_path, some_of(samples, 3))
    before = tree(tmp_path)
    planned = compact(tmp_path, shard_bytes=LARGE, gc_older_than_s=0, dry_run=True)
    assert tree(tmp_path) == before
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


def test_a_loader_that_was_open_keeps_delivering_while_its_shards_are_replaced_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ColdDetector, "is_cold", property(lambda _: False))  # out of the map, which outlasts the files
    samples = shards()
    held = make_store(tmp_path, *samples)
    bucket, rows = held.bucket(BUCKET), np.arange(39)
    loaders = loaders_of(held)

    def read() -> bytes:
        return rows_of(loaders)[BUCKET]["latents"].tobytes()

    before = read()
    assert before == bucket.read(rows, "latent").tobytes()
    drop(tmp_path, some_of(samples, 2))
    assert read() == before
    compact(tmp_path, shard_bytes=LARGE)
    assert read() == before
    assert bucket.sample_ids(rows) == [s.id for shard in samples for s in shard if s.bucket == BUCKET]
    compact(tmp_path, shard_bytes=LARGE, gc_older_than_s=0)
    assert read() == before
    with pytest.raises(StoreError, match=r"shards/g0.lmdb is missing"):
        bucket.read(rows, "latent")
    with pytest.raises(StoreError, match=r"has no generation 3 any more; open the newest one"):
        Store.open(tmp_path, 3)


def damage(store: Store, row: int) -> str:
    """Flip a bit of a row's latent; give its sample's id."""
    bucket = store.bucket(BUCKET)
    (sample_id,) = bucket.sample_ids(np.array([row]))
    located = bucket.locate(np.array([row]))
    path = store.shards[int(located.shard[0])].paths.lmdb
    data = bytearray(path.read_bytes())
    data[int(located.offsets(bucket.spec, "latent")[0]) + 5] ^= 16
    path.write_bytes(data)
    return sample_id


def test_a_damaged_row_is_named_and_nothing_is_published(tmp_path: Path) -> None:
    samples = shards()
    make_store(tmp_path, *samples)
    drop(tmp_path, [samples[0][0].id])
    damage(Store.open(tmp_path), 25)
    before = without_locks(tmp_path)
    expected = rf"sample 'second/{BUCKET}/3.png', row 3 of {BUCKET} in shard g1: its bytes do not match their checksum"
    with pytest.raises(CorruptError, match=expected):
        compact(tmp_path, shard_bytes=LARGE)
    assert without_locks(tmp_path) == before


def test_a_damaged_row_that_was_dropped_is_left_behind(tmp_path: Path) -> None:
    make_store(tmp_path, *shards())
    drop(tmp_path, [damage(Store.open(tmp_path), 25)])
    compact(tmp_path, shard_bytes=LARGE)
    left = verify(Store.open(tmp_path), lambda _: None).corrupt
    assert left
    assert all("generation" in fault.error for fault in left)  # of the older ones, which still list the damaged shard
    compact(tmp_path, shard_bytes=LARGE, gc_older_than_s=0.0)
    assert is_clean(Store.open(tmp_path))


def test_a_damaged_caption_is_named_and_nothing_is_published(tmp_path: Path) -> None:
    samples = shards()
    store = make_store(tmp_path, *samples)
    drop(tmp_path, [samples[0][0].id])
    located = store.locate_captions(np.array([0]), np.array([2]))
    path = store.shards[0].paths.lmdb
    data = bytearray(path.read_bytes())
    starts = located.starts_offsets()
    first = np.frombuffer(data[int(starts[0]) :][:8], dtype="<i8")
    data[int(store.token_offsets(located, "tokens", first)[0])] ^= 1
    path.write_bytes(data)
    before = without_locks(tmp_path)
    with pytest.raises(CorruptError, match=r"shard g0, caption 2: its bytes do not match their checksum"):
        compact(tmp_path, shard_bytes=LARGE)
    assert without_locks(tmp_path) == before


def test_ctrl_c_in_the_middle_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    samples = shards()
    make_store(tmp_path, *samples)
    drop(tmp_path, some_of(samples, 4))
    before = without_locks(tmp_path)
    calls = [0]

    def interrupt(done: int, total: int) -> None:
        assert 0 < done <= total
        calls[0] += 1
        if calls[0] == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compact(tmp_path, shard_bytes=4_000, on_bytes=interrupt)
    assert without_locks(tmp_path) == before


KILLED_AT = """
import os, signal, sys
from pathlib import Path
from bucketline.store.change import compact; from bucketline.store.write import publish, seal, shard_writer
modules = {"compact": compact, "publish": publish, "seal": seal, "shard_writer": shard_writer}
path, moment, count = sys.argv[1:]
module, name = moment.split(".")
call, left = getattr(modules[module], name), [int(count)]
def killed(*args, **kwargs):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return call(*args, **kwargs)
setattr(modules[module], name, killed)
compact.compact(Path(path), shard_bytes=6000)
"""
MOMENTS = {
    "while rows are written": ("shard_writer._put_block", 9),
    "before a shard is sealed": ("seal._write_anew", 1),
    "between its sidecars": ("seal.write_durably", 2),
    "before it is moved": ("seal.move_durably", 2),
    "after all are sealed": ("compact.describe_shard", 1),
    "before they are published": ("publish.write_manifest", 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_a_killed_compact_leaves_is_removed_and_never_adopted(moment: str, tmp_path: Path) -> None:
    """Else a sample that is dropped after it would come back with the copy of its row."""
    samples = shards()
    make_store(tmp_path, *samples)
    drop(tmp_path, some_of(samples, 4))
    before, held = without_locks(tmp_path), everything(Store.open(tmp_path))
    assert spawn([sys.executable, "-c", KILLED_AT, tmp_path, *MOMENTS[moment]]).code == -9
    assert [name for name in tree(tmp_path) if "copy-" in name] != []
    assert everything(Store.open(tmp_path)) == held
    gone = samples[0][1].id
    drop(tmp_path, [gone])
    with changing(tmp_path) as manifest:  # what a pack begins with
        assert adopt(tmp_path, manifest) == []
    store = Store.open(tmp_path)
    held[BUCKET] = [sample for sample in held[BUCKET] if sample.record.id != gone]
    assert everything(store) == held
    after = without_locks(tmp_path)
    assert [name for name in after if "copy-" in name] == []
    assert set(after) - set(before) == {"generations/5.json", "shards/g0.dropped-5"}
    compact(tmp_path, shard_bytes=6_000)
    assert everything(Store.open(tmp_path)) == held


def test_a_copy_that_a_newer_generation_lists_stays_where_an_older_manifest_was_put_back(tmp_path: Path) -> None:
    samples = shards()
    make_store(tmp_path, *samples)
    drop(tmp_path, some_of(samples, 4))
    compact(tmp_path, shard_bytes=LARGE)
    held = everything(Store.open(tmp_path))
    shutil.copy(tmp_path / "generations" / "4.json", tmp_path / "manifest.json")
    drop(tmp_path, [samples[0][1].id])
    assert everything(Store.open(tmp_path, 5)) == held
    assert Store.open(tmp_path).manifest.generation == 6


def test_shards_that_were_written_anew_are_retired_and_never_adopted(tmp_path: Path) -> None:
    samples = shards()
    make_store(tmp_path, *samples)
    drop(tmp_path, some_of(samples, 4))
    compact(tmp_path, shard_bytes=LARGE)
    manifest = read_manifest(tmp_path)
    assert manifest.retired == ("g0", "g1", "g2")
    drop(tmp_path, [samples[0][1].id])
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


def test_a_store_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    make_store(tmp_path, samples_of({BUCKET: 2}), samples_of({BUCKET: 2}, "b/"))
    with lock_store(tmp_path), pytest.raises(LockedError, match="is being written by another process"):
        compact(tmp_path, shard_bytes=LARGE)


def test_what_the_disk_cannot_hold_is_refused_with_both_figures(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match=r"compacting s needs about 1099511627776 MiB in .*, but only \d+ MiB are free; make room"
    ):
        refuse_too_little_disk(tmp_path, 1 << 60, "compacting s")
    refuse_too_little_disk(tmp_path, 1, "compacting s")


def test_a_shard_size_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the shard size is 0 bytes"):
        compact(tmp_path, shard_bytes=0)


def test_the_command_reports_and_says_where_there_is_nothing_to_do(tmp_path: Path) -> None:
    samples = shards()
    make_store(tmp_path, *samples)
    drop(tmp_path, [samples[0][0].id])
    assert (
        "3 shards would be rewritten; 56 rows kept, 1 dropped row left" in call("store", "compact", tmp_path, "--dry-run").out
    )
    ran = call("store", "compact", tmp_path, "--gc", "--older-than", "0s", "--json").done()
    report = ran.json
    assert (report["generation"], report["rewritten"], len(report["written"])) == (5, ["g0", "g1", "g2"], 1)
    assert report["collected"]["generations"] == [0, 1, 2, 3, 4]
    assert [p.name for p in sorted((tmp_path / "shards").glob("*.lmdb"))] == [f"{name}.lmdb" for name in report["written"]]
    again = call("store", "compact", tmp_path)
    assert (again.code, "nothing to compact" in again.out) == (0, True)
    for wrong in (("--shard-size", 0), ("--shard-size-mib", 8), ("--gc", "--older-than", "soon")):
        assert call("store", "compact", tmp_path, *wrong).code == 2
