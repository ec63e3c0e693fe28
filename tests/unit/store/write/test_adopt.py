"""Remains of an interrupted run are taken over, or stay: a pending shard goes once its samples are known to be elsewhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bucketline.errors import LockedError, StoreError
from bucketline.files.locks import FileLock
from bucketline.store import Store
from bucketline.store.change.drop import drop
from bucketline.store.format.manifest import read_manifest, write_manifest
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import adopt, changing, lock_store, publish
from bucketline.store.write.seal import seal
from tests.kit import add, empty_store, flip_bit, make_store, open_writer, samples_of, tree

BUCKET = "train/64x64"
NAMES = ("struct", "json", "lmdb", "numpy", "msgpack", "xxhash", "hashlib", "pathlib", "subprocess", "bucketline")
CODE = "import os, sys; open(os.environ['CANARY'], 'w').close(); sys.exit(0)"


def left_behind(store: Path, name: str = "a", prefix: str = "") -> Path:
    """Leave a pending shard of five samples, as a killed run does."""
    writer = open_writer(store, name)
    for sample in samples_of({BUCKET: 5}, prefix):
        add(writer, sample)
    writer.commit()
    writer.close()
    return store / "pending" / f"{name}.lmdb"


def test_python_files_of_the_current_folder_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unpacked data set may hold a file of any name."""
    store, here = tmp_path / "s", tmp_path / "here"
    manifest = empty_store(store)
    left_behind(store)
    here.mkdir()
    for name in NAMES:
        (here / f"{name}.py").write_text(CODE, encoding="ascii")
    monkeypatch.chdir(here)
    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    with lock_store(store):
        publish(store, manifest, adopt(store, manifest), ())
    assert not (tmp_path / "canary").exists()
    assert Store.open(store).manifest.samples == 5


def test_a_pending_shard_stays_where_the_process_that_seals_did_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = empty_store(tmp_path)
    pending = left_behind(tmp_path)
    data = pending.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", shutil.which("true"))
        with pytest.raises(StoreError, match=r"a\.lmdb is not sealed: .*rerun the command"):
            adopt(tmp_path, manifest)
    assert pending.read_bytes() == data
    assert adopt(tmp_path, manifest) == ["a"]


def test_a_pending_shard_goes_where_a_kill_came_between_moving_and_removing(tmp_path: Path) -> None:
    manifest = empty_store(tmp_path)
    pending = left_behind(tmp_path)
    copy = shutil.copy(pending, tmp_path / "copy")
    assert seal(tmp_path, "a")
    sealed = tree(tmp_path / "shards")
    shutil.move(copy, pending)
    assert adopt(tmp_path, manifest) == ["a"]
    assert not pending.exists()
    assert tree(tmp_path / "shards") == sealed


@pytest.mark.parametrize("kind", ["another shard's", "no LMDB file", "without sidecars"])
def test_a_pending_shard_stays_where_the_sealed_one_of_its_name_is_another(kind: str, tmp_path: Path) -> None:
    manifest = empty_store(tmp_path)
    if kind == "another shard's":
        left_behind(tmp_path, prefix="other/")
        seal(tmp_path, "a")
    pending = left_behind(tmp_path)
    if kind == "no LMDB file":
        (tmp_path / "shards" / "a.lmdb").write_bytes(b"nonsense" * 1024)
    elif kind == "without sidecars":
        shutil.copy(pending, tmp_path / "shards" / "a.lmdb")
    before = tree(tmp_path / "shards")
    with pytest.raises(StoreError, match=r"shards/a\.lmdb .*rename the pending file to a-2\.lmdb"):
        adopt(tmp_path, manifest)
    assert pending.exists()
    assert tree(tmp_path / "shards") == before


def test_what_the_message_about_two_shards_of_one_name_advises_loses_no_row(tmp_path: Path) -> None:
    empty_store(tmp_path)
    left_behind(tmp_path, prefix="other/")
    seal(tmp_path, "a")
    pending = left_behind(tmp_path)
    pending.rename(pending.with_stem("a-2"))
    with changing(tmp_path) as manifest:
        assert manifest.samples == 10
    assert verify(Store.open(tmp_path), lambda _: None).corrupt == ()


@pytest.mark.parametrize("is_damaged", [False, True], ids=["missing", "damaged"])
@pytest.mark.parametrize("kind", ["extents", "index"])
def test_a_sealed_shard_without_a_sound_sidecar_is_sealed_again_where_the_message_says(
    tmp_path: Path, kind: str, *, is_damaged: bool
) -> None:
    empty_store(tmp_path)
    left_behind(tmp_path)
    seal(tmp_path, "a")
    sidecar, sealed, pending = (
        tmp_path / "shards" / f"a.{kind}",
        tmp_path / "shards" / "a.lmdb",
        tmp_path / "pending" / "a.lmdb",
    )
    if is_damaged:
        sidecar.write_bytes(b"nonsense" * 100)
    else:
        sidecar.unlink()
    with pytest.raises(StoreError, match=rf"a\.{kind}.*; move {sealed} to {pending} and rerun"), changing(tmp_path):
        pass
    sealed.rename(pending)
    with changing(tmp_path) as manifest:
        assert manifest.samples == 5


