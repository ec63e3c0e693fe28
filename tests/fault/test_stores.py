"""A store that is damaged, foreign, newer, out of reach, or that lies with right checksums is named as what it is.

Others in the process continue.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import numpy as np
import pytest

from bucketline.errors import BucketlineError, CorruptError, StoreError
from bucketline.store import Store
from bucketline.store.format.manifest import read_manifest
from bucketline.store.format.text import TEXT_GROUP, caption_checksum
from bucketline.store.shard.sidecar import encode_sidecar
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import changing, lock_store, publish
from tests.commands import call, spawn
from tests.every_reader import everything
from tests.fault.damage import BUCKET, paged, put, replace_file, sound_store, with_row, write_document
from tests.kit import (
    COLUMNS,
    IMAGE_COLUMNS,
    add,
    edit_json,
    flip_bit,
    make_sample,
    make_store,
    open_writer,
    rewrite_manifest,
    samples_of,
)

Document = dict[str, Any]
Lie = Callable[[Path], object]  # what has a store lie
MISSING = r"(is missing|cannot be read: No such file)"
FOREIGN = r"(belongs to another shard|is not the file that the manifest lists: its digest|has the digest)"
NO_FILE = "manifest.json cannot be read: it is a pipe, a device or a folder"
LMDB, META, MANIFEST = "shards/g0.lmdb", "shards/g0.meta", "manifest.json"


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
    *((name, Path.unlink, rf"{Path(name).name} {MISSING}") for name in (LMDB, META)),
    *((name, another, rf"{Path(name).name} {FOREIGN}") for name in (LMDB, META)),
    (LMDB, truncate, r"g0.lmdb has \d+ bytes(, the manifest says| instead of)"),
    (META, truncate, r"g0.meta has \d+ bytes, the manifest says"),
    (LMDB, pipe, "g0.lmdb (cannot be (opened|read): it is a pipe|has 0 bytes instead of)"),
    (META, pipe, "g0.meta cannot be read: it is a pipe"),
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
NO_LOCKS = r"this file system has no advisory locks.*put the store on one that has"


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (f"refuse_locks({errno.ENOLCK})", NO_LOCKS),
        (f"refuse_locks({errno.EOPNOTSUPP})", NO_LOCKS),
        ("obey_permissions()", "cannot be written: Permission denied"),
    ],
)
def test_what_may_not_be_written_or_locked_is_read_verified_and_clear_to_who_writes(
    limit: str, words: str, store: Store
) -> None:
    before = {path: stat.S_IMODE(path.stat().st_mode) for path in [store.path, *store.path.rglob("*")]}
    for path, mode in before.items():
        path.chmod(mode & ~0o222 if limit.startswith("obey") else mode)
    try:
        ran = spawn([sys.executable, "-c", SCRIPT.format(limit=limit), store.path]).done()
    finally:
        for path, mode in before.items():
            path.chmod(mode)
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


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sound_store(tmp_path_factory.mktemp("hostile") / "s", COLUMNS)


@pytest.fixture
def copied(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "s"))


def test_a_shard_that_no_generation_lists_and_whose_sidecar_lies_is_named(copied: Path) -> None:
    tensors, metadata = paged(copied, "meta")
    shutil.copy(copied / "generations" / "0.json", copied / MANIFEST)
    (copied / "shards" / "g0.meta").write_bytes(encode_sidecar(tensors, {**metadata, "buckets": []}))
    with pytest.raises(CorruptError, match=r"g0 holds rows of .* not listed as a bucket; move that shard elsewhere"):
        publish(copied, read_manifest(copied), ["g0"], ())


def in_manifest(change: Callable[[Document], object]) -> Lie:
    def lie(store: Path) -> None:
        document = json.loads((store / MANIFEST).read_bytes())
        change(document)
        write_document(store, document)

    return lie


def in_bucket(change: Callable[[Document], object]) -> Lie:
    return in_manifest(lambda d: change(next(entry for entry in d["buckets"] if entry["name"] == BUCKET)))


def of_column(name: str, **changes: object) -> Lie:
    return in_bucket(lambda own: own["columns"][name].update(changes))


def in_lines(change: Callable[[Any], Any] = lambda own: own, **changes: object) -> Lie:
    """Change the checksums of lines, or what the sidecar says of the lines."""

    def lie(store: Path) -> None:
        tensors, metadata = paged(store, "meta")
        changed = [(name, dtype, change(values) if name == "line_checksum" else values) for name, dtype, values in tensors]
        given = [(name, dtype, values) for name, dtype, values in changed if values is not None]
        replace_file(store, "meta", encode_sidecar(given, {**metadata, **changes}))

    return lie


def in_row(changes: dict[str, bytes]) -> Lie:
    return lambda store: replace_file(store, "lmdb", with_row(store, changes))


def in_caption(name: str, value: bytes) -> Lie:
    """Put other bytes at the beginning of a caption's column, its checksum made right."""

    def lie(store: Path) -> None:
        opened = Store.open(store)
        shard, data = opened.shards[0], bytearray(opened.shards[0].paths.lmdb.read_bytes())
        before = opened.caption(0, 1)
        place = shard.block_ranges(TEXT_GROUP, np.array([1]))
        block = slice(int(place.offset[0]), int(place.offset[0]) + int(place.length[0]))
        body, after = bytes(data[block]), copy.deepcopy(before)
        columns = after.tokens if name in after.tokens else after.fixed
        columns[name] = value + columns[name][len(value) :]
        old, new = ({**caption.tokens, **caption.fixed}[name] for caption in (before, after))
        sums = [caption_checksum(opened.text, caption).to_bytes(8, "little") for caption in (before, after)]
        assert body.count(old) == body.count(sums[0]) == 1
        data[block] = body.replace(old, new).replace(sums[0], sums[1])
        replace_file(store, "lmdb", bytes(data))

    return lie


