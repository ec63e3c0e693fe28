"""The stores that the cases are measured on are stores."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bucketline.bench.sparse_store import kept_sparse_store
from bucketline.bench.synthetic_store import StoreShape, all_captions, kept_store, random_f16
from bucketline.store import Store
from tests.commands import call

if TYPE_CHECKING:
    from pathlib import Path


def test_a_synthetic_store_verifies_and_has_the_shape_asked_for(tmp_path: Path) -> None:
    shape = StoreShape(num_shards=2, rows_per_shard=5, latent_shape=(4, 8, 16), tokens=(3, 9), token_width=32)
    store = Store.open(kept_store(tmp_path, shape))
    assert call("store", "verify", store.path).code == 0
    (bucket,) = store.buckets()
    assert (bucket.name, bucket.num_rows) == ("train/64x128", 10)
    assert store.max_tokens == 9
    shard, caption = all_captions(store)
    lengths = [len(store.read_caption(int(s), int(c))["tokens"]) for s, c in zip(shard, caption, strict=True)]
    assert len(lengths) == 10
    assert set(lengths) <= set(range(3, 10))


def test_a_store_without_text_has_the_empty_caption_alone(tmp_path: Path) -> None:
    store = Store.open(kept_store(tmp_path, StoreShape(num_shards=2, rows_per_shard=3, latent_shape=(4, 8, 8), tokens=None)))
    assert len(all_captions(store)[0]) == 0
    assert call("store", "verify", store.path).code == 0


def test_a_kept_store_is_made_once(tmp_path: Path) -> None:
    shape = StoreShape(num_shards=1, rows_per_shard=2, latent_shape=(4, 8, 8), tokens=None)
    path = kept_store(tmp_path, shape)
    made = path.stat().st_mtime_ns, Store.open(path).manifest.store_id
    assert kept_store(tmp_path, shape) == path
    assert (path.stat().st_mtime_ns, Store.open(path).manifest.store_id) == made
    assert [entry.name for entry in tmp_path.iterdir()] == [shape.name]


def test_random_numbers_are_finite_and_do_not_repeat() -> None:
    values = random_f16(np.random.default_rng(0), (3, 1001))
    assert np.isfinite(values).all()
    assert values.shape == (3, 1001)
    assert len(np.unique(values)) > 2500


@pytest.mark.parametrize(("num_shards", "num_rows"), [(3, 3), (3, 7), (2, 1000)])
def test_every_row_of_a_sparse_store_is_located(tmp_path: Path, num_shards: int, num_rows: int) -> None:
    store = Store.open(kept_sparse_store(tmp_path, num_shards, num_rows))
    (bucket,) = store.buckets()
    assert bucket.num_rows == num_rows == store.manifest.samples
    located = bucket.locate(np.arange(num_rows))
    begins = located.offsets(bucket.spec, "latent")
    places = sorted(zip(located.shard.tolist(), begins.tolist(), strict=True))
    row_bytes = bucket.spec.column("latent").row_bytes
    apart = [b - a for (own, a), (other, b) in pairwise(places) if own == other]
    assert all(gap >= row_bytes for gap in apart), "two rows overlap"
    for shard, begin in places:
        assert begin + row_bytes <= store.shards[shard].paths.lmdb.stat().st_size


def test_the_first_sample_of_each_sparse_shard_is_found_and_reads_as_written(tmp_path: Path) -> None:
    store = Store.open(kept_sparse_store(tmp_path, 3, 600))
    (bucket,) = store.buckets()
    ids = bucket.sample_ids(np.array([0, 200, 400]))
    assert ids == [f"s{n:04d}/000000.png" for n in range(3)]
    for sample_id in ids:
        assert store.sample(sample_id)[1].id == sample_id
    latents = bucket.read(np.array([0, 200, 400, 1]), "latent")
    assert (latents[:3] != 0).any(axis=(1, 2, 3)).all()
    assert not latents[3].any(), "what is not the first row is a hole"


def test_a_sparse_store_takes_little_of_the_disk(tmp_path: Path) -> None:
    from bucketline.store.info import disk_bytes

    path = kept_sparse_store(tmp_path, 2, 20_000)
    assert disk_bytes(path) < Store.open(path).manifest.payload_bytes / 50