def test_a_sealer_that_outlived_its_command_and_ends_first_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command was killed, and its sealing process takes the shard's lock before the next command's does."""
    manifest = empty_store(tmp_path)
    left_behind(tmp_path)
    run = subprocess.run

    def late(*arguments: Any, **more: Any) -> Any:
        assert run(*arguments, **more).returncode == 0
        return run(*arguments, **more)

    monkeypatch.setattr(subprocess, "run", late)
    assert adopt(tmp_path, manifest) == ["a"]
    assert publish(tmp_path, manifest, ["a"], ()).samples == 5
    assert tree(tmp_path / "pending") == {}


def test_a_sealer_that_is_still_at_work_is_waited_for_by_its_user(tmp_path: Path) -> None:
    manifest = empty_store(tmp_path)
    pending = left_behind(tmp_path)
    with FileLock(pending.with_suffix(".lock")), pytest.raises(LockedError, match="wait until it has finished"):
        adopt(tmp_path, manifest)
    assert adopt(tmp_path, manifest) == ["a"]


@pytest.mark.parametrize("num_bytes", [1, 4096, 8191])
def test_a_file_too_short_for_a_commit_holds_nothing_and_goes(num_bytes: int, tmp_path: Path) -> None:
    manifest = empty_store(tmp_path)
    (tmp_path / "pending" / "a.lmdb").write_bytes(bytes(num_bytes))
    assert adopt(tmp_path, manifest) == []
    assert tree(tmp_path / "pending") == {}


def put_back(store: Path, generation: int) -> None:
    """Put an older manifest in the place of the newest, as a restored backup does."""
    shutil.copy(store / "generations" / f"{generation}.json", store / "manifest.json")


def test_after_an_older_manifest_was_put_back_no_dropped_sample_comes_back(tmp_path: Path) -> None:
    """The next writer continues from the newest generation: a crash between its two documents looks the same."""
    first, second = samples_of({BUCKET: 3}), samples_of({BUCKET: 3}, "more/")
    make_store(tmp_path, first, second)
    drop(tmp_path, [second[0].id, first[0].id])
    expected = sorted(sample.id for sample in (*first[1:], *second[1:]))
    put_back(tmp_path, 1)
    drop(tmp_path, [first[1].id])
    expected.remove(first[1].id)
    store = Store.open(tmp_path)
    assert sorted(store.bucket(BUCKET).sample_ids(np.arange(store.manifest.samples))) == expected
    assert store.manifest.generation == 4
    assert verify(store, lambda _: None).corrupt == ()


def test_a_generation_whose_manifest_a_crash_kept_from_its_place_is_finished(tmp_path: Path) -> None:
    make_store(tmp_path, samples_of({BUCKET: 3}), samples_of({BUCKET: 3}, "more/"))
    put_back(tmp_path, 1)
    with changing(tmp_path) as manifest:
        assert (manifest.generation, manifest.samples) == (2, 6)
    assert (tmp_path / "manifest.json").read_bytes() == (tmp_path / "generations" / "2.json").read_bytes()


def test_a_dry_run_drops_from_what_the_run_itself_would(tmp_path: Path) -> None:
    make_store(tmp_path, samples_of({BUCKET: 3}), samples_of({BUCKET: 3}, "more/"))
    put_back(tmp_path, 1)
    wanted = samples_of({BUCKET: 3}, "more/")[0].id
    assert drop(tmp_path, [wanted], dry_run=True).samples == drop(tmp_path, [wanted]).samples == 5


def test_a_newer_generation_that_is_damaged_stops_what_would_change_the_store(tmp_path: Path) -> None:
    make_store(tmp_path, samples_of({BUCKET: 3}), samples_of({BUCKET: 3}, "more/"))
    put_back(tmp_path, 1)
    flip_bit(tmp_path / "generations" / "2.json", 801)
    before = tree(tmp_path)
    with pytest.raises(StoreError, match=r"2\.json is newer than .*manifest\.json, generation 1, and .*move it elsewhere"):
        drop(tmp_path, [samples_of({BUCKET: 3})[0].id])
    assert {name: data for name, data in tree(tmp_path).items() if name != "pending/writer.lock"} == {
        name: data for name, data in before.items() if name != "pending/writer.lock"
    }


def test_a_generation_of_another_store_is_not_taken_for_the_newest(tmp_path: Path) -> None:
    make_store(tmp_path / "one", samples_of({BUCKET: 3}))
    make_store(tmp_path / "other", samples_of({BUCKET: 3}), samples_of({BUCKET: 3}, "more/"))
    shutil.copy(tmp_path / "other" / "generations" / "2.json", tmp_path / "one" / "generations")
    with pytest.raises(StoreError, match=r"2\.json belongs to another store.*move it elsewhere"):
        drop(tmp_path / "one", [samples_of({BUCKET: 3})[0].id])


def test_a_shard_that_any_generation_lists_is_never_adopted(tmp_path: Path) -> None:
    """Somebody published the older manifest again, and retired nothing of what it left."""
    store = make_store(tmp_path, samples_of({BUCKET: 3}), samples_of({BUCKET: 3}, "more/"))
    older = read_manifest(tmp_path, 1)
    write_manifest(tmp_path, replace(older, generation=3))
    with changing(tmp_path) as manifest:
        assert manifest.samples == 3
        assert adopt(tmp_path, manifest) == []
    assert store.shards[1].paths.lmdb.exists()
