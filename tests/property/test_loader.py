"""The loader gives what the store holds, in the plan's order, wherever it is stopped and over however many ranks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bucketline.errors import PlanError
from bucketline.loader import Loader, LoaderConfig, Remainder, WeightedStore
from bucketline.loader.batch import Batch
from bucketline.loader.plan.rng import Purpose, uniform
from bucketline.store import Store
from bucketline.store.format.hashing import sample_digest
from tests.kit import Sample, embedding, make_store

Read = tuple[int, int, int, str, dict[str, bytes]]
SMALLEST_PREFETCH = 1  # two batches are filled ahead whatever is asked


def as_read(batch: Batch) -> Read:
    values = {name: own.contiguous().view(torch.uint8).numpy().tobytes() for name, own in batch.by_name().items()}
    return batch.step, batch.micro_step, batch.epoch, batch.bucket, values


def run(store: Store, config: LoaderConfig, rank: int = 0, world_size: int = 1) -> list[Read]:
    with Loader(store, config, rank=rank, world_size=world_size) as loader:
        return [as_read(batch) for batch in loader.forever()]


@pytest.mark.parametrize("prefetch_bytes", [SMALLEST_PREFETCH, 1 << 22])
@pytest.mark.parametrize("accumulation", [1, 3])
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


def test_a_state_taken_while_batches_are_prefetched_counts_those_that_were_given(store: Store) -> None:
    with Loader(store, LoaderConfig(batch_size=1, prefetch_bytes=1 << 30)) as loader:
        batches = loader.forever()
        for step in range(5):
            assert next(batches).step == step
            assert loader.state_dict()["step"] == step + 1


@given(
    batch_size=st.integers(1, 3),
    accumulation=st.integers(1, 2),
    seed=st.integers(0, 1 << 62),
    dropout=st.sampled_from([0.0, 0.5, 1.0]),
    remainder=st.sampled_from([Remainder.CARRY, Remainder.PARTIAL]),
)
@settings(max_examples=25)
def test_two_ranks_read_what_one_rank_reads_with_twice_the_accumulation(
    store: Store, batch_size: int, accumulation: int, seed: int, dropout: float, remainder: Remainder
) -> None:
    def config(micro_batches: int) -> LoaderConfig:
        return LoaderConfig(
            batch_size=batch_size,
            accumulation=micro_batches,
            seed=seed,
            epochs=1,
            caption_dropout=dropout,
            remainder=remainder,
        )

    alone = run(store, config(2 * accumulation))
    ranks = [run(store, config(accumulation), rank, 2) for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1]) == len(alone) // 2
    for step in range(len(alone) // (2 * accumulation)):
        single = alone[step * 2 * accumulation :][: 2 * accumulation]
        double = [read for rank in ranks for read in rank[step * accumulation :][:accumulation]]
        assert [(r[0], r[2], r[3], r[4]) for r in double] == [(r[0], r[2], r[3], r[4]) for r in single]


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


@given(
    batch=st.sampled_from([{"batch_size": 2}, {"batch_pixels": 3 * 64 * 64}]),
    accumulation=st.integers(1, 2),
    remainder=st.sampled_from([Remainder.CARRY, Remainder.PARTIAL]),
    window=st.sampled_from([None, 16, 4096, 0]),
    repeats=st.integers(1, 2),
    seed=st.integers(0, 1 << 62),
    prefetch_bytes=st.sampled_from([SMALLEST_PREFETCH, 1 << 22]),
)
@settings(max_examples=6)
def test_stopped_and_resumed_at_every_batch_in_turn_a_loader_gives_the_uninterrupted_order(
    *,
    store: Store,
    batch: dict[str, Any],
    accumulation: int,
    remainder: Remainder,
    window: int | None,
    repeats: int,
    seed: int,
    prefetch_bytes: int,
) -> None:
    """Again and again: a new loader for each batch, over the state of the one before."""
    order: dict[str, Any] = {"remainder": remainder, "window": window, "seed": seed}
    config = LoaderConfig(**batch, **order, accumulation=accumulation, epochs=1, prefetch_bytes=prefetch_bytes)
    shares = WeightedStore(store=store, repeats=repeats)
    with Loader(shares, config) as loader:
        whole = [as_read(one) for one in loader.forever()]
        begin = Loader(shares, config).state_dict()
    state: dict[str, object] = begin
    for expected in whole:
        with Loader(shares, config) as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            assert as_read(next(loader.forever())) == expected
            state = loader.state_dict()


@given(seed=st.integers(0, 1 << 40), batch_size=st.integers(1, 9), dropout=st.sampled_from([0.0, 0.4]))
@settings(max_examples=20)
def test_every_row_of_a_batch_is_its_samples_own_with_one_of_its_captions(
    store: Store, samples: list[list[Sample]], seed: int, batch_size: int, dropout: float
) -> None:
    by_digest = {sample_digest(sample.id): sample for shard in samples for sample in shard}
    config = LoaderConfig(batch_size=batch_size, seed=seed, epochs=1, caption_dropout=dropout)
    with Loader(store, config) as loader:
        for batch in loader.forever():
            dropped = (uniform(batch.keys, Purpose.CAPTION_DROPOUT) < dropout).tolist()
            for n in range(batch_size):
                sample = by_digest[bytes(batch.ids[n].tolist())]
                assert sample.bucket == batch.bucket
                assert np.array_equal(batch.latents[n].numpy(), sample.latent)
                assert tuple(batch.original_size[n].tolist()) == sample.record.original_size
                assert tuple(batch.crop[n].tolist()) == sample.record.crop[:2]
                length = int(batch.token_mask[n].sum())
                assert batch.token_mask[n, :length].all()
                assert not batch.tokens[n, length:].any()
                texts = ("",) if dropped[n] or not sample.captions else sample.captions[:3]
                tokens = batch.tokens[n, :length].numpy()
                assert any(np.array_equal(tokens, embedding(text)) for text in texts)


def test_over_the_epochs_every_caption_of_a_sample_is_drawn_and_none_beyond_those_kept(tmp_path_factory: Any) -> None:
    from tests.kit import make_sample

    texts = ("one", "two words", "three of them", "the fourth is beyond")
    store = make_store(tmp_path_factory.mktemp("captions"), [make_sample("a.png", "train/64x64", texts)])
    with Loader(store, LoaderConfig(batch_size=1, epochs=60)) as loader:
        lengths = [int(batch.token_mask.sum()) for batch in loader.forever()]
    assert set(lengths) == {len(embedding(text)) for text in texts[:3]}
    assert min(lengths.count(length) for length in set(lengths)) > 10