def scale(value: float) -> bytes:
    return np.array([value], dtype="<f2").tobytes()


NOT_OF_ONE = "does not have the checksums of the 1 lines"
STRANGE = "the caption's quantised tokens, or their scales, are beyond what can be stored"
FIRST = rf"{BUCKET}/0\.png: .*"
DEPTH = {"present/control/depth": b"\1", "present/control/depth/flipped": b"\0", "control/depth/flipped": bytes(128)}
LIES: dict[str, tuple[Lie, str]] = {
    "axes in another order": (in_bucket(lambda own: own["axes"].reverse()), "its metadata is .*'axes': 'width_px,height_px'"),
    "an axis of another name": (in_bucket(lambda own: own["axes"][0].update(name="frames")), "'axes': 'frames,width_px'"),
    "a presence of two bytes": (of_column("present/mask", dtype="U16"), "'present/mask' in another form"),
    "a presence with a role": (
        in_manifest(lambda d: d["columns"].update({"present/mask": d["columns"]["mask"]})),
        "'present/mask' has the role 'mask'",
    ),
    "a mirror image of another size": (
        of_column("latent_flipped", shape=[2, 4, 16]),
        "'latent_flipped' in another form than 'latent'",
    ),
    "a target of other values": (of_column("audio", dtype="I32"), "its header is not that of a block"),
    "a scale less": (
        in_manifest(lambda d: d["text"]["tokens"]["tokens_scale"].update(shape=[1])),
        "tokens_scale takes tokens of I8",
    ),
    "an error of no captions": (in_manifest(lambda d: d["text_error"].update(captions=0)), "the tokens of 0 captions"),
    "no sums of lines": (in_lines(lambda _: None), "lacks the tensor 'line_checksum'"),
    "a sum more": (in_lines(lambda own: np.concatenate([own, own])), NOT_OF_ONE),
    "a sum less": (in_lines(lambda own: own[:-1]), NOT_OF_ONE),
    "another sum": (in_lines(lambda own: own ^ 1), "bytes 0 to 8388608 do not match the checksum of their line"),
    "sums of other lines": (in_lines(line_bytes=4096), NOT_OF_ONE),
    "sums of no lines": (in_lines(line_bytes=0), NOT_OF_ONE),
    "sums of words": (in_lines(line_bytes="x"), NOT_OF_ONE),
    "a row that is there twice": (in_row({"present/mask": b"\2"}), FIRST + "present/mask is 2, expected 0 or 1"),
    "a row that is not there": (
        in_row({"present/mask": b"\0", "mask": b"\7" * 4096}),
        FIRST + "present/mask is 0, and its mask is not all zeros",
    ),
    "a row without its mirror image": (
        in_row(DEPTH),
        FIRST + "present/control/depth is 1, and its present/control/depth/flipped 0",
    ),
    "tokens beyond their range": (in_caption("tokens", b"\x80"), STRANGE),
    **{f"a scale of {one}": (in_caption("tokens_scale", scale(one)), STRANGE) for one in (np.nan, np.inf, -1, 516)},
}


@pytest.mark.parametrize("case", LIES)
def test_a_lie_with_right_checksums_is_named(case: str, copied: Path) -> None:
    lie, words = LIES[case]
    lie(copied)
    expect_named(copied, words)


def left_pending(store: Path) -> None:
    """Have the first shard be what a killed writer left in a store that was just made."""
    shutil.copy(store / "generations" / "0.json", store / MANIFEST)
    (store / "shards" / "g0.lmdb").rename(store / "pending" / "g0.lmdb")
    for path in [*(store / "generations").glob("[1-9].json"), *(store / "shards").iterdir()]:
        path.unlink()


def test_a_pending_shard_with_an_impossible_error_of_its_text_is_not_adopted(copied: Path) -> None:
    left_pending(copied)
    with lmdb.open(str(copied / "pending" / "g0.lmdb"), subdir=False, lock=False) as env, env.begin(write=True) as txn:
        meta = msgpack.unpackb(txn.get(b"meta"))
        txn.put(b"meta", msgpack.packb({**meta, "text_error": {**meta["text_error"], "cosine_min": 7.0}}))
    words = r"g0\.lmdb, left by an interrupted run, cannot be sealed: shard g0: the value of b'meta' is damaged"
    with pytest.raises(CorruptError, match=words), changing(copied):
        pass
    assert (copied / "pending" / "g0.lmdb").exists()


def test_a_pending_shard_with_a_scale_that_is_nan_is_found_once_it_is_adopted(copied: Path) -> None:
    in_caption("tokens_scale", scale(np.nan))(copied)
    left_pending(copied)
    with changing(copied) as manifest:
        assert [shard.name for shard in manifest.shards] == ["g0"]
    expect_named(copied, STRANGE)


def expect_named(store: Path, words: str) -> None:
    """Opening or `verify` says so; and what plain readers and loaders make of it is an answer, or an error of ours."""
    with suppress(BucketlineError):
        everything(Store.open(store))
    try:
        said = [f"{fault.sample}: {fault.error}" for fault in verify(Store.open(store), lambda _: None, 1).corrupt]
    except BucketlineError as error:
        said = [str(error)]
    assert any(re.search(words, line) for line in said), said


def test_the_store_is_sound_before_anything_lies(sound: Path) -> None:
    store = Store.open(sound)
    assert not verify(store, lambda _: None, 1).corrupt
    assert store.manifest.columns.keys() == {column.name for column in IMAGE_COLUMNS}
    assert store.text.is_quantised
