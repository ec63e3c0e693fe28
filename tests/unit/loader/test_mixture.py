"""Several stores are read as one: every row as often as requested, joined only where they were made alike."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import FileStore

from bucketline.errors import FingerprintError, PlanError, StoreError, UsageError
from bucketline.loader import Loader, LoaderConfig, WeightedStore
from bucketline.loader import ranks as ranks_of_loaders
from bucketline.loader.mixture import StoreArgument, join, open_weighted
from bucketline.loader.ranks import OtherRankFailedError
from bucketline.store import Store
from bucketline.store.format.block import sample_digest
from bucketline.store.format.manifest import read_manifest
from bucketline.train.parallel import TrainRanks
from tests.epoch_oracle import micros
from tests.kit import Sample, embedding, make_store, rewrite_manifest, samples_of
from tests.serving import serving_here
from tests.unit.train.forked import ended, fork_ranks, forked

FIRST = {"train/64x64": 11, "train/96x64": 4, "val/64x64": 3}
SECOND = {"train/64x64": 5, "train/64x128": 7}
THIRD = {"train/96x64": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Store, list[Sample]]]:
    """Three stores: of two shards, one and one. The second and the first have a sample of the same id."""
    folder = tmp_path_factory.mktemp("several")
    one, two, three = samples_of(FIRST, "a/"), [*samples_of(SECOND, "b/"), samples_of(FIRST, "a/")[0]], samples_of(THIRD, "c/")
    return [
        (make_store(folder / "a.store", one[:9], one[9:]), one),
        (make_store(folder / "b.store", two), two),
        (make_store(folder / "c.store", three), three),
    ]


def test_one_store_that_comes_once_is_not_wrapped(made: list[tuple[Store, list[Sample]]]) -> None:
    store = made[0][0]
    assert join(open_weighted(store)) is store
    assert isinstance(join(open_weighted(store.path)), Store)


@given(
    repeats=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    window=st.sampled_from([None, 16, 4096, 0]),
    batch_size=st.integers(1, 5),
    epochs=st.integers(1, 2),
    seed=st.integers(0, 1 << 40),
)
@settings(max_examples=40)
def test_a_pass_delivers_every_sample_as_often_as_its_stores_say(
    made: list[tuple[Store, list[Sample]]], repeats: list[int], window: int | None, batch_size: int, epochs: int, seed: int
) -> None:
    shares = [WeightedStore(store=store, repeats=k) for (store, _), k in zip(made, repeats, strict=False)]
    expected: dict[str, Counter[bytes]] = {}
    own = {sample_digest(s.id): s for (_, samples), _ in zip(made, repeats, strict=False) for s in samples}
    for (_, samples), k in zip(made, repeats, strict=False):
        for sample in samples:
            if sample.record.split == "train":
                expected.setdefault(sample.bucket, Counter())[sample_digest(sample.id)] += k * epochs
    found: dict[str, Counter[bytes]] = {}
    config = LoaderConfig(batch_size=batch_size, epochs=epochs, seed=seed, window=window, verify=seed % 4 == 0)
    with Loader(shares, config) as loader:
        for batch in loader.forever():
            for n, digest in enumerate(bytes(row) for row in batch.ids.tolist()):
                found.setdefault(batch.bucket, Counter())[digest] += int(batch.weight[n])
                sample = own[digest]
                assert np.array_equal(batch.latents[n].numpy(), sample.latent)
                tokens = batch.tokens[n, : int(batch.token_mask[n].sum())].numpy()
                assert any(np.array_equal(tokens, embedding(text)) for text in sample.captions[:3] or ("",))
    assert found == expected


def test_rows_are_numbered_store_after_store_and_repeat_after_repeat(made: list[tuple[Store, list[Sample]]]) -> None:
    one, two = made[0][0], made[1][0]
    joined = join([WeightedStore(store=one, repeats=2), WeightedStore(store=two, repeats=3)])
    bucket = joined.bucket("train/64x64")
    ids = [*one.bucket("train/64x64").sample_ids(np.arange(11)), *two.bucket("train/64x64").sample_ids(np.arange(6))]
    assert bucket.num_rows == 2 * 11 + 3 * 6
    assert bucket.sample_ids(np.arange(40)) == ids[:11] * 2 + ids[11:] * 3
    assert [b.name for b in joined.buckets("train")] == ["train/64x128", "train/64x64", "train/96x64"]
    assert joined.bucket("train/64x128").num_rows == 21
    with pytest.raises(StoreError, match="has the rows 0 to 39, requested were 40 to 40"):
        bucket.locate(np.array([40]))
    with pytest.raises(StoreError, match=r"a\.store and .*b\.store has no bucket 'train/8x8'"):
        joined.bucket("train/8x8")


def test_the_same_store_twice_is_refused_with_what_to_give(made: list[tuple[Store, list[Sample]]]) -> None:
    path = made[0][0].path
    with pytest.raises(UsageError, match=rf"are the same store .*: {path}:4"):
        open_weighted([path, WeightedStore(store=made[0][0], repeats=3)])
    with pytest.raises(UsageError, match="no store is given"):
        open_weighted([])
    with pytest.raises(StoreError):
        open_weighted(f"{path}:")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"encoders": {"vae": {"scaling_factor": 0.5}, "text_encoder": {"width": 5}}}, "encoders.vae.scaling_factor"),
        ({"rules": {"grid": "another", "resampling": "nearest"}}, "rules.resampling"),
    ],
)
def test_stores_that_were_made_differently_are_refused_naming_field_stores_and_values(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    one = make_store(tmp_path / "a.store", samples_of(THIRD, "a/"))
    make_store(tmp_path / "b.store", samples_of(SECOND, "b/"))
    rewrite_manifest(tmp_path / "b.store", **changes)
    with pytest.raises(FingerprintError) as error:
        Loader([one, tmp_path / "b.store"], LoaderConfig(batch_size=1))
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 'a.store'} and {tmp_path / 'b.store'} cannot be read together: {field} is ")
    assert "0.18215 in the first and 0.5 in the second" in message or "None in the first and nearest in the second" in message


def test_buckets_whose_columns_differ_are_refused_and_others_of_the_same_stores_are_not(tmp_path: Path) -> None:
    make_store(tmp_path / "a.store", samples_of({"train/64x64": 2}, "a/"))
    make_store(tmp_path / "b.store", samples_of({"train/64x64": 2}, "b/", dtype="F32"), dtype="F32")
    make_store(tmp_path / "c.store", samples_of({"train/96x64": 2}, "c/", dtype="F32"), dtype="F32")
    with pytest.raises(FingerprintError, match=r"buckets\.train/64x64\.columns\.latent\.dtype is F16 in the first and F32 in"):
        Loader([tmp_path / "a.store", tmp_path / "b.store"], LoaderConfig(batch_size=1))
    with Loader([tmp_path / "a.store", tmp_path / "c.store"], LoaderConfig(batch_size=1, epochs=1)) as loader:
        assert Counter(str(batch.latents.dtype) for batch in loader) == {"torch.float16": 2, "torch.float32": 2}


def test_another_grid_and_another_share_held_out_are_no_reason_to_refuse(tmp_path: Path) -> None:
    make_store(tmp_path / "a.store", samples_of(THIRD, "a/"))
    make_store(tmp_path / "b.store", samples_of(SECOND, "b/"))
    rewrite_manifest(tmp_path / "b.store", rules={"grid": "another", "val_fraction": "0.5"})
    with Loader([tmp_path / "a.store", tmp_path / "b.store"], LoaderConfig(batch_size=1, epochs=1)) as loader:
        assert len(list(loader)) == 14


def test_a_word_for_a_store_ends_in_its_repeats_unless_a_path_of_that_name_is_there(tmp_path: Path) -> None:
    make_store(tmp_path / "a.store", samples_of(THIRD))
    spelt = f"{tmp_path}/a.store:3"
    for text, times in ((spelt, 3), (f"{spelt}.0", 3), (f"{tmp_path}/a.store:0.5", 0.5)):
        found = StoreArgument.parse(text)
        assert (found.path, found.repeats, type(found.repeats)) == (tmp_path / "a.store", times, type(times))
    for text in ("a.store", "a:b", "a.store:", ":3", "c:/d", "a.store:-1", "a.store:1e1", "a.store:²"):
        assert (StoreArgument.parse(text).path, StoreArgument.parse(text).repeats) == (Path(text), 1)
    for none in ("0", "0.0"):
        with pytest.raises(UsageError, match=f"has {none} repeats, expected a number above 0"):
            StoreArgument.parse(f"a.store:{none}")
    (share,) = open_weighted(spelt)
    assert share.repeats == 3
    make_store(Path(spelt), samples_of(SECOND))
    (share,) = open_weighted(Path(spelt))
    assert share.repeats == 1
    assert share.store.manifest.store_id == read_manifest(Path(spelt)).store_id


# Ranks of an own loop read one generation, whatever each has found: rank 0's, the one they are given, or none.


CONFIG = LoaderConfig(batch_size=2, seed=5)


def publish_twice(path: Path) -> Path:
    make_store(path, samples_of({"train/64x64": 16, "train/64x128": 16}), samples_of({"train/128x64": 12}, "new/"))
    return path


def generation_of(loader: Loader) -> int:
    return loader.stores[0].store.manifest.generation


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
        assert [share.store.manifest.generation for share in loader.stores] == [2, 1]
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
        twice: list[WeightedStore | Path] = [WeightedStore(path, 1 + ranks.rank), other]
        with pytest.raises(StoreError, match=r"rank 1 has opened .* x 2 .* the store .* x 1 .*the same repeats"):
            Loader(twice, CONFIG, **options)
        with pytest.raises(PlanError, match=r"rank 1 has the plan .*window 512.* rank 0 the plan .*window 256"):
            Loader(path, replace(CONFIG, window=256 * (1 + ranks.rank)), **options)
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
