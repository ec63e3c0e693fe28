"""Two ranks over sources other than a folder: a saved dataset with splits, tars."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pytest
import webdataset

from bucketline.store import Store
from tests.commands import call, forked_ranks
from tests.models import SMALL, png

pytestmark = pytest.mark.slow


def test_two_ranks_pack_each_split_where_it_belongs(tmp_path: Path, model: Path) -> None:
    datasets.disable_progress_bars()
    features = datasets.Features({"image": datasets.Image(), "prompt": datasets.Value("string")})
    parts = {}
    for name, count in (("train", 8), ("validation", 8), ("test", 4)):
        rows = {"image": [{"bytes": png(20, 30, n), "path": f"{n}.png"} for n in range(count)], "prompt": ["a cat"] * count}
        parts[name] = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "d")
    asked = (tmp_path / "d", tmp_path / "s", "--model", model, *SMALL, "--json")
    ran = forked_ranks(2, "ingest", "pack", *asked).done()
    assert (ran.json["packed"], ran.json["captions_from"]) == (16, {"column prompt": 16})
    store = Store.open(tmp_path / "s")
    assert len(store.shards) == 2
    assert {split: sum(bucket.num_rows for bucket in store.buckets(split)) for split in ("train", "val")} == {
        "train": 8,
        "val": 8,
    }


def test_two_ranks_share_tars_and_leave_them_alone_again(tmp_path: Path, model: Path) -> None:
    for shard in range(2):
        with webdataset.TarWriter(f"{tmp_path}/{shard}.tar", encoder=False) as writer:
            for n in range(12):
                writer.write({"__key__": f"{n:03d}", "png": png(20 + n, 30, n), "txt": b"a red cat"})
    pattern = f"{tmp_path}/{{0,1}}.tar"
    asked = [pattern, tmp_path / "s", "--model", model, *SMALL, "--json"]
    both = forked_ranks(2, "ingest", "pack", *asked).done()
    assert (both.json["found"], both.json["packed"]) == (24, 24)
    store = Store.open(tmp_path / "s")
    ids = [i for bucket in store.buckets() for i in bucket.sample_ids(np.arange(bucket.num_rows))]
    assert sorted(ids) == [f"{shard}/{n:03d}.png" for shard in range(2) for n in range(12)]
    assert len({shard.name for shard in store.shards}) == 2
    again = call("ingest", "pack", *asked).json
    assert (again["packed"], again["unchanged"], again["generation"]) == (0, 24, both.json["generation"])
