"""A store that is damaged, foreign, newer or out of reach is named as what it is, and others in the process continue."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bucketline.errors import StoreError
from bucketline.store import Store
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import lock_store
from tests.commands import call, spawn
from tests.every_reader import everything
from tests.fault.damage import put
from tests.kit import add, edit_json, flip_bit, make_sample, make_store, open_writer, rewrite_manifest, samples_of

BUCKET = "train/64x64"
MISSING = r"(is missing|cannot be read: No such file)"
FOREIGN = r"(belongs to another shard|has the digest)"
NO_FILE = "manifest.json cannot be read: it is a pipe, a device or a folder"
LMDB, EXTENTS, INDEX, MANIFEST = "shards/g0.lmdb", "shards/g0.extents", "shards/g0.index", "manifest.json"


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def another(path: Path) -> None:
    theirs = make_store(path.parents[2] / "theirs", samples_of({BUCKET: 9}))  # of the same length
    shutil.copy(theirs.path / "shards" / path.name, path)


def instead(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


pipe, folder = partial(instead, make=os.mkfifo), partial(instead, make=Path.mkdir)
BAD: tuple[tuple[str, Callable[[Path], None], str], ...] = (
    (MANIFEST, partial(edit_json, format_version=6), "has format version 6, expected 1"),
    (MANIFEST, partial(edit_json, max_captions=9), "manifest.json is damaged"),
    (MANIFEST, partial(edit_json, rules={}), "damaged or was edited by hand: its digest is"),
    (MANIFEST, pipe, NO_FILE),
    (MANIFEST, folder, NO_FILE),
    *((name, Path.unlink, rf"{Path(name).name} {MISSING}") for name in (LMDB, EXTENTS, INDEX)),
    *((name, another, rf"{Path(name).name} {FOREIGN}") for name in (LMDB, EXTENTS, INDEX)),
    (LMDB, truncate, r"g0.lmdb has \d+ bytes(, the manifest says| instead of)"),
    (EXTENTS, truncate, r"g0.extents has \d+ bytes, the manifest says"),
    (LMDB, pipe, "g0.lmdb (cannot be (opened|read): it is a pipe|has 0 bytes instead of)"),
    (EXTENTS, pipe, "g0.extents cannot be read: it is a pipe"),
    (LMDB, folder, "g0.lmdb"),
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path / "s", samples_of({BUCKET: 9}))


@pytest.mark.parametrize(("name", "damage", "message"), BAD)
def test_a_bad_store_is_named_by_readers_and_by_verify_and_leaves_others_alone(
    name: str, damage: Callable[[Path], None], message: str, store: Store, tmp_path: Path
) -> None:
    expected = everything(store)
    bad = tmp_path / "bad"
    shutil.copytree(store.path, bad)
    damage(bad / name)
    with pytest.raises(StoreError, match=message):
        everything(Store.open(bad))
    told = call("store", "verify", bad)
    assert told.code == 1
    assert "Traceback" not in told.err
    assert re.search(message, told.out + told.err), told.out + told.err
    assert everything(store) == everything(Store.open(store.path)) == expected


def test_a_flip_that_only_changes_how_a_number_is_spelt_is_found(store: Store) -> None:
    """1e-05 and 1E-05 are one number: such a manifest has the right digest."""
    path = store.path / MANIFEST
    rewrite_manifest(store.path, rules={"val_fraction": 1e-05})
    flip_bit(path, 8 * path.read_bytes().index(b"1e-05") + 8 + 5)
    assert b"1E-05" in path.read_bytes()
    (fault,) = verify(Store.open(store.path), lambda _: None).corrupt
    assert "manifest.json differs in its bytes from what was written, though its content is the same" in fault.error


def test_a_block_whose_header_lies_about_its_size_is_named_by_its_place(store: Store) -> None:
    shard = store.shards[0]
    at, data = int(shard.block_ranges(BUCKET, np.array([0])).offset[0]), shard.paths.lmdb.read_bytes()
    claimed = int.from_bytes(data[at : at + 8], "little") + 64
    shard.paths.lmdb.write_bytes(put(data, at, claimed.to_bytes(8, "little")))
    found = call("store", "verify", store.path, "--json").json["corrupt"]
    assert [(fault["bucket"], fault["block"]) for fault in found] == [(None, None), (BUCKET, 0)]
    assert "its header" in found[1]["error"]


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


SCRIPT = """
import json, sys
from pathlib import Path
from tests import constrained
from tests.commands import call
from tests.every_reader import everything
from tests.kit import open_writer
from bucketline.errors import StoreError
from bucketline.store import Store
from bucketline.store.write.publish import lock_store
constrained.{limit}
store, said = Path(sys.argv[1]), []
for take in (lambda: lock_store(store), lambda: open_writer(store, "new")):
    try:
        take()
    except StoreError as error:
        said.append(str(error))
print(json.dumps({{"read": len(everything(Store.open(store))), "verified": call("store", "verify", store).code, "said": said}}))
"""


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (f"refuse_locks({errno.ENOLCK})", r"this file system has no advisory locks.*put the store on one that has"),
        (f"refuse_locks({errno.EOPNOTSUPP})", r"this file system has no advisory locks.*put the store on one that has"),
        ("obey_permissions()", "cannot be written: Permission denied"),
    ],
)
def test_what_may_not_be_written_or_locked_is_read_verified_and_clear_to_who_writes(
    limit: str, words: str, store: Store
) -> None:
    before = {path: path.stat().st_mode for path in [store.path, *store.path.rglob("*")]}
    for path, mode in before.items():
        path.chmod(mode & ~0o222 if limit.startswith("obey") else stat.S_IMODE(mode))
    try:
        ran = spawn([sys.executable, "-c", SCRIPT.format(limit=limit), store.path]).done()
    finally:
        for path, mode in before.items():
            path.chmod(stat.S_IMODE(mode))
    assert (ran.json["read"], ran.json["verified"]) == (len(everything(store)), 0)
    assert [bool(re.search(words, line)) for line in ran.json["said"]] == [True, True], ran.out
    assert not list((store.path / "pending").glob("new.lmdb"))


def test_reading_goes_on_while_a_writer_holds_its_locks_and_sees_no_half_state(store: Store) -> None:
    expected = everything(store)
    with lock_store(store.path):
        writer = open_writer(store.path, "next")
        add(writer, make_sample("new.png", BUCKET))
        writer.commit()
        assert everything(Store.open(store.path)) == expected
        told = call("store", "verify", store.path, "--json").done()
        assert [stray["path"] for stray in told.json["strays"]] == ["pending/next.lmdb"]
        writer.close()
