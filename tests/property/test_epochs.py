"""Over any ranks, batches, mixtures and orders, each row comes once an epoch, and every rank has as many batches.

Whatever is done between batches: loops, states, copies, forks and other epochs lead where the oracle says.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bucketline.errors import PlanError, UsageError
from bucketline.loader import Loader, LoaderConfig, Remainder, WeightedStore
from bucketline.loader.plan.epoch_steps import EpochSteps
from bucketline.store import Store
from tests.epoch_oracle import Micro, Oracle, epochs_of, micros, rows_of
from tests.kit import make_store, samples_of
from tests.leftovers import in_child
from tests.serving import serving_here


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


@dataclass(frozen=True, slots=True)
class Place:
    """A place within the epochs, by the oracle; each method returns the one that follows."""

    oracle: Oracle
    rewinds: bool
    epoch: int = 0
    at: int = 0  # micro-batches of this epoch that were read
    is_begun: bool = False  # by a `for`, so that the next one reads the next epoch

    def to(self, epoch: int, at: int = 0, *, is_begun: bool = False) -> Place:
        return Place(self.oracle, self.rewinds, epoch, at, is_begun)

    def of(self, number: int) -> list[Micro]:
        is_over = self.oracle.epochs is not None and number >= self.oracle.epochs
        return [] if is_over else self.oracle.epoch(number)

    @property
    def following(self) -> int:
        return 0 if self.rewinds else self.epoch + 1

    @property
    def is_done(self) -> bool:
        return self.at == len(self.of(self.epoch)) and (self.is_begun or self.at > 0)

    @property
    def next_epoch(self) -> int:
        return self.following if self.is_begun or self.is_done else self.epoch

    def read(self, count: int) -> tuple[list[Micro] | None, Place]:
        """Return what a `for` of at most so many batches reads; None if it is refused."""
        begun = self.to(self.following) if self.is_begun or self.is_done else self
        if self.oracle.epochs is not None and begun.epoch >= self.oracle.epochs:
            return None, self
        found = self.of(begun.epoch)[begun.at : begun.at + count]
        return found, self.to(begun.epoch, begun.at + len(found), is_begun=True)

    def read_on(self, count: int) -> tuple[list[Micro], Place]:
        found: list[Micro] = []
        now = self
        while len(found) < count:
            if now.at == len(now.of(now.epoch)):
                if self.oracle.epochs is not None and not self.rewinds and now.epoch + 1 >= self.oracle.epochs:
                    break
                now = now.to(now.following)
                continue
            found.append(now.of(now.epoch)[now.at])
            now = now.to(now.epoch, now.at + 1, is_begun=True)
        return found, now

    def resumed(self) -> Place:
        return self.to(self.following) if self.is_done else self.to(self.epoch, self.at)


class Act(NamedTuple):
    """An act with a loader: a loop of at most so many batches, and another act within its last pass; or one between loops."""

    kind: str
    most: int = 0  # or the number of an epoch
    within: str = "nothing"


COPIES: dict[str, Callable[[Loader], Loader]] = {
    "pickle": lambda loader: pickle.loads(pickle.dumps(loader)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}
acts = st.one_of(
    st.builds(
        Act,
        kind=st.sampled_from(["for", "forever"]),
        most=st.integers(1, 20),
        within=st.sampled_from(["nothing", "fork", "save", *COPIES]),
    ),
    st.builds(Act, kind=st.sampled_from(["fork", "save", "load", "load elsewhere", "close", *COPIES])),
    st.builds(Act, kind=st.just("set_epoch"), most=st.integers(0, 3)),
)


class Walk:
    """A loader and the oracle's place, side by side."""

    def __init__(self, made: Callable[[], Loader], oracle: Oracle, *, rewinds: bool) -> None:
        self._made, self.loader, self.place = made, made(), Place(oracle, rewinds)
        self.saved, self.saved_place = self.loader.state_dict(), self.place

    def do(self, act: Act) -> None:
        if act.kind == "for":
            self.loop(self.loader.__iter__, self.place.read(act.most), act)
        elif act.kind == "forever":
            self.loop(self.loader.forever, self.place.read_on(act.most), act)
        else:
            self.between(act.kind, act.most)
        assert self.loader.epoch == self.place.next_epoch
        assert len(self.loader) == len(self.place.of(self.place.next_epoch))

    def loop(self, begin: Callable[[], Iterator[Any]], expected: tuple[list[Micro] | None, Place], act: Act) -> None:
        wanted, self.place = expected
        if wanted is None:
            with pytest.raises(UsageError, match="delivered"):
                next(begin())
            return
        batches = begin()
        assert micros(islice(batches, act.most)) == wanted
        self.between(act.within, 0)
        if len(wanted) < act.most:
            assert next(batches, None) is None

    def between(self, kind: str, number: int) -> None:
        if kind == "fork":
            self.fork()
        elif kind == "save":
            self.saved, self.saved_place = self.loader.state_dict(), self.place.resumed()
        elif kind == "load elsewhere":
            self.replace(self._made())
        elif kind == "set_epoch":
            self.set_epoch(number)
        elif kind == "close":
            self.loader.close()
        elif kind in COPIES:
            before = self.loader.state_dict()
            self.replace(COPIES[kind](self.loader))
            assert self.place.rewinds or self.loader.state_dict() == before
        if kind.startswith("load"):
            self.loader.load_state_dict(self.saved)
            self.place = self.saved_place

    def replace(self, other: Loader) -> None:
        self.loader.close()
        self.loader = other

    def set_epoch(self, number: int) -> None:
        epochs = self.place.oracle.epochs
        if epochs is not None and number >= epochs:
            with pytest.raises(UsageError, match=f"epoch is {number}, expected"):
                self.loader.set_epoch(number)
            return
        self.loader.set_epoch(number)
        if number != self.place.epoch or self.place.is_begun:
            self.place = self.place.to(number)

    def fork(self) -> None:
        """Let a process that is forked off read what the next `for` here would."""
        wanted, _ = self.place.read(1000)

        def read() -> bool:
            if wanted is None:
                with pytest.raises(UsageError, match="delivered"):
                    next(iter(self.loader))
            return wanted is None or micros(self.loader) == wanted

        assert in_child(read) == 0


