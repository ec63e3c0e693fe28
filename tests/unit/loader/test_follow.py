"""Following a store that grows: each epoch is that of the newest generation, whatever interrupts the run."""

from __future__ import annotations

import json
import shutil
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from bucketline.errors import StateError, UsageError
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.change.commit import drop
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.push_pull import push
from tests.kit import add_samples, make_sample, make_store, samples_of, store_writer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bucketline.loader.batch import Batch

ROWS = {"train/64x64": 9, "train/96x64": 4}
PARTS = [samples_of(ROWS, f"{n}/") for n in range(3)]
GROWS_IN = {0: 1, 2: 2}  # epoch, and the part that is published while it is read


def values(batch: Batch) -> tuple[Any, ...]:
    named = {name: one.tolist() for name, one in batch.by_name().items()}
    return (batch.epoch, batch.step, batch.micro_step, batch.bucket, named)


def config_of(**changes: Any) -> LoaderConfig:
    return LoaderConfig(**{"batch_size": 2, "seed": 3, "caption_dropout": 0.2, **changes})


def epochs_of(path: Path, config: LoaderConfig, **options: Any) -> Iterator[tuple[list[tuple[Any, ...]], dict[str, object]]]:
    """Yield the batches of each of five epochs, and the state amid it; the store grows as `GROWS_IN` says."""
    with Loader(path, config, follow=True, **options) as loader:
        for epoch in range(5):
            found, amid = [], loader.state_dict()
            for batch in loader:
                found.append(values(batch))
                if len(found) == 3:
                    amid = loader.state_dict()
            if (part := GROWS_IN.get(epoch)) is not None:
                with store_writer(path, shard_names=f"p{part}-{{}}") as writer:
                    add_samples(writer, PARTS[part])
            yield found, amid


def expected_of(path: Path, config: LoaderConfig) -> list[list[tuple[Any, ...]]]:
    expected = []
    for epoch, generation in enumerate([1, 2, 2, 3, 3]):
        with Loader(Store.open(path, generation), config) as ordinary:
            ordinary.set_epoch(epoch)
            expected.append([values(batch) for batch in ordinary])
    return expected


@pytest.mark.parametrize("window", [None, 4096, 0])
def test_each_epoch_is_that_of_an_ordinary_loader_of_the_newest_generation(tmp_path: Path, window: int | None) -> None:
    config = config_of(window=window, accumulation=2)
    path = make_store(tmp_path / "s", PARTS[0]).path
    found = list(epochs_of(path, config))
    assert [batches for batches, _ in found] == expected_of(path, config)
    for batches, amid in found:  # resumed in its epoch, at that epoch's generation
        with Loader(path, config, follow=True) as loader:
            loader.load_state_dict(json.loads(json.dumps(amid)))
            assert [values(batch) for batch in loader] == batches[3:]


def test_one_iteration_over_all_epochs_reads_the_same(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", PARTS[0]).path
    copied = shutil.copytree(path, tmp_path / "copied")
    config = config_of(epochs=5)
    expected = [batch for batches, _ in epochs_of(path, config) for batch in batches]
    found = []
    with Loader(copied, config, follow=True) as loader:
        for batch in loader.forever():
            found.append(values(batch))
            part = GROWS_IN.get(batch.epoch)
            if part is not None and not (copied / "shards" / f"p{part}-0.lmdb").exists():
                with store_writer(copied, shard_names=f"p{part}-{{}}") as writer:
                    add_samples(writer, PARTS[part])
    assert found == expected


@pytest.mark.slow
def test_a_service_follows_as_well(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", PARTS[0]).path
    found = list(epochs_of(path, config_of(), service="auto"))
    assert [batches for batches, _ in found] == expected_of(path, config_of())


def test_a_loop_may_renew_between_steps_and_knows_of_a_newer_generation_before_its_first_batch(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", PARTS[0]).path
    with Loader(path, config_of(accumulation=2), follow=True) as loader:
        batches, epochs = loader.forever(), []
        for _ in range(2 * len(loader)):
            epochs.append(next(batches).epoch)
            if len(epochs) == 1:
                add_to(path, 1)
            if loader.renew():
                break
            assert loader.stores[0].store.manifest.generation == 1
        assert set(epochs) == {0}
        assert (loader.epoch, loader.stores[0].store.manifest.generation) == (1, 2)
        state = loader.state_dict()
        assert not loader.renew()
        assert next(batches).epoch == 1
    with Loader(path, config_of(accumulation=2)) as loader:
        loader.load_state_dict(state)
        assert next(iter(loader)).epoch == 1


def add_to(path: Path, part: int) -> None:
    with store_writer(path, shard_names=f"p{part}-{{}}") as writer:
        add_samples(writer, PARTS[part])


def test_a_state_is_resumed_at_its_generation_and_the_next_epoch_reads_the_newest(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", PARTS[0]).path
    with Loader(path, config_of(), follow=True) as loader:
        next(iter(loader))
        state = loader.state_dict()
    add_to(path, 1)
    with Loader(path, config_of(), follow=True) as loader:
        loader.load_state_dict(state)
        assert loader.stores[0].store.manifest.generation == 1
        assert loader.state_dict() == state
        names = [{name[0] for batch in loader for name in loader.names(batch)} for _ in range(2)]
        assert names == [{"0"}, {"0", "1"}]
    with Loader(path, config_of()) as loader, pytest.raises(StateError, match="generation was 1"):
        loader.load_state_dict(state)


def test_a_store_in_object_storage_is_followed(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    bucket = ObjectFolder.open(f"file://{tmp_path}/bucket")
    path = make_store(tmp_path / "s", PARTS[0]).path
    push(path, bucket)
    with Loader(f"file://{tmp_path}/bucket", config_of(cache=str(tmp_path / "cache")), follow=True) as loader:
        next(iter(loader))
        add_to(path, 1)
        push(path, bucket)
        assert {name[0] for batch in loader for name in loader.names(batch)} == {"0", "1"}


@pytest.mark.parametrize("why", ["no rows", "a longer caption"])
def test_a_generation_that_cannot_be_read_is_left_out_with_a_warning(tmp_path: Path, why: str) -> None:
    path = make_store(tmp_path / "s", PARTS[0]).path
    with Loader(path, config_of(pad_to=10), follow=True) as loader:
        expected = len(list(loader))
        if why == "no rows":
            drop(path, [sample.id for sample in PARTS[0]])
        else:
            words = "one word after another, until there are more than ever before"
            with store_writer(path, shard_names="long-{}") as writer:
                add_samples(writer, [make_sample("long.png", "train/64x64", (words,))])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert abs(len(list(loader)) - expected) <= 2
        assert loader.stores[0].store.manifest.generation == 1
        message = "has no rows in the split" if why == "no rows" else "pad_to is 10, and the longest caption of"
        assert [str(one.message).partition(":")[0] for one in caught] == ["generation 2 is not read"]
        assert message in str(caught[0].message)


def test_ranks_that_cannot_agree_are_refused(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", PARTS[0]).path
    with pytest.raises(UsageError, match=r"follow is set for rank 0 of 2, .* torch.distributed is not initialised"):
        Loader(path, config_of(), world_size=2, follow=True)
