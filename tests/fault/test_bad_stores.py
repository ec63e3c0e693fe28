"""A store that is damaged, foreign, newer or out of reach is named as what it is, and others in the process continue."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bucketline.errors import StoreError
from bucketline.store import Store
from bucketline.store.write.publish import lock_store
from tests.commands import call, spawn
from tests.every_reader import everything
from tests.kit import add, edit_json, flip_bit, make_sample, make_store, open_writer, samples_of

BUCKET = "train/64x64"


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def other_store(store: Path, kind: str) -> None:
    theirs = make_store(store.parent / "theirs", samples_of({BUCKET: 9}))  # of the same length
    shutil.copy(theirs.path / "shards" / f"g0.{kind}", store / "shards" / f"g0.{kind}")


def lie_about_size(store: Path) -> None:
    """Let the first block's header claim 64 bytes more than it has."""
    shard = Store.open(store).shards[0]
    at = int(shard.block_ranges(BUCKET, np.array([0])).offset[0])
    data = bytearray(shard.paths.lmdb.read_bytes())
    data[at : at + 8] = (int.from_bytes(data[at : at + 8], "little") + 64).to_bytes(8, "little")
    shard.paths.lmdb.write_bytes(data)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "newer": (
        lambda s: edit_json(s / "manifest.json", format_version=6),
        "has format version 6, expected 1",
    ),
    "edited": (lambda s: edit_json(s / "manifest.json", max_captions=9), "manifest.json is damaged"),
    "edited digest": (lambda s: edit_json(s / "manifest.json", rules={}), "damaged or was edited by hand: its digest is"),
    "no shard": (lambda s: (s / "shards/g0.lmdb").unlink(), r"g0.lmdb (is missing|cannot be read: No such file)"),
    "no extents": (lambda s: (s / "shards/g0.extents").unlink(), r"g0.extents (is missing|cannot be read: No such file)"),
    "no index": (lambda s: (s / "shards/g0.index").unlink(), r"g0.index (is missing|cannot be read: No such file)"),
    "truncated": (lambda s: truncate(s / "shards/g0.lmdb"), r"g0.lmdb has \d+ bytes(, the manifest says| instead of)"),
    "truncated extents": (lambda s: truncate(s / "shards/g0.extents"), r"g0.extents has \d+ bytes, the manifest says"),
    "another's shard": (lambda s: other_store(s, "lmdb"), r"g0.lmdb (belongs to another shard|has the digest)"),
    "another's extents": (lambda s: other_store(s, "extents"), r"g0.extents (belongs to another shard|has the digest)"),
    "another's index": (lambda s: other_store(s, "index"), r"g0.index (belongs to another shard|has the digest)"),
    "a pipe": (lambda s: pipe(s / "shards/g0.lmdb"), "g0.lmdb (cannot be (opened|read): it is a pipe|has 0 bytes instead of)"),
    "a pipe for extents": (
        lambda s: pipe(s / "shards/g0.extents"),
        "g0.extents cannot be read: it is a pipe",
    ),
    "a pipe for a manifest": (
        lambda s: pipe(s / "manifest.json"),
        "manifest.json cannot be read: it is a pipe, a device or a folder",
    ),
    "a folder for a manifest": (
        lambda s: folder(s / "manifest.json"),
        "manifest.json cannot be read: it is a pipe, a device or a folder",
    ),
    "a folder for a shard": (lambda s: folder(s / "shards/g0.lmdb"), "g0.lmdb"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_store_is_named_by_readers_and_by_verify_and_leaves_others_alone(name: str, tmp_path: Path) -> None:
    sound = make_store(tmp_path / "sound", samples_of({BUCKET: 9}))
    expected = everything(sound)
    shutil.copytree(sound.path, tmp_path / "bad")
    damage, message = BAD[name]
    damage(tmp_path / "bad")
    with pytest.raises(StoreError, match=message):
        everything(Store.open(tmp_path / "bad"))
    told = call("store", "verify", tmp_path / "bad")
    assert told.code == 1
    assert "Traceback" not in told.err
    assert re.search(message, told.out + told.err), told.out + told.err
    assert everything(sound) == everything(Store.open(sound.path)) == expected


def test_a_block_whose_header_lies_about_its_size_is_named_by_its_place(tmp_path: Path) -> None:
    make_store(tmp_path / "s", samples_of({BUCKET: 9}))
    lie_about_size(tmp_path / "s")
    found = call("store", "verify", tmp_path / "s", "--json").json["corrupt"]
    assert [(fault["bucket"], fault["block"]) for fault in found] == [(None, None), (BUCKET, 0)]
    assert "its header" in found[1]["error"]


def test_a_path_that_is_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="ascii")
    for command in ("info", "verify"):
        told = call("store", command, tmp_path / "file")
        assert (told.code, "is not a store: it is a file; name a store's folder" in told.err) == (1, True)


