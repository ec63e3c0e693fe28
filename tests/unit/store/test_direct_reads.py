"""Reads past the page cache give the file's bytes, wherever a piece begins and ends, and name the file that fails them."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bucketline.errors import CorruptError, StoreError
from bucketline.store import Store
from bucketline.store.direct_reads import DirectReads

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def own(store: Store, tmp_path: Path) -> Store:
    shutil.copytree(store.path, tmp_path / "own")
    return Store.open(tmp_path / "own")


@pytest.fixture
def reads(own: Store) -> Iterator[DirectReads]:
    opened = DirectReads(own.shards)
    yield opened
    opened.close()


def test_pieces_of_any_place_and_length_are_the_files_bytes(own: Store, reads: DirectReads) -> None:
    random = np.random.default_rng(0)
    files = [shard.paths.lmdb.read_bytes() for shard in own.shards]
    wanted = []
    for _ in range(300):
        ordinal = int(random.integers(len(files)))
        begin, end = sorted(random.integers(0, len(files[ordinal]) + 1, 2).tolist())
        wanted.append((ordinal, begin, bytearray(end - begin)))
    last = len(files[0]) - 5
    wanted.append((0, last, bytearray(5)))
    reads.read([(ordinal, begin, memoryview(out)) for ordinal, begin, out in wanted])
    for ordinal, begin, out in wanted:
        assert bytes(out) == files[ordinal][begin : begin + len(out)]


def test_a_piece_beyond_the_files_end_is_an_error_that_names_it(own: Store, reads: DirectReads) -> None:
    end = own.shards[0].entry.lmdb.num_bytes
    with pytest.raises(CorruptError, match=rf"{own.shards[0].name}.lmdb ends at byte {end}, expected {end + 7}"):
        reads.read([(0, end - 3, memoryview(bytearray(10)))])


def test_a_file_that_was_truncated_or_is_missing_is_an_error_that_names_it(own: Store, reads: DirectReads) -> None:
    out = memoryview(bytearray(10))
    os.truncate(own.shards[0].paths.lmdb, 4096)
    with pytest.raises(CorruptError, match=rf"{own.shards[0].name}.lmdb has 4096 bytes, the manifest says"):
        reads.read([(1, 0, memoryview(bytearray(10))), (0, 0, out)])
    own.shards[0].paths.lmdb.unlink()
    with pytest.raises(StoreError, match=rf"{own.shards[0].name}.lmdb is missing"):
        reads.read([(0, 0, out), (1, 0, memoryview(bytearray(10)))])
