"""Verify reads everything once, names what is wrong, and never falls over it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bucketline.errors import CorruptError
from bucketline.store import Store
from bucketline.store.change.commit import drop
from bucketline.store.change.repair import repair
from bucketline.store.format.block import sample_digest
from bucketline.store.format.schema import encode_record
from bucketline.store.read.samples import checked_row
from bucketline.store.shard.sidecar import encode_sidecar
from bucketline.store.verify import shard
from bucketline.store.verify.verify import verify
from bucketline.store.write.seal import seal
from tests.commands import call
from tests.fault.apart import How, apart
from tests.kit import (
    dropped_list,
    faults,
    flip_bit,
    flip_caption,
    flip_row,
    ids_of,
    index_of,
    make_store,
    parts_of,
    replace_file,
    rewrite_manifest,
    samples_of,
    write_shard,
)

BUCKET = "train/64x64"


def test_a_sound_store_has_no_faults_and_all_its_rows_are_read(store: Store) -> None:
    told: list[int] = []
    result = verify(store, told.append)
    assert result.corrupt == ()
    assert result.rows == store.manifest.samples == 53
    assert result.blocks == sum(group.blocks for shard in store.manifest.shards for group in shard.groups.values())
    assert sum(told) == sum(shard.lmdb.num_bytes for shard in store.manifest.shards)
    assert result.strays == ()


@pytest.mark.parametrize("column", ["latent", "original_size", "crop", "captions", "checksum", "id"])
def test_a_flipped_bit_in_a_row_names_shard_bucket_block_row_and_sample(copy: Path, column: str) -> None:
    flip_row(copy, BUCKET, 17, column)
    digest, row = faults(copy)
    assert "g0.lmdb has the digest" in digest.error
    named = (row.shard, row.bucket, row.block, row.row, row.sample)
    assert named == ("g0", BUCKET, 2, 17, f"first/{BUCKET}/17.png")
    assert column == "id" or row.error == "the row's bytes do not match their checksum"


def users_of(path: Path, caption: int) -> set[str]:
    store = Store.open(path)
    found = [store.sample(sample_id) for sample_id in ids_of(store)]
    return {record.id for shard, record in found if shard.name == "g0" and caption in record.caption_rows}


@pytest.mark.parametrize("caption", [0, 4])
def test_a_damaged_caption_names_every_sample_that_uses_it(copy: Path, caption: int) -> None:
    flip_caption(copy, caption)
    _, fault = faults(copy)
    assert (fault.bucket, fault.row) == ("text", caption)
    users = users_of(copy, caption)
    assert set(fault.samples) == users
    assert len(fault.samples) == len(users) > 1
    assert fault.error == f"the caption's bytes do not match their checksum; {len(users)} samples use it"
    line = next(line for line in call("store", "verify", copy).out.splitlines() if "bucket text" in line)
    assert sum(user in line for user in users) == min(len(users), 5)
    assert len(users) <= 5 or f"and {len(users) - 5} more" in line
    found = call("store", "verify", copy, "--json").json["corrupt"]
    assert [set(own["samples"]) for own in found if own["row"] == caption] == [users]


def test_dropped_samples_are_not_named_as_users_of_a_damaged_caption(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 12})
    store = make_store(tmp_path, samples, samples[:4])
    flip_caption(store, store.sample(samples[6].id)[1].caption_rows[0])
    _, fault = faults(tmp_path)
    assert fault.samples == (samples[6].id,)
    assert fault.error.endswith("; 1 sample uses it")


def test_a_text_block_that_cannot_be_read_names_the_samples_that_use_its_captions(copy: Path) -> None:
    store = Store.open(copy)
    located = store.locate_entries(store.text, np.array([0]), np.array([0]))
    flip_bit(store.shards[0].paths.lmdb, 8 * (int(located.data[0]) - 3))  # in its header
    fault = next(fault for fault in faults(copy) if fault.bucket == "text")
    assert (fault.block, fault.row) == (0, None)
    users = {user for caption in range(int(located.entries[0])) for user in users_of(copy, caption)}
    assert set(fault.samples) == users
    assert f"{len(users)} samples use its captions" in fault.error


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_shard_is_found_wherever_it_ends(copy: Path, share: float) -> None:
    path = copy / "shards" / "g0.lmdb"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    found = faults(copy)
    assert f"g0.lmdb has {int(len(data) * share)} bytes, the manifest says {len(data)}" in found[0].error
    assert all(fault.shard == "g0" for fault in found)


@pytest.mark.parametrize("suffix", ["meta", "lmdb"])
def test_a_missing_file_is_found(copy: Path, suffix: str) -> None:
    (copy / "shards" / f"g1.{suffix}").unlink()
    found = faults(copy)
    assert found[0].shard == "g1"
    assert f"g1.{suffix} cannot be read: No such file" in found[0].error


@pytest.mark.parametrize("suffix", ["meta"])
def test_a_damaged_sidecar_is_found_whichever_byte_it_is(copy: Path, suffix: str) -> None:
    path = copy / "shards" / f"g1.{suffix}"
    data = path.read_bytes()
    for at in range(0, len(data), 61):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        assert any(f"g1.{suffix} has the digest" in fault.error for fault in faults(copy))


@pytest.mark.parametrize("suffixes", [("lmdb",), ("lmdb", "meta")])
def test_shards_exchanged_for_one_another_are_found(copy: Path, suffixes: tuple[str, ...]) -> None:
    for suffix in suffixes:
        one, two = copy / "shards" / f"g0.{suffix}", copy / "shards" / f"g1.{suffix}"
        data = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(data)
    assert {fault.shard for fault in faults(copy)} == {"g0", "g1"}


def test_a_manifest_with_a_right_digest_and_wrong_counts_is_found(copy: Path) -> None:
    first, *rest = Store.open(copy).manifest.shards
    groups = {name: group._replace(rows=group.rows + (name == BUCKET)) for name, group in first.groups.items()}
    rewrite_manifest(copy, shards=(replace(first, groups=groups, samples=first.samples + 1), *rest))
    said = rf"groups.{BUCKET} is \[23, .*\], the manifest says \[24, .*\]"
    assert any(re.fullmatch(said, fault.error) for fault in faults(copy))
    with pytest.raises(ValueError, match="says it has 38 samples, its buckets hold a different number"):
        rewrite_manifest(copy, shards=(replace(first, samples=first.samples - 1), *rest))


def test_threads_change_neither_what_is_found_nor_its_order(tmp_path: Path) -> None:
    store = make_store(tmp_path, *(samples_of({BUCKET: 20}, f"{n}/") for n in range(6)))
    for n in range(6):
        flip_row(store, BUCKET, 20 * n + n)
    alone = verify(store, lambda _: None, 1)
    assert [fault.shard for fault in alone.corrupt] == [f"g{n}" for n in range(6) for _ in range(2)]
    assert [fault.row for fault in alone.corrupt if fault.row is not None] == list(range(6))
    assert verify(store, lambda _: None, 5) == alone


def test_ctrl_c_ends_all_threads_before_they_have_read_everything(tmp_path: Path) -> None:
    """The signal comes with the first progress that is told, in a process of its own."""
    store, told = make_store(tmp_path, *(samples_of({BUCKET: 20}, f"{n}/") for n in range(30))), list[int]()

    def on_bytes(num_bytes: int) -> None:
        told.append(num_bytes)
        if len(told) == 1:
            os.kill(os.getpid(), signal.SIGINT)  # to the process, as Ctrl-C is: the thread that waits is woken by it
        else:
            time.sleep(0.2)  # a busy machine wakes it late

    def interrupted() -> tuple[int, int]:
        with suppress(KeyboardInterrupt):
            verify(store, on_bytes, 2)
        for thread in threading.enumerate()[1:]:  # one that Ctrl-C met while it was started is not waited for
            thread.join(10.0)
        return len(told), threading.active_count()

    ended = apart(interrupted, 60)
    assert ended.how is How.DONE, ended.said
    assert ended.gave[0] < 20
    assert ended.gave[1] == 1


def test_progress_is_told_while_a_shard_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "_TELL_BYTES", 1 << 14)
    store = make_store(tmp_path, samples_of({BUCKET: 100}))
    told: list[int] = []
    verify(store, told.append, 1)
    assert len(told) > 4
    assert sum(told) == store.shards[0].entry.lmdb.num_bytes


def rewrite_meta(path: Path, change: Callable[[dict[str, NDArray[np.uint64]]], None]) -> None:
    tensors, metadata = parts_of(Store.open(path).shards[0].paths.meta)
    change({name: values for name, _, values in tensors})
    replace_file(path, "meta", encode_sidecar(tensors, metadata))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("offset", 1 << 40, "beyond the file"),
        ("offset", (1 << 64) - 1, "beyond the file"),
        ("length", 1 << 63, "beyond the file"),
        ("length", 4096, ""),
        ("rows", 1 << 62, "rows"),
        ("rows", 0, "rows"),
        ("first_row", 5, "first row"),
        ("offset", "that of the block before it and 8", "inside another block"),
    ],
)
def test_wrong_places_are_named_by_block_and_the_other_blocks_are_read(
    copy: Path, column: str, value: int | str, message: str
) -> None:
    block = Store.open(copy).manifest.shards[0].groups[BUCKET].first_block + 1

    def lie(columns: dict[str, NDArray[np.uint64]]) -> None:
        columns[column][block] = value if isinstance(value, int) else columns[column][block - 1] + np.uint64(8)

    rewrite_meta(copy, lie)
    result = verify(Store.open(copy), lambda _: None, 1)
    assert any((fault.bucket, fault.block) == (BUCKET, 1) and message in fault.error for fault in result.corrupt)
    assert any("g0.meta is not what the shard's file gives" in fault.error for fault in result.corrupt)
    assert result.blocks >= sum(g.blocks for shard in Store.open(copy).manifest.shards for g in shard.groups.values()) - 1


@pytest.mark.parametrize("field", ["record_bytes", "caption_bytes"])
def test_numbers_of_the_manifest_that_are_not_those_of_the_files_are_named(copy: Path, field: str) -> None:
    first, *rest = Store.open(copy).manifest.shards
    rewrite_manifest(copy, shards=(replace(first, **{field: getattr(first, field) + 2}), *rest))
    (fault,) = faults(copy)
    assert fault.error.startswith(f"{field} is {getattr(first, field)}, the manifest says {getattr(first, field) + 2}")


def test_an_index_that_lies_is_named_and_made_again(copy: Path) -> None:
    tensors, metadata = parts_of(Store.open(copy).shards[0].paths.meta)
    index_of(tensors, metadata)["digest"][5, 15] ^= 1
    replace_file(copy, "meta", encode_sidecar(tensors, metadata))
    (fault,) = faults(copy)
    assert fault.error == "g0.meta is not what the shard's file gives; `store repair` makes it again"
    assert repair(copy).shards[0].restored == ("g0.meta",)
    assert faults(copy) == ()


def test_older_generations_are_read_too_and_strays_are_no_faults(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 9})
    store = make_store(tmp_path, samples, samples[:3], samples[3:5])
    assert verify(store, lambda _: None).strays == ()
    (tmp_path / "shards" / "notes.txt").write_text("mine", encoding="ascii")
    write_shard(tmp_path, "late", samples_of({BUCKET: 2}, "late/"))
    result = verify(store, lambda _: None)
    assert result.corrupt == ()
    names = ("late.lmdb", "late.meta", "notes.txt")
    assert [stray.path for stray in result.strays] == [f"shards/{name}" for name in names]
    assert "the next pack adopts it" in result.strays[1].what
    flip_bit(tmp_path / "generations" / "1.json", 8 * 50)
    (fault,) = faults(tmp_path)
    assert "a run that was planned on that generation cannot resume" in fault.error


def test_every_fault_of_several_is_named(copy: Path) -> None:
    for row in (0, 8, 9, 22):
        flip_row(copy, BUCKET, row)
    assert [fault.row for fault in faults(copy) if fault.row is not None] == [0, 8, 9, 22]


def rewrite_record(path: Path, sample_id: str, **changes: Any) -> None:
    """Replace the record of a sample of the first shard by one of equal length; the manifest has the digest of the result."""
    store = Store.open(path)
    shard, record = store.sample(sample_id)
    entry = shard.find(sample_digest(sample_id))
    assert entry is not None
    encoded = encode_record(replace(record, **changes))
    assert len(encoded) == entry.record_bytes
    data = bytearray(shard.paths.lmdb.read_bytes())
    data[entry.record_offset : entry.record_offset + entry.record_bytes] = encoded
    replace_file(path, "lmdb", bytes(data))


def test_a_row_whose_record_says_otherwise_is_named_refused_by_readers_and_left_out_by_a_repair(copy: Path) -> None:
    sample_id = f"first/{BUCKET}/5.png"
    record = Store.open(copy).sample(sample_id)[1]
    rewrite_record(copy, sample_id, crop=(record.crop[0], record.crop[1] + 1, *record.crop[2:]))
    (fault,) = [fault for fault in faults(copy) if fault.row is not None]
    assert (fault.bucket, fault.row) == (BUCKET, 5)
    assert re.fullmatch(r"the row's crop is \[\d+, \d+\], its sample's record says \[\d+, \d+\]", fault.error)
    with pytest.raises(CorruptError, match=r"its crop is .*, its record says"):
        checked_row(Store.open(copy), 0, Store.open(copy).sample(sample_id)[1])
    assert repair(copy).shards[0].dropped_ids == (sample_id,)


@pytest.mark.parametrize("name", ["record", "captions"])
def test_records_that_lie_are_named_and_their_shard_is_not_sealed_again(copy: Path, name: str) -> None:
    sample_id = f"first/{BUCKET}/5.png"
    record = Store.open(copy).sample(sample_id)[1]
    others: dict[str, dict[str, Any]] = {
        "record": {"id": sample_id[:-1] + "x"},
        "captions": {"caption_rows": (99, *record.caption_rows[1:])},
    }
    words = {"record": "is not stored under its id", "captions": "names captions that the shard does not have"}[name]
    rewrite_record(copy, sample_id, **others[name])
    assert any(words in fault.error and fault.row == 5 for fault in faults(copy))
    (copy / "shards" / "g0.lmdb").rename(copy / "pending" / "again.lmdb")
    with pytest.raises(CorruptError, match=f"shard again, row 5 of {BUCKET}: .*{words}"):
        seal(copy, "again")


def test_a_live_row_of_a_withdrawn_id_is_found(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 6})
    make_store(tmp_path, samples)
    rewrite_manifest(tmp_path, withdrawn=(samples[2].id,))
    assert [(fault.shard, fault.row) for fault in faults(tmp_path)] == [("g0", 2)]
    drop(tmp_path, [samples[2].id])
    assert faults(tmp_path) == ()


def test_a_missing_list_of_dropped_rows_is_found(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 6})
    make_store(tmp_path, samples, samples[:2])
    dropped_list(tmp_path).unlink()
    assert any("is missing, the manifest lists it" in fault.error for fault in faults(tmp_path))
