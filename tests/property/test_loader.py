"""The loader gives what the store holds, in the plan's order, wherever it is stopped and over however many ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bucketline.errors import PlanError
from bucketline.loader import Loader, LoaderConfig, Remainder, WeightedStore
from bucketline.loader.batch import Batch
from bucketline.store import Store
from tests.kit import embedding, make_store

Read = tuple[int, int, int, str, dict[str, bytes]]
SMALLEST_PREFETCH = 1  # two batches are filled ahead whatever is asked


def as_read(batch: Batch) -> Read:
    values = {name: own.contiguous().view(torch.uint8).numpy().tobytes() for name, own in batch.by_name().items()}
    return batch.step, batch.micro_step, batch.epoch, batch.bucket, values


def run(store: Store, config: LoaderConfig, rank: int = 0, world_size: int = 1) -> list[Read]:
    with Loader(store, config, rank=rank, world_size=world_size) as loader:
        return [as_read(batch) for batch in loader.forever()]


@pytest.mark.parametrize(("prefetch_bytes", "accumulation"), [(SMALLEST_PREFETCH, 3), (1 << 22, 1)])
def test_a_loader_resumed_after_any_batch_goes_on_as_if_nothing_had_happened(
    store: Store, prefetch_bytes: int, accumulation: int
) -> None:
    config = LoaderConfig(
        batch_size=2, accumulation=accumulation, epochs=2, seed=5, caption_dropout=0.3, prefetch_bytes=prefetch_bytes
    )
    whole = run(store, config)
    assert len(whole) > 12
    for stop in range(len(whole) + 1):
        with Loader(store, config) as first:
            taken = [as_read(batch) for _, batch in zip(range(stop), first.forever(), strict=False)]
            if stop == len(whole):
                continue
            state = first.state_dict()
        with Loader(store, config) as second:
            second.load_state_dict(state)
            assert taken + [as_read(batch) for batch in second.forever()] == whole


@given(
    batch=st.sampled_from([{"batch_size": 1}, {"batch_size": 3}, {"batch_pixels": 3 * 64 * 64}, {"batch_tokens": 200}]),
    remainder=st.sampled_from(Remainder),
    window=st.sampled_from([None, 16, 4096, 0]),
    repeats=st.integers(1, 3),
    seed=st.integers(0, 1 << 62),
    stops=st.lists(st.integers(0, 3), min_size=4, max_size=4),
)
@settings(max_examples=25)
def test_a_run_goes_from_one_rank_to_two_to_four_and_back(
    store: Store,
    batch: dict[str, Any],
    remainder: Remainder,
    window: int | None,
    repeats: int,
    seed: int,
    stops: list[int],
) -> None:
    """Elastic resume: the global batches stay, ranks and accumulation change between steps, in the midst of an epoch."""

    def config(world_size: int) -> LoaderConfig:
        order: dict[str, Any] = {"remainder": remainder, "window": window, "seed": seed}
        return LoaderConfig(**batch, **order, accumulation=4 // world_size, caption_dropout=0.2)

    shares = WeightedStore(store=store, repeats=repeats)
    try:
        alone = Loader(shares, config(1))
    except PlanError:
        assume(condition=False)
    with alone as loader:
        expected = [as_read(one) for _, one in zip(range(4 * sum(stops)), loader.forever(), strict=False)]
    found: list[Read] = []
    state: dict[str, object] | None = None
    for world_size, steps in zip((1, 2, 4, 1), stops, strict=True):
        own: list[list[Read]] = []
        states: list[dict[str, object]] = []
        for rank in range(world_size):
            with Loader(shares, config(world_size), rank=rank, world_size=world_size) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                own.append([as_read(one) for _, one in zip(range(steps * 4 // world_size), loader.forever(), strict=False)])
                states.append(loader.state_dict())
        for step in range(steps):
            found += [read for rank in own for read in rank[step * 4 // world_size :][: 4 // world_size]]
        assert all(one == states[0] for one in states)
        state = states[0]
        assert state["step"] == len(found) // 4
    assert [(r[0], r[2], r[3], r[4]) for r in found] == [(r[0], r[2], r[3], r[4]) for r in expected]


def test_over_the_epochs_every_caption_of_a_sample_is_drawn_and_none_beyond_those_kept(tmp_path_factory: Any) -> None:
    from tests.kit import make_sample

    texts = ("one", "two words", "three of them", "the fourth is beyond")
    store = make_store(tmp_path_factory.mktemp("captions"), [make_sample("a.png", "train/64x64", texts)])
    with Loader(store, LoaderConfig(batch_size=1, epochs=60)) as loader:
        lengths = [int(batch.token_mask.sum()) for batch in loader.forever()]
    assert set(lengths) == {len(embedding(text)) for text in texts[:3]}
    assert min(lengths.count(length) for length in set(lengths)) > 10
