"""Ranks of an own loop read one generation, whatever each has found: rank 0's, the one they are given, or none."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from torch._C._distributed_c10d import FileStore

from bucketline.errors import StoreError, UsageError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader import ranks as ranks_of_loaders
from bucketline.loader.ranks import OtherRankFailedError
from bucketline.store import Store
from bucketline.train.parallel import TrainRanks
from tests.epoch_oracle import micros
from tests.kit import make_store, samples_of
from tests.serving import serving_here
from tests.unit.train.forked import ended, fork_ranks, forked

CONFIG = LoaderConfig(batch_size=2, seed=5)


def publish_twice(path: Path) -> Path:
    """Make a store of two generations, of other buckets."""
    make_store(path, samples_of({"train/64x64": 16, "train/64x128": 16}), samples_of({"train/128x64": 12}, "new/"))
    return path


def generation_of(loader: Loader) -> int:
    return loader.shares[0].store.manifest.generation


def test_a_rank_that_cannot_know_what_others_opened_is_refused_and_told_the_generation(tmp_path: Path) -> None:
    path = tmp_path / "photos.store"
    make_store(path, samples_of({"train/64x64": 16, "train/64x128": 16}))
    with Loader(path, CONFIG, rank=0, world_size=2) as first:  # no other one could be opened yet
        make_store(path, samples_of({"train/128x64": 12}, "new/"))
        with pytest.raises(UsageError, match=r"rank 1 of 2 has opened generation 2 of .*photos\.store.* same generation=2,"):
            Loader(path, CONFIG, rank=1, world_size=2)
        with Loader(path, CONFIG, rank=1, world_size=2, generation=1) as second:
            assert second.plan.digest == first.plan.digest
            assert [batch.bucket for batch in second] == [batch.bucket for batch in first]
        with Loader(path, CONFIG) as alone:
            assert generation_of(alone) == 2


def test_an_open_store_is_read_at_its_generation(tmp_path: Path) -> None:
    path = publish_twice(tmp_path / "photos.store")
    for generation in (1, 2):
        with Loader(Store.open(path, generation), CONFIG, rank=1, world_size=2) as loader:
            assert generation_of(loader) == generation


def test_a_mixture_names_a_generation_for_each_store(tmp_path: Path) -> None:
    paths = [publish_twice(tmp_path / name) for name in ("a", "b")]
    with Loader(paths, CONFIG, rank=1, world_size=2, generation=(2, 1)) as loader:
        assert [share.store.manifest.generation for share in loader.shares] == [2, 1]
        again = pickle.loads(pickle.dumps(loader))
        assert micros(again) == micros(loader)
        again.close()
    for wrong in (1, (1,), (1, 2, 2), (1, True)):
        with pytest.raises(UsageError, match=r"expected a number for each of 2 stores, such as \(2, 2\), the newest now"):
            Loader(paths, CONFIG, generation=wrong)
    for odd in (1.0, b"\x01", {1}, "1"):
        with pytest.raises(UsageError, match=r"expected a number for each of 1 stores"):
            Loader(paths[0], CONFIG, generation=cast("Any", odd))
    with pytest.raises(StoreError, match="generation 7"):
        Loader(paths[0], CONFIG, generation=7)


def test_ranks_of_a_service_name_it_too(tmp_path: Path) -> None:
    path = publish_twice(tmp_path / "photos.store")
    with serving_here(tmp_path, path) as served:
        for stores in (None, path):
            with pytest.raises(UsageError, match="the same generation=2"):
                Loader(stores, CONFIG, service=served.tcp, rank=1, world_size=2)
            with Loader(stores, CONFIG, service=served.tcp, rank=1, world_size=2, generation=1) as loader:
                assert {batch.bucket for batch in loader} == {"train/64x64", "train/64x128"}


def test_ranks_of_torch_read_what_rank_0_has_opened(tmp_path: Path) -> None:
    path = publish_twice(tmp_path / "photos.store")
    (tmp_path / "other").mkdir()
    other = publish_twice(tmp_path / "other" / "photos.store")

    def body(ranks: TrainRanks) -> None:
        options: dict[str, Any] = {"rank": ranks.rank, "world_size": 2}
        for of_rank_0 in (1, 2):
            # a rank that opens the store before or after a publication
            given = path if (ranks.is_main, of_rank_0) in ((True, 2), (False, 1)) else Store.open(path, 1)
            with Loader(given, CONFIG, **options) as loader:
                assert generation_of(loader) == of_rank_0
                if ranks.is_main:  # a copy waits for nobody
                    for one in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
                        assert generation_of(one) == of_rank_0
                        one.close()
        with Loader(path, CONFIG, rank=0, world_size=1) as alone:
            assert generation_of(alone) == 2
        with pytest.raises(StoreError, match=r"rank 1 has opened the store .*give all ranks the same stores"):
            Loader(path if ranks.is_main else other, CONFIG, **options)
        with pytest.raises(OtherRankFailedError if ranks.is_main else StoreError, match=r"rank 1 failed|is not a store"):
            Loader(path if ranks.is_main else tmp_path / "nothing", CONFIG, **options)
        with pytest.raises(UsageError, match=rf"torch\.distributed is rank {ranks.rank} of 2 here"):
            Loader(path, CONFIG, rank=ranks.rank, world_size=4)

    fork_ranks(tmp_path, body)


def test_a_rank_that_makes_a_loader_alone_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_of_loaders, "LOADER_TIME", timedelta(seconds=1))
    path = publish_twice(tmp_path / "photos.store")

    def body(ranks: TrainRanks) -> None:
        done = FileStore(str(tmp_path / "done"), 2)
        if not ranks.is_main:
            done.wait(["refused"])
            return
        with pytest.raises(UsageError, match=r"rank 0 has waited 0:00:01 for the other ranks' loaders"):
            Loader(path, CONFIG, rank=0, world_size=2)
        done.set("refused", "")

    fork_ranks(tmp_path, body, has_host_group=False)


def test_a_worker_forked_from_a_rank_does_not_answer_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_of_loaders, "LOADER_TIME", timedelta(seconds=1))
    path = publish_twice(tmp_path / "photos.store")

    def work(ranks: TrainRanks) -> None:
        with pytest.raises(UsageError, match=r"torch\.distributed is of the process that forked this one"):
            Loader(path, CONFIG, rank=ranks.rank, world_size=2)
        with Loader(path, CONFIG, rank=ranks.rank, world_size=2, generation=1) as loader:
            assert generation_of(loader) == 1

    def body(ranks: TrainRanks) -> None:
        ended(forked(work, ranks))

    fork_ranks(tmp_path, body)
