"""Dropping whole shards: they are gone from the next generation, whatever is left of their files."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bucketline.errors import LockedError, StoreError
from bucketline.store import Store, read_manifest
from bucketline.store.change.drop_shards import drop_shards
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import lock_store
from tests.commands import call
from tests.kit import Sample, make_store, samples_of, tree

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def copy(store: Store, tmp_path: Path) -> Path:
    shutil.copytree(store.path, tmp_path / "s")
    return tmp_path / "s"


def ids_of(path: Path) -> set[str]:
    return {i for bucket in Store.open(path).buckets() for i in bucket.sample_ids(np.arange(bucket.num_rows))}


@pytest.mark.parametrize("left", [("lmdb", "extents", "index"), ("extents", "index"), ("lmdb", "index"), ("lmdb",), ()])
def test_a_shard_is_dropped_with_all_its_samples_whatever_is_left_of_it(
    copy: Path, samples: list[list[Sample]], left: tuple[str, ...]
) -> None:
    for suffix in {"lmdb", "extents", "index"} - {*left}:
        (copy / "shards" / f"g0.{suffix}").unlink()
    done = drop_shards(copy, ["g0"])
    assert (done.generation, done.shards, done.dropped, done.samples) == (3, ("g0",), 39, 14)
    assert read_manifest(copy).retired == (("g0",) if left else ())  # no run adopts it again
    named = {sample.id for sample in samples[0]} if len(left) == 3 else set()
    assert set(done.ids) == named
    assert ids_of(copy) == {sample.id for sample in samples[1]}
    assert verify(Store.open(copy), lambda _: None).corrupt == ()


def test_a_truncated_shard_is_dropped_and_named_as_far_as_it_can_be_read(copy: Path) -> None:
    path = copy / "shards" / "g0.lmdb"
    os.truncate(path, path.stat().st_size * 3 // 4)
    done = drop_shards(copy, ["g0"])
    assert (done.dropped, done.samples) == (39, 14)
    assert len(done.ids) == 39


def test_samples_that_the_shard_had_replaced_do_not_come_back(tmp_path: Path) -> None:
    samples = samples_of({"train/64x64": 9})
    make_store(tmp_path, samples, samples[:3])
    assert drop_shards(tmp_path, ["g1"]).samples == 6
    assert ids_of(tmp_path) == {sample.id for sample in samples[3:]}


def test_a_name_that_is_no_shard_is_refused_and_nothing_is_dropped(copy: Path) -> None:
    before = {name: data for name, data in tree(copy).items() if "lock" not in name}
    with pytest.raises(StoreError, match=r"has no shard 'g7'; nothing was dropped; it has g0, g1; `store info`"):
        drop_shards(copy, ["g0", "g7"])
    with lock_store(copy), pytest.raises(LockedError):
        drop_shards(copy, ["g0"])
    assert {name: data for name, data in tree(copy).items() if "lock" not in name} == before


def test_the_command_drops_shards(copy: Path) -> None:
    (copy / "shards" / "g1.lmdb").unlink()
    assert "would drop 1 shard with 14 samples, 39 would stay" in call("store", "drop", copy, "--shard", "g1", "--dry-run").out
    assert call("store", "drop", copy, "a.png", "--shard", "g1").code == 2
    ran = call("store", "drop", copy, "--shard", "g1", "--json")
    assert ran.json == {
        "generation": 3,
        "shards": ["g1"],
        "dropped": [],
        "dropped_samples": 14,
        "samples": 39,
        "dry_run": False,
    }
    assert "1 shard with 39 samples dropped, 0 stay; generation 4" in call("store", "drop", copy, "--shard", "g0").out
    assert read_manifest(copy).shards == ()
