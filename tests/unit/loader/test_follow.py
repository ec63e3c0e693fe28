"""Following a store that grows: at each step the plan of the generation that was taken up, whatever interrupts the run."""

from __future__ import annotations

import json
import time
import warnings
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bucketline.errors import PlanError, StateError, UsageError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.state import parse_state
from bucketline.store import Store
from bucketline.store.change.drop import drop
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.push import push
from tests.kit import add_samples, make_sample, make_store, samples_of, store_writer

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.loader.batch import Batch

ROWS = {"train/64x64": 9, "train/96x64": 4}
PARTS = [samples_of(ROWS, f"{n}/") for n in range(3)]
SCHEDULE = ((0, 1), (4, 2), (11, 3))  # step and generation
STEPS = 20


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a generation for each part."""
    return make_store(tmp_path_factory.mktemp("follow") / "grown.store", *PARTS).path


def values(batch: Batch) -> tuple[Any, ...]:
    return (batch.step, batch.micro_step, batch.bucket, {name: one.tolist() for name, one in batch.by_name().items()})


def config_of(**changes: Any) -> LoaderConfig:
    return LoaderConfig(**{"batch_size": 2, "seed": 3, "caption_dropout": 0.2, **changes})


def follow(
    store: Path,
    config: LoaderConfig,
    begin: dict[str, object] | None = None,
    steps: int = STEPS,
    *,
    rank: int = 0,
    world_size: int = 1,
    service: str | None = None,
) -> tuple[list[tuple[Any, ...]], dict[str, object]]:
    """Follow the schedule up to a step, from the beginning or a state; return the batches and the state."""
    generation = 1 if begin is None else parse_state(begin).generations[0]
    taken = []
    with Loader(Store.open(store, generation), config, rank=rank, world_size=world_size, service=service) as loader:
        if begin is not None:
            loader.load_state_dict(json.loads(json.dumps(begin)))
        batches, later = loader.forever(), dict(SCHEDULE)
        while int(str(loader.state_dict()["step"])) < steps:
            at = loader.state_dict()
            if at["micro_step"] == 0 and (newer := later.get(int(str(at["step"])))) is not None:
                loader.take_up([newer])
            taken.append(values(next(batches)))
        return taken, loader.state_dict()


@pytest.mark.parametrize("window", [None, 4096, 0])
def test_each_step_is_that_of_an_ordinary_loader_of_the_generation_taken_up(grown: Path, window: int | None) -> None:
    config = config_of(window=window, accumulation=2)
    found, state = follow(grown, config)
    assert parse_state(state).generations == (3,)
    expected = []
    for (begin, generation), (end, _) in zip(SCHEDULE, [*SCHEDULE[1:], (STEPS, 0)], strict=True):
        with Loader(Store.open(grown, generation), config) as ordinary:
            ordinary.load_state_dict({**ordinary.state_dict(), "step": begin})
            expected += [values(batch) for batch in islice(ordinary.forever(), 2 * (end - begin))]
    assert found == expected


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_follower_that_is_stopped_at_any_step_goes_on_as_if_it_had_not_been(grown: Path, world_size: int) -> None:
    for rank in range(world_size):
        config = config_of(accumulation=2 // world_size)
        whole, _ = follow(grown, config, rank=rank, world_size=world_size)
        for stop in (3, 4, 5, 11, 15):
            first, state = follow(grown, config, None, stop, rank=rank, world_size=world_size)
            second, _ = follow(grown, config, state, rank=rank, world_size=world_size)
            assert first + second == whole, stop


@pytest.mark.slow
def test_a_service_follows_as_well(grown: Path) -> None:
    assert follow(grown, config_of(), service="auto")[0] == follow(grown, config_of())[0]


def until(loader: Loader, generation: int) -> list[Batch]:
    """Iterate until a generation is taken up, and for a step more."""
    taken, end = [], time.monotonic() + 60
    for batch in loader.forever():
        taken.append(batch)
        if loader.shares[0].store.manifest.generation == generation:
            return taken
        assert time.monotonic() < end
        time.sleep(0.01)
    raise AssertionError


def test_a_follower_takes_up_what_is_published_while_it_iterates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bucketline.loader.follow.LOOK_EVERY_S", 0.02)
    with store_writer(tmp_path / "s", shard_names="g{}") as writer:
        add_samples(writer, PARTS[0])
        writer.publish()
        with Loader(tmp_path / "s", config_of(), follow=True) as loader:
            next(loader.forever())
            add_samples(writer, PARTS[1])
            writer.publish()
            until(loader, 2)
            state = loader.state_dict()
            add_samples(writer, PARTS[2])
            writer.publish()
            until(loader, 3)
            names = {name for batch in islice(loader.forever(), 40) for name in loader.names(batch)}
            assert {name[0] for name in names} == {"0", "1", "2"}
    with Loader(tmp_path / "s", config_of(), follow=True) as loader:  # goes back to the state's generation
        loader.load_state_dict(state)
        assert loader.shares[0].store.manifest.generation == 2
        assert loader.state_dict() == state
    with Loader(tmp_path / "s", config_of()) as loader, pytest.raises(StateError, match="generation was 2"):
        loader.load_state_dict(state)


def test_a_store_in_object_storage_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bucketline.loader.follow.ASK_EVERY_S", 0.02)
    (tmp_path / "bucket").mkdir()
    bucket = ObjectFolder.open(f"file://{tmp_path}/bucket")
    with store_writer(tmp_path / "s", shard_names="g{}") as writer:
        add_samples(writer, PARTS[0])
        writer.publish()
        push(tmp_path / "s", bucket)
        config = config_of(cache=str(tmp_path / "cache"))
        with Loader(f"file://{tmp_path}/bucket", config, follow=True) as loader:
            next(loader.forever())
            add_samples(writer, PARTS[1])
            writer.publish()
            push(tmp_path / "s", bucket)
            until(loader, 2)
            names = {name for batch in islice(loader.forever(), 40) for name in loader.names(batch)}
            assert {name[0] for name in names} == {"0", "1"}


def test_a_generation_without_rows_to_read_is_not_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bucketline.loader.follow.LOOK_EVERY_S", 0.0)
    made = make_store(tmp_path / "s", PARTS[0])
    drop(made.path, [sample.id for sample in PARTS[0]])
    with Loader(Store.open(made.path, 1), config_of(), follow=True) as loader, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        end = time.monotonic() + 60
        for _ in loader.forever():
            time.sleep(0.01)
            if caught or time.monotonic() > end:
                break
        assert loader.shares[0].store.manifest.generation == 1
    assert [str(one.message).partition(":")[0] for one in caught] == ["generation 2 is not taken up"]
    with Loader(Store.open(made.path, 1), config_of()) as loader:
        before = loader.state_dict()
        with pytest.raises(PlanError, match="has no rows in the split"):
            loader.take_up([2])
        assert loader.state_dict() == before
        assert isinstance(next(loader.forever()).latents, torch.Tensor)


def test_a_generation_whose_captions_would_be_cut_is_not_taken_up_and_the_iteration_continues(tmp_path: Path) -> None:
    long = make_sample("long.png", "train/64x64", ("one word after another, until there are more than ever before",))
    made = make_store(tmp_path / "s", PARTS[0], [long])
    with Loader(Store.open(made.path, 1), config_of(pad_to=10)) as loader:
        batches = loader.forever()
        next(batches)
        with pytest.raises(UsageError, match="pad_to is 10, and the longest caption of"):
            loader.take_up([2])
        assert next(batches).step == 1


def test_generations_are_taken_up_between_steps_only(grown: Path) -> None:
    with Loader(Store.open(grown, 1), config_of(accumulation=2)) as loader:
        batches = loader.forever()
        next(batches)
        with pytest.raises(UsageError, match=r"2 cannot be taken up within step 0 \(micro-batch 1 of 2\)"):
            loader.take_up([2])
        next(batches)
        loader.take_up([2])
        assert next(batches).step == 1


@pytest.mark.parametrize(("config", "ranks"), [(config_of(epochs=1), 1), (config_of(), 2)])
def test_ranks_or_epochs_whose_steps_nobody_agrees_on_are_refused(grown: Path, config: LoaderConfig, ranks: int) -> None:
    with pytest.raises(UsageError, match="follow is set, with"):
        Loader(grown, config, world_size=ranks, follow=True)
