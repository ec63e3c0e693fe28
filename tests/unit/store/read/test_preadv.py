"""Plain reads into given buffers: the bytes of the map, errors where the map would end the process, and `verify`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bucketline.errors import CorruptError, StoreError
from bucketline.store import FileGather, Store
from bucketline.store.shard.address_range import AddressRange
from tests.kit import flip_bit, make_store, samples_of

BUCKET = "train/64x64"


def mapped_bytes(store: Store) -> tuple[AddressRange, Any]:
    whole = AddressRange([s.entry.lmdb.num_bytes for s in store.shards], lambda ordinal: store.shards[ordinal].opened())
    whole.map(np.arange(len(store.shards)))
    return whole, whole.bytes_view()


@pytest.mark.parametrize("threads", [1, 4])
def test_rows_of_every_column_are_those_under_the_map(store: Store, threads: int) -> None:
    whole, view = mapped_bytes(store)
    with FileGather(store, threads=threads) as gather:
        for bucket in store.buckets():
            located = bucket.locate(np.random.default_rng(2).integers(0, bucket.num_rows, 50))
            for column in bucket.columns:
                out = np.full((50, column.row_bytes), 7, dtype="u1")
                gather.rows(located, column, out)
                begin = whole.first_byte[located.shard] + located.offsets(bucket.spec, column.name)
                assert all(out[n].tobytes() == view[at : at + column.row_bytes].tobytes() for n, at in enumerate(begin))


@pytest.mark.parametrize("threads", [1, 4])
def test_ranges_of_any_length_are_padded_with_zeros(store: Store, threads: int) -> None:
    located = store.locate_captions(np.array([0, 1, 1, 0]), np.array([0, 0, 2, 3]))
    whole, view = mapped_bytes(store)
    lengths = np.array([0, 7, 64, 33])
    out = np.full((4, 64), 9, dtype="u1")
    with FileGather(store, threads=threads) as gather:
        gather.read(located.shard, located.data, lengths, out)
    for n, begin in enumerate(whole.first_byte[located.shard] + located.data):
        assert out[n].tobytes() == view[begin : begin + lengths[n]].tobytes() + bytes(64 - lengths[n])


def test_a_buffer_of_another_size_is_refused_before_anything_is_read(store: Store) -> None:
    bucket = store.bucket(BUCKET)
    with (
        FileGather(store) as gather,
        pytest.raises(ValueError, match=r"the buffer has \d+ bytes, expected 2 rows of 256 bytes"),
    ):
        gather.rows(bucket.locate(np.array([0, 1])), bucket.spec.column("latent"), np.empty((3, 256), dtype="u1"))


def test_rows_are_read_into_the_buffer_that_is_given(store: Store) -> None:
    bucket, rows = store.bucket(BUCKET), np.array([3, 1, 30])
    out = np.zeros((3, 2, 8, 8), dtype="<f2")
    assert bucket.read(rows, "latent", out=out) is out
    assert np.array_equal(out, bucket.read(rows, "latent", verify=True))


def test_a_file_truncated_while_the_store_is_open_is_an_error_not_the_end_of_the_process(store: Store, tmp_path: Path) -> None:
    shutil.copytree(store.path, tmp_path / "s")
    opened = Store.open(tmp_path / "s")
    bucket = opened.bucket(BUCKET)
    located = bucket.locate(np.arange(23))
    path = opened.shards[0].paths.lmdb
    with FileGather(opened) as gather:
        os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)
        with pytest.raises(CorruptError, match=r"g0.lmdb has \d+ bytes, the manifest says \d+"):
            gather.rows(located, bucket.spec.column("latent"), np.empty((23, 2, 8, 8), dtype="<f2"))


def test_a_failing_medium_is_an_error_that_says_where(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("bucketline.store.shard.reader.os.preadv", failing)
    with pytest.raises(StoreError, match=r"g0.lmdb cannot be read at byte \d+: Input/output error; the medium may be failing"):
        store.bucket(BUCKET).read(np.array([0]), "latent")


@pytest.mark.parametrize("column", ["latent", "checksum", "captions", "crop", "original_size", "id"])
def test_verify_names_the_sample_of_a_bad_row_whichever_column_is_damaged(tmp_path: Path, column: str) -> None:
    samples = samples_of({BUCKET: 20})
    store = make_store(tmp_path, samples)
    bucket = store.bucket(BUCKET)
    at = int(bucket.locate(np.array([11])).offsets(bucket.spec, column)[0])
    flip_bit(store.shards[0].paths.lmdb, 8 * at + 3)
    opened = Store.open(tmp_path).bucket(BUCKET)
    others = np.array([n for n in range(20) if n != 11])
    opened.read(others, "latent", verify=True)
    opened.read(np.arange(20), "latent")
    with pytest.raises(
        CorruptError, match=rf"sample '{samples[11].id}', row 11 of {BUCKET} in shard g0: its bytes do not match"
    ):
        opened.read(np.arange(20), "latent", verify=True)


def test_a_damaged_caption_is_named_when_it_is_read(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples_of({BUCKET: 9}))
    located = store.locate_captions(np.array([0]), np.array([2]))
    first = np.frombuffer(store.shards[0].read(int(located.starts_offsets()[0]), 8), "<i8")
    at = int(store.token_offsets(located, "tokens", first)[0])
    flip_bit(store.shards[0].paths.lmdb, 8 * at + 1)
    with pytest.raises(CorruptError, match=r"shard g0, caption 2: its bytes do not match their checksum"):
        Store.open(tmp_path).read_caption(0, 2)
