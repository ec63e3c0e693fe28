"""Two ranks over a saved dataset with splits: what one rank lists, the other packs into the same split."""

from __future__ import annotations

from typing import TYPE_CHECKING

import datasets
import pytest

from bucketline.store import Store
from tests.commands import forked_ranks
from tests.models import SMALL, png

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
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