def test_damage_to_samples_with_long_or_odd_ids_is_named_by_them(tmp_path: Path) -> None:
    ids = ["x" * 10_240, "new\nline", os.fsdecode(b"\xe9\xff.png"), "\0", "日本語", "%s{0}"]
    store = make_store(tmp_path / "s", [make_sample(name, BUCKET) for name in ids])
    bucket = store.bucket(BUCKET)
    for offset in bucket.locate(np.arange(len(ids))).offsets(bucket.spec, "latent"):
        flip_bit(store.shards[0].paths.lmdb, 8 * int(offset))
    ran = call("store", "verify", store.path, "--json")
    assert [fault["sample"] for fault in ran.json["corrupt"] if fault["row"] is not None] == ids
    plain = spawn([sys.executable, "-m", "bucketline.store.cli", "verify", store.path], PYTHONIOENCODING="ascii:strict")
    assert plain.code == 1
    assert f"{len(ids) + 1} faults" in plain.out
    assert "Traceback" not in plain.err


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_by_writers_and_none_of_readers_concern(error: int, tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", samples_of({BUCKET: 9}))
    script = f"""
from pathlib import Path
from tests.constrained import refuse_locks
from tests.every_reader import everything
from tests.kit import open_writer
from bucketline.errors import StoreError
from bucketline.store import Store
from bucketline.store.write.publish import lock_store
refuse_locks({error})
store = Path({str(store.path)!r})
print(len(everything(Store.open(store))))
for take in (lambda: lock_store(store), lambda: open_writer(store, "new")):
    try:
        take()
    except StoreError as error:
        print(error)
"""
    ran = spawn([sys.executable, "-c", script]).done()
    read, *refused = ran.out.splitlines()
    assert int(read) == len(everything(store))
    assert len(refused) == 2
    for line in refused:
        assert "this file system has no advisory locks" in line
        assert "put the store on one that has" in line
    assert not list((store.path / "pending").glob("new.lmdb"))


def test_a_store_that_may_not_be_written_is_read_verified_and_clear_to_who_writes(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", samples_of({BUCKET: 9}))
    script = f"""
import json, sys
from pathlib import Path
from tests.commands import call
from tests.constrained import obey_permissions
from tests.every_reader import everything
from tests.kit import open_writer
from bucketline.errors import StoreError
from bucketline.store import Store
from bucketline.store.write.publish import lock_store
obey_permissions()
store = Path({str(store.path)!r})
said = []
for take in (lambda: lock_store(store), lambda: open_writer(store, "new")):
    try:
        take()
    except StoreError as error:
        said.append(str(error))
print(json.dumps([len(everything(Store.open(store))), call("store", "verify", store).code, said]))
"""
    before = {path: path.stat().st_mode for path in [store.path, *store.path.rglob("*")]}
    for path, mode in before.items():
        path.chmod(mode & ~0o222)
    try:
        ran = spawn([sys.executable, "-c", script])
    finally:
        for path, mode in before.items():
            path.chmod(stat.S_IMODE(mode))
    assert ran.code == 0, ran.err
    read, verified, said = json.loads(ran.out)
    assert (read, verified) == (len(everything(store)), 0)
    assert len(said) == 2
    assert all("cannot be written: Permission denied" in line for line in said)


def test_reading_goes_on_while_a_writer_holds_its_locks_and_sees_no_half_state(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", samples_of({BUCKET: 9}))
    expected = everything(store)
    with lock_store(store.path):
        writer = open_writer(store.path, "next")
        add(writer, make_sample("new.png", BUCKET))
        writer.commit()
        assert everything(Store.open(store.path)) == expected
        told = call("store", "verify", store.path, "--json").done()
        assert [stray["path"] for stray in told.json["strays"]] == ["pending/next.lmdb"]
        writer.close()
