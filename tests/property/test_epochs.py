"""Over any ranks, batches, mixtures and orders, each row comes once an epoch, and every rank has as many batches."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bucketline.errors import PlanError
from bucketline.loader import Loader, LoaderConfig, Remainder, WeightedStore
from bucketline.loader.plan.epoch_steps import EpochSteps
from tests.epoch_oracle import Micro, Oracle, epochs_of, rows_of
from tests.kit import make_store, samples_of

if TYPE_CHECKING:
    from bucketline.store import Store


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Store]:
    folder = tmp_path_factory.mktemp("stores")
    first = samples_of({"train/64x64": 9, "train/96x64": 2}, "first/")
    second = samples_of({"train/64x64": 4, "train/64x96": 5}, "second/")
    return [make_store(folder / "first", first[:6], first[6:]), make_store(folder / "second", second)]


@st.composite
def configs(draw: st.DrawFn) -> LoaderConfig:
    return LoaderConfig(
        batch_size=draw(st.integers(1, 4)),
        accumulation=draw(st.integers(1, 2)),
        epochs=draw(st.integers(1, 3)),
        remainder=draw(st.sampled_from(Remainder)),
        window=draw(st.sampled_from([None, 16, 32, 100, 4096, 0])),
        seed=draw(st.integers(0, 1 << 40)),
    )


@pytest.mark.filterwarnings("ignore:this epoch has no batch")
@given(repeats=st.lists(st.integers(1, 3), min_size=1, max_size=2), config=configs(), ranks=st.integers(1, 4))
@settings(max_examples=60)
def test_after_some_epochs_each_row_was_delivered_as_often(
    stores: list[Store], repeats: list[int], config: LoaderConfig, ranks: int
) -> None:
    epochs, remainder = config.epochs or 0, config.remainder
    shares = [WeightedStore(store=store, repeats=k) for store, k in zip(stores, repeats, strict=False)]
    found: list[list[list[Micro]]] = []  # by rank and epoch
    for rank in range(ranks):
        try:
            with Loader(shares, config, rank=rank, world_size=ranks) as loader:
                found.append(epochs_of(loader, epochs))
        except PlanError:
            assume(False)
    assert len({tuple(map(len, own)) for own in found}) == 1
    assert all(one.epoch == number for own in found for number, epoch in enumerate(own) for one in epoch)
    rows = rows_of(list(zip(stores, repeats, strict=False)))
    if config.window is None:
        model = Oracle(
            rows=rows,
            batch_size=config.batch_size or 0,
            accumulation=config.accumulation,
            ranks=ranks,
            seed=config.seed,
            remainder=Remainder(remainder),
            epochs=epochs,
        )
        assert found == [[model.epoch(number, rank) for number in range(epochs)] for rank in range(ranks)]
    count = Counter(
        row
        for own in found
        for epoch in own
        for one in epoch
        for row, weight in zip(one.ids, one.weight, strict=True)
        if weight
    )
    expected = Counter(row for own in rows.values() for row in own * epochs)
    if remainder is Remainder.DROP:
        assert not count - expected
    else:
        assert count == expected


@given(
    sizes=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 12)), min_size=1, max_size=5),
    remainder=st.sampled_from(Remainder),
    epochs=st.none() | st.integers(1, 5),
)
def test_the_steps_of_the_epochs_follow_one_another_without_gaps(
    sizes: list[tuple[int, int]], remainder: Remainder, epochs: int | None
) -> None:
    steps = EpochSteps(sizes=tuple(sizes), remainder=remainder, epochs=epochs)
    assume(steps.has_steps)
    spans = [steps.span(number) for number in range(epochs or 6)]
    assert [0, *(span.end for span in spans)] == [*(span.first for span in spans), spans[-1].end]
    for span in spans:
        assert {steps.number_at(step) for step in range(span.first, span.end)} <= {span.number}
    if epochs is not None:
        assert spans[-1].end == steps.num_steps
        with pytest.raises(PlanError, match=f"there is no step {steps.num_steps}"):
            steps.number_at(steps.num_steps or 0)
