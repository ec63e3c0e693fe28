"""Defects that an adversarial reading of the first version found, each held by a test.

Disks that fail half-way, and power that fails: an error of ours, and nothing that was committed is missing.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import tracemalloc
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lmdb
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file

from bucketline.errors import CorruptError, LockedError, ModelError, StoreError
from bucketline.files.atomic_write import FileLock
from bucketline.files.paths import open_regular
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.text_columns import TextSettings
from bucketline.ingest.encoders.text_encoders import TextEncoder
from bucketline.ingest.images.crop import Framing, parse_grid
from bucketline.ingest.images.decode import decode_image
from bucketline.store import Store
from bucketline.store.format.manifest import MANIFEST
from bucketline.store.verify.verify import verify
from bucketline.store.write import publish as publish_module
from bucketline.store.write import shard_writer
from bucketline.store.write.publish import prepare_store
from bucketline.store.write.seal import seal
from bucketline.store.write.shard_writer import ShardWriter
from tests.commands import call
from tests.fault.shim import Change, Disk
from tests.kit import (
    TEXT,
    add,
    contents,
    empty_store,
    flip_bit,
    make_sample,
    make_store,
    open_writer,
    samples_of,
)
from tests.models import SMALL, encoded, png, write_model

BUCKET = "train/64x64"


def pack(source: Path, store: Path, model: Path) -> list[object]:
    return ["pack", source, store, "--model", model, *SMALL, "--json"]


def test_packing_after_an_older_manifest_was_put_back_destroys_nothing(source: Path, tmp_path: Path, model: Path) -> None:
    store = tmp_path / "s"
    for n in range(3):
        (source / f"new{n}.png").write_bytes(png(30, 30, seed=n))
        assert call("ingest", *pack(source, store, model)).code == 0
    before = {path.name: path.read_bytes() for path in (store / "generations").iterdir()}
    shutil.copy(store / "generations" / "1.json", store / MANIFEST)
    (source / "late.png").write_bytes(png(30, 30, seed=9))
    assert call("ingest", *pack(source, store, model)).code == 0
    assert {name: (store / "generations" / name).read_bytes() for name in before} == before
    assert Store.open(store).manifest.samples == 14 + 4
    for generation in (2, 3, None):
        assert Store.open(store, generation).manifest.samples
    assert call("store", "verify", store).code == 0


def test_a_lost_manifest_is_named_with_what_to_do_and_put_back_by_the_next_pack(
    source: Path, tmp_path: Path, model: Path
) -> None:
    store = tmp_path / "s"
    assert call("ingest", *pack(source, store, model)).code == 0
    (store / MANIFEST).unlink()
    call("store", "info", store).fails("has lost its manifest.json; copy")
    again = call("ingest", *pack(source, store, model))
    assert (again.json["unchanged"], call("store", "verify", store).code) == (14, 0)


def test_a_sealed_shard_is_never_replaced(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples_of({BUCKET: 2}))
    name = store.shards[0].name
    before = store.shards[0].paths.lmdb.read_bytes()
    writer = open_writer(tmp_path, name)
    add(writer, make_sample("other", BUCKET))
    writer.commit()
    writer.close()
    with pytest.raises(Exception, match="a sealed shard never changes"):
        seal(tmp_path, name)
    assert store.shards[0].paths.lmdb.read_bytes() == before


def test_a_damaged_digest_in_an_index_is_an_error_and_never_a_sample_that_is_not_there(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples_of({BUCKET: 40}))
    index = store.shards[0].index
    path = store.shards[0].paths.meta
    data = path.read_bytes()
    ids = store.bucket(BUCKET).sample_ids(np.arange(40))
    at = len(data) - index.nbytes
    for row in (0, 7, 20, 39):
        flip_bit(path, 8 * (at + index.itemsize * row) + 6)
        fresh = Store.open(tmp_path)
        with pytest.raises(CorruptError):
            [fresh.sample(sample_id) for sample_id in ids]
        flip_bit(path, 8 * (at + index.itemsize * row) + 6)


def test_incomplete_blocks_that_wait_do_not_make_every_sample_a_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty_store(tmp_path)
    buckets = [f"train/{64 + 8 * n}x64" for n in range(20)]
    row_bytes = samples_of({buckets[0]: 1})[0].latent.nbytes + 60
    monkeypatch.setattr(shard_writer, "COMMIT_BYTES", 10 * row_bytes)
    written: list[int] = []
    write = ShardWriter._write

    def counted(self: ShardWriter, chosen: list[Any]) -> None:
        written.append(len(chosen))
        write(self, chosen)

    monkeypatch.setattr(ShardWriter, "_write", counted)
    writer = open_writer(tmp_path, "a")
    for n in range(200):
        add(writer, make_sample(f"{n}.png", buckets[n % 20]))
    assert len(written) == 0  # no block is whole yet
    writer.commit()
    writer.close()
    assert written == [20]


def test_a_store_lets_go_of_a_shard_only_when_it_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_store(tmp_path)
    writer = open_writer(tmp_path, "a")
    add(writer, make_sample("a.png", BUCKET))

    def while_sealing(store: Path, name: str) -> bool:
        with pytest.raises(LockedError):
            FileLock(store / "pending" / f"{name}.lock")
        return seal(store, name)

    monkeypatch.setattr(shard_writer, "seal", while_sealing)
    assert writer.seal()
    assert not list((tmp_path / "pending").glob("a.*"))


def test_what_a_crash_leaves_before_the_first_commit_is_swept_away(source: Path, tmp_path: Path, model: Path) -> None:
    store = tmp_path / "s"
    (store / "pending").mkdir(parents=True)
    (store / "pending" / "g1-r0.lmdb").write_bytes(b"")
    (store / f"{MANIFEST}.0123abcd.tmp").write_bytes(b"{")
    call("ingest", *pack(source, store, model)).done()
    assert not [path for path in store.rglob("*") if path.suffix == ".tmp" or path.name == "g1-r0.lmdb"]


def test_a_text_encoder_that_lacks_weights_is_refused_and_not_filled_at_random(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    path = model / "text_encoder" / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if "layer.0" in name)
    save_file({other: values for other, values in weights.items() if other != name}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"is incomplete: 1 of its weights are missing"):
        TextEncoder(open_model(str(model)), torch.device("cpu"), TextSettings())


def test_another_tokenizer_is_another_encoder(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    before = TextEncoder(open_model(str(model)), torch.device("cpu"), TextSettings()).provenance
    path = model / "tokenizer" / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"cat"', '"???"').replace('"dog"', '"cat"').replace('"???"', '"dog"'), encoding="utf-8")
    after = TextEncoder(open_model(str(model)), torch.device("cpu"), TextSettings()).provenance
    assert {name for name in before if before[name] != after[name]} == {"tokenizer_hash"}


def test_a_very_long_image_is_not_enlarged_beyond_its_bucket() -> None:
    data = encoded(Image.new("L", (60_000, 64), 90), "PNG")
    tracemalloc.start()
    try:
        pixels, placement = decode_image(data, Framing(grid=parse_grid("square:512", step_px=64, align_px=8)), "a.png")
    finally:
        tracemalloc.stop()
    assert pixels.shape == (512, 512, 3)
    assert placement.resized == (512, 480_000)


def test_a_writer_that_cannot_begin_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_store(tmp_path)
    assert contents().text.spec() == TEXT

    monkeypatch.setattr(lmdb, "open", Mock(side_effect=lmdb.Error("no space")))
    with pytest.raises(StoreError, match=r"cannot create .*a\.lmdb: no space"):
        open_writer(tmp_path, "a")
    assert not list((tmp_path / "pending").glob("a*"))


def refuse(number: int) -> Mock:
    return Mock(side_effect=OSError(number, os.strerror(number)))


def test_a_disk_keeps_what_was_synced_and_no_name_whose_folder_was_not(tmp_path: Path) -> None:
    def change(what: str, node: int = 1, offset: int = 0, one: str = "/d/a", two: str = "", data: bytes = b"") -> Change:
        return Change(what, node, offset, one, two, data)

    def left(name: str) -> dict[str, bytes]:
        disk.after_loss(tmp_path / name, random.Random(1), is_strict=True)
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    disk, folder = Disk(root="/d"), change("sync", node=0, one="/d")
    written = change("create"), change("write", data=b"old"), change("sync"), folder, change("write", offset=3, data=b"lost")
    b: dict[str, Any] = {"node": 2, "one": "/d/b"}
    for one in (*written, change("create", **b), change("write", node=2, data=b"no name"), change("sync", **b)):
        disk.take(one)
    assert left("then") == {"a": b"old"}
    disk.take(change("rename", one="/d/b", two="/d/a"))
    disk.take(folder)
    assert left("later") == {"a": b"no name"}


def test_the_names_of_a_new_store_and_of_its_folders_are_on_the_disk_before_anything_is_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(publish_module, "sync_folder", synced.append)
    prepare_store(tmp_path / "new" / "s")
    assert set(synced) >= {tmp_path / "new" / "s", tmp_path / "new", tmp_path}


def test_a_pending_shards_name_is_on_the_disk_before_its_first_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    empty_store(tmp_path)
    monkeypatch.setattr(shard_writer, "sync_folder", synced.append)
    open_writer(tmp_path, "a").close()
    assert synced == [tmp_path / "pending"]


def test_a_lock_is_given_back_on_a_disk_that_has_turned_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = FileLock(tmp_path / "lock")
    with pytest.raises(LockedError):
        FileLock(tmp_path / "lock")
    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", refuse(errno.EROFS))
        lock.release()
    FileLock(tmp_path / "lock").release()


def test_what_the_system_refuses_while_a_store_is_changed_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = empty_store(tmp_path)
    (tmp_path / "pending" / "left.records").write_bytes(b"")
    monkeypatch.setattr(type(tmp_path), "unlink", refuse(errno.EROFS))
    with pytest.raises(StoreError, match=r"cannot be read or changed: Read-only file system; fix that"):
        publish_module.adopt(tmp_path, manifest)


def test_an_older_manifest_that_cannot_be_read_is_a_fault_that_verify_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, older = make_store(tmp_path, samples_of({"train/8x8": 2})), tmp_path / "generations" / "0.json"
    fail = refuse(errno.EIO)
    monkeypatch.setattr("bucketline.store.folder.open_regular", lambda path: fail() if path == older else open_regular(path))
    (fault,) = verify(store, lambda _: None, 1).corrupt
    assert f"cannot read {older}: Input/output error; " in fault.error
    assert "a run that was planned on that generation cannot resume" in fault.error


def test_a_shards_id_that_cannot_be_read_is_an_error_of_ours(tmp_path: Path) -> None:
    (shard,) = make_store(tmp_path / "s", samples_of({"train/8x8": 2})).shards
    with pytest.raises(StoreError, match=r"g0.lmdb cannot be read at byte \d+: Bad file descriptor"):
        shard._check_id(-1)
