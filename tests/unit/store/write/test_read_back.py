"""Sealing reads a shard's file back once, and compares what is there with what LMDB says is there."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bucketline.errors import StoreError
from bucketline.store import Store
from bucketline.store.format.hashing import LINE_BYTES, READ_BYTES, LineSums, checksum
from bucketline.store.write.shard_contents import _read_back, _UnconfirmedError
from tests.kit import add_samples, samples_of, store_writer

SIZE = LINE_BYTES + 3 * READ_BYTES // 2
PLACES = ((0, 5), (5, 100), (READ_BYTES - 3, 7), (READ_BYTES + 4, 1), (2 * READ_BYTES - 1, 3 * READ_BYTES), (SIZE - 9, 9))


@pytest.fixture
def data(tmp_path: Path) -> NDArray[np.uint8]:
    made = np.random.default_rng(1).integers(0, 256, SIZE, dtype="u1")
    (tmp_path / "file").write_bytes(made.tobytes())
    return made


def read_back(path: Path, data: NDArray[np.uint8], places: tuple[tuple[int, int], ...] = PLACES) -> list[int]:
    """Read the file back as if LMDB had values of these offsets and lengths in `data`."""
    rows = [(offset, length, data.ctypes.data + offset) for offset, length in reversed(places)]
    placed = bytearray(np.array(rows, dtype="<u8").tobytes())
    lines = LineSums()
    with path.open("rb", buffering=0) as file:
        _read_back(file, placed, lines)
    return lines.finish()


def test_values_that_are_there_are_confirmed_and_the_lines_checksums_are_those_of_the_file(
    data: NDArray[np.uint8], tmp_path: Path
) -> None:
    whole = data.tobytes()
    assert read_back(tmp_path / "file", data) == [checksum(whole[:LINE_BYTES]), checksum(whole[LINE_BYTES:])]


@pytest.mark.parametrize("place", PLACES)
def test_a_value_of_which_one_byte_differs_is_not_confirmed(
    place: tuple[int, int], data: NDArray[np.uint8], tmp_path: Path
) -> None:
    offset, length = place
    for at in {offset, offset + length // 2, offset + length - 1}:
        data[at] ^= 1
        with pytest.raises(_UnconfirmedError):
            read_back(tmp_path / "file", data)
        data[at] ^= 1
    read_back(tmp_path / "file", data)


def test_values_that_overlap_or_end_beyond_the_file_are_not_confirmed(data: NDArray[np.uint8], tmp_path: Path) -> None:
    longer = np.concatenate([data, data[:9]])
    for places in (((3, 9), (8, 9)), ((SIZE - 4, 5),), ((SIZE, 1),)):
        with pytest.raises(_UnconfirmedError):
            read_back(tmp_path / "file", longer, places)


def test_a_shard_whose_values_cannot_be_located_is_not_sealed_and_stays_for_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with pages of another LMDB, which do not begin with their own numbers."""
    real = ctypes.string_at
    words = "g0 cannot be sealed: a read of g0.sealing gives other bytes than LMDB"
    with monkeypatch.context() as patch, store_writer(tmp_path, shard_names="g{}") as writer:
        patch.setattr(ctypes, "string_at", lambda address, size: bytes(byte ^ 0x55 for byte in real(address, size)))
        add_samples(writer, samples_of({"train/8x8": 3}))
        with pytest.raises(StoreError, match=words):
            writer.publish()
    assert not list((tmp_path / "shards").glob("*.lmdb"))
    with store_writer(tmp_path) as writer:
        writer.publish()
    assert Store.open(tmp_path).bucket("train/8x8").num_rows == 3