@st.composite
def walked_configs(draw: st.DrawFn) -> LoaderConfig:
    rewinds = draw(st.booleans())
    return LoaderConfig(
        batch_size=draw(st.integers(1, 4)),
        accumulation=draw(st.integers(1, 2)),
        epochs=None if rewinds else draw(st.none() | st.integers(1, 3)),
        remainder=draw(st.sampled_from(Remainder)),
        rewind=rewinds,
        seed=draw(st.integers(0, 1 << 40)),
    )


def walk(stores: list[Store], config: LoaderConfig, acts: list[Act], service: str | None) -> None:
    oracle = Oracle(
        rows=rows_of([(store, 1) for store in stores]),
        batch_size=config.batch_size or 0,
        accumulation=config.accumulation,
        seed=config.seed,
        remainder=Remainder(config.remainder),
        epochs=config.num_epochs,
    )
    try:
        own = Walk(lambda: Loader(stores, config, service=service), oracle, rewinds=config.rewind)
    except PlanError:
        assume(False)
    try:
        for act in acts:
            own.do(act)
    finally:
        own.loader.close()


whatever = pytest.mark.filterwarnings("ignore:this epoch has no batch", "ignore:This process:DeprecationWarning")


@whatever
@given(config=walked_configs(), done=st.lists(acts, min_size=1, max_size=8))
@settings(max_examples=70)
def test_loops_states_copies_and_forks_in_any_sequence_lead_where_the_oracle_says(
    stores: list[Store], config: LoaderConfig, done: list[Act]
) -> None:
    walk(stores, config, done, None)


@pytest.mark.slow
@whatever
def test_so_they_do_with_a_service(stores: list[Store], tmp_path: Path) -> None:
    with serving_here(tmp_path, *(store.path for store in stores)) as served:

        @given(config=walked_configs(), done=st.lists(acts, min_size=1, max_size=8))
        @settings(max_examples=100)
        def walked(config: LoaderConfig, done: list[Act]) -> None:
            walk(stores, config, done, f"unix:{served.socket}")

        walked()


@pytest.mark.slow
@whatever
@given(config=walked_configs(), done=st.lists(acts, min_size=3, max_size=8))
@settings(max_examples=5)
def test_so_they_do_with_a_private_service(stores: list[Store], config: LoaderConfig, done: list[Act]) -> None:
    walk(stores, config, done, "auto")
