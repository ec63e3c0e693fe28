"""A list of dropped rows is the one that the manifest lists, of this shard: another copy's would bring dropped samples back."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bucketline.errors import CorruptError
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.change.drop import drop
from bucketline.store.change.merge import merge
from bucketline.store.format.hashing import bytes_digest
from bucketline.store.format.manifest import read_manifest
from bucketline.store.shard.row_locator import DROPPED_FORMAT
from bucketline.store.shard.sidecar import PagedFile
from tests.kit import make_store, rewrite_manifest, samples_of

BUCKET = "train/64x64"
IDS = [sample.id for sample in samples_of({BUCKET: 6})]


def ids_of(store: Path) -> list[str]:
    bucket = Store.open(store).bucket(BUCKET)
    return bucket.sample_ids(np.arange(bucket.num_rows))


def list_of(store: Path) -> Path:
    (path,) = (store / "shards").glob("*.dropped-*")
    return path


def metadata_of(store: Path) -> dict[str, object]:
    path = list_of(store)
    return PagedFile(path, path.stat().st_size, DROPPED_FORMAT).metadata


def put(store: Path, data: bytes) -> None:
    """Put another list in the place of a store's, and let the manifest agree."""
    list_of(store).write_bytes(data)
    (shard,) = read_manifest(store).shards
    assert shard.dropped is not None
    rewrite_manifest(
        store, shards=(replace(shard, dropped=replace(shard.dropped, num_bytes=len(data), digest=bytes_digest(data))),)
    )


def test_the_list_of_another_copy_is_refused_before_a_dropped_sample_is_given_out(tmp_path: Path) -> None:
    one, other = make_store(tmp_path / "one", samples_of({BUCKET: 6})).path, tmp_path / "other"
    shutil.copytree(one, other)
    drop(one, [IDS[1]])
    drop(other, [IDS[4]])
    assert list_of(one).stat().st_size == list_of(other).stat().st_size
    shutil.copy(list_of(other), list_of(one))
    with Loader(one, LoaderConfig(batch_size=1, verify=True)) as loader, pytest.raises(CorruptError, match="dropped-2 is not"):
        next(loader.forever())
    with pytest.raises(
        CorruptError, match=r"dropped-2 is not the file that the manifest lists.*restore the file that belongs there"
    ):
        ids_of(one)


def test_a_list_names_its_shard_and_another_shards_is_refused_whatever_the_manifest_says(tmp_path: Path) -> None:
    one = make_store(tmp_path / "one", samples_of({BUCKET: 6})).path
    drop(one, [IDS[1]])
    assert metadata_of(one)["shard_id"] == read_manifest(one).shards[0].shard_id
    other = make_store(tmp_path / "other", samples_of({BUCKET: 6})).path
    drop(other, [IDS[4]])
    put(one, list_of(other).read_bytes())
    with pytest.raises(CorruptError, match="belongs to another shard"):
        ids_of(one)


def test_a_merged_stores_list_names_its_shard(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", samples_of({BUCKET: 6})).path
    drop(store, [IDS[1]])
    merge(tmp_path / "merged", [store])
    assert metadata_of(tmp_path / "merged")["shard_id"] == read_manifest(store).shards[0].shard_id
    assert json.dumps(ids_of(tmp_path / "merged")) == json.dumps(ids_of(store))
