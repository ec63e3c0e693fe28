"""Verify reads everything once, names what is wrong, and never falls over it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bucketline.errors import CorruptError
from bucketline.store import Store
from bucketline.store.verify import Fault, verify
from tests.building import edit_json, make_store, rewrite_manifest, samples_of

if TYPE_CHECKING:
    from pathlib import Path

BUCKET = "train/64x64"


@pytest.fixture
def copy(store: Store, tmp_path: Path) -> Path:
    shutil.copytree(store.path, tmp_path / "copy")
    return tmp_path / "copy"


def faults(path: Path) -> tuple[Fault, ...]:
    return verify(Store.open(path), lambda _: None).corrupt


def test_a_sound_store_has_no_faults_and_all_its_rows_are_read(store: Store) -> None:
    told: list[int] = []
    result = verify(store, told.append)
    assert result.corrupt == ()
    assert result.rows == store.manifest.samples == 53
    assert result.blocks == sum(group.blocks for shard in store.manifest.shards for group in shard.groups.values())
    assert sum(told) == sum(shard.lmdb.num_bytes for shard in store.manifest.shards)
    assert result.strays == ()


@pytest.mark.parametrize("column", ["latent", "original_size", "crop", "captions", "checksum"])
def test_a_flipped_bit_in_a_row_names_shard_bucket_block_row_and_sample(copy: Path, column: str) -> None:
    store = Store.open(copy)
    bucket = store.bucket(BUCKET)
    located = bucket.locate(np.array([17]))
    path = store.shards[0].paths.lmdb
    data = bytearray(path.read_bytes())
    data[int(located.offsets(bucket.spec, column)[0])] ^= 1
    path.write_bytes(data)
    digest, row = faults(copy)
    assert "g0.lmdb has the digest" in digest.error
    named = (row.shard, row.bucket, row.block, row.row, row.sample)
    assert named == ("g0", BUCKET, 2, 17, f"first/{BUCKET}/17.png")
    assert row.error == "the row's bytes are not those that were written"


def test_a_flipped_bit_in_a_rows_id_is_found_and_the_sample_named_by_its_row(copy: Path) -> None:
    store = Store.open(copy)
    bucket = store.bucket(BUCKET)
    path = store.shards[0].paths.lmdb
    data = bytearray(path.read_bytes())
    data[int(bucket.locate(np.array([3])).offsets(bucket.spec, "id")[0])] ^= 1
    path.write_bytes(data)
    _, row = faults(copy)
    assert (row.bucket, row.row, row.sample) == (BUCKET, 3, f"first/{BUCKET}/3.png")


def test_a_flipped_bit_in_a_captions_tokens_is_found(copy: Path) -> None:
    store = Store.open(copy)
    located = store.locate_captions(np.array([0]), np.array([4]))
    path = store.shards[0].paths.lmdb
    data = bytearray(path.read_bytes())
    first = int.from_bytes(data[int(located.starts_offsets()[0]) :][:8], "little")
    data[int(store.token_offsets(located, "tokens", np.array([first]))[0])] ^= 1
    path.write_bytes(data)
    _, caption = faults(copy)
    assert (caption.bucket, caption.row) == ("text", 4)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_shard_is_found_wherever_it_ends(copy: Path, share: float) -> None:
    path = copy / "shards" / "g0.lmdb"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    found = faults(copy)
    assert f"g0.lmdb has {int(len(data) * share)} bytes, the manifest says {len(data)}" in found[0].error
    assert all(fault.shard == "g0" for fault in found)


@pytest.mark.parametrize("suffix", ["extents", "index", "lmdb"])
def test_a_missing_file_is_found(copy: Path, suffix: str) -> None:
    (copy / "shards" / f"g1.{suffix}").unlink()
    found = faults(copy)
    assert found[0].shard == "g1"
    assert f"g1.{suffix} cannot be read: No such file" in found[0].error


@pytest.mark.parametrize("suffix", ["extents", "index"])
def test_a_damaged_sidecar_is_found_whichever_byte_it_is(copy: Path, suffix: str) -> None:
    path = copy / "shards" / f"g1.{suffix}"
    data = path.read_bytes()
    for at in range(0, len(data), 61):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        assert any(f"g1.{suffix} has the digest" in fault.error for fault in faults(copy))


def test_a_missing_list_of_dropped_rows_is_found(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 6})
    store = make_store(tmp_path, samples, samples[:2])
    dropped = store.shards[0].entry.dropped
    assert dropped is not None
    store.shards[0].paths.dropped(dropped.generation).unlink()
    assert any("cannot be read" in fault.error for fault in faults(tmp_path))


def test_an_edited_manifest_is_refused_before_anything_is_read(copy: Path) -> None:
    edit_json(copy / "manifest.json", max_captions=99)
    with pytest.raises(CorruptError, match="damaged"):
        faults(copy)


def test_shards_exchanged_for_one_another_are_found(copy: Path) -> None:
    one, two = copy / "shards" / "g0.lmdb", copy / "shards" / "g1.lmdb"
    one_data, two_data = one.read_bytes(), two.read_bytes()
    one.write_bytes(two_data)
    two.write_bytes(one_data)
    assert {fault.shard for fault in faults(copy)} == {"g0", "g1"}


def test_shards_exchanged_with_all_their_sidecars_are_found(copy: Path) -> None:
    for suffix in ("lmdb", "extents", "index"):
        one, two = copy / "shards" / f"g0.{suffix}", copy / "shards" / f"g1.{suffix}"
        data = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(data)
    assert {fault.shard for fault in faults(copy)} == {"g0", "g1"}


def test_a_shard_of_another_store_is_found(copy: Path, tmp_path: Path) -> None:
    other = make_store(tmp_path / "other", samples_of({BUCKET: 23}, "other/"))
    (copy / "shards" / "g1.lmdb").write_bytes((other.path / "shards" / "g0.lmdb").read_bytes())
    assert any(fault.shard == "g1" for fault in faults(copy))


def test_a_manifest_with_a_right_digest_and_wrong_counts_is_found(copy: Path) -> None:
    first, *rest = Store.open(copy).manifest.shards
    groups = {name: replace(group, rows=group.rows + (name == BUCKET)) for name, group in first.groups.items()}
    rewrite_manifest(copy, shards=(replace(first, groups=groups, samples=first.samples + 1), *rest))
    assert any("the blocks hold 23 rows, the manifest says 24" in fault.error for fault in faults(copy))
    with pytest.raises(ValueError, match="says it has 38 samples, its buckets have another number"):
        rewrite_manifest(copy, shards=(replace(first, samples=first.samples - 1), *rest))


def test_every_fault_of_several_is_named(copy: Path) -> None:
    store = Store.open(copy)
    bucket = store.bucket(BUCKET)
    path = store.shards[0].paths.lmdb
    data = bytearray(path.read_bytes())
    for row in (0, 8, 9, 22):
        data[int(bucket.locate(np.array([row])).offsets(bucket.spec, "latent")[0]) + 9] ^= 0x80
    path.write_bytes(data)
    assert [fault.row for fault in faults(copy) if fault.row is not None] == [0, 8, 9, 22]
