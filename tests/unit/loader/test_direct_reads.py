"""With `direct_reads` batches are the same, a failure names its sample, and no thread is left."""

from __future__ import annotations

import threading
from itertools import islice
from typing import TYPE_CHECKING

import pytest
import torch

from bucketline.bench.synthetic_store import StoreShape, make_store
from bucketline.errors import StoreError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.filler import DIRECT_BYTES
from bucketline.store import Store

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = StoreShape(num_shards=3, rows_per_shard=8, latent_shape=(4, 64, 64), tokens=(5, 20))


@pytest.fixture
def large(tmp_path: Path) -> Store:
    make_store(tmp_path / "s", SHAPE)
    return Store.open(tmp_path / "s")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("service", [None, "auto"])
def test_batches_are_the_same_past_the_page_cache(large: Store, num_threads: int, service: str | None) -> None:
    assert min(SHAPE.latent_bytes, 20 * 768 * 2) >= DIRECT_BYTES
    config = LoaderConfig(batch_size=5, epochs=3, caption_dropout=0.3)
    past = LoaderConfig(batch_size=5, epochs=3, caption_dropout=0.3, direct_reads=True, threads=num_threads, verify=True)
    before = threads()
    with Loader(large, config) as own, Loader(large, past, service=service) as other:
        for one, same in zip(own, other, strict=True):
            for name, tensor in one.by_name().items():
                assert torch.equal(tensor, same.by_name()[name]), name
        assert own.state_dict() == other.state_dict()
    assert threads() == before


def test_a_file_that_vanishes_is_an_error_that_names_the_sample_and_no_thread_is_left(large: Store) -> None:
    before = threads()
    config = LoaderConfig(batch_size=4, direct_reads=True, threads=2, prefetch_bytes=1)
    with Loader(large, config) as loader:
        batches = iter(loader)
        next(batches)
        for shard in large.shards:
            shard.paths.lmdb.unlink()
        with pytest.raises(StoreError, match=r"row \d+ .*in shard s\d+: .*lmdb is missing"):
            list(islice(batches, 50))
    assert threads() == before
