"""Batches located and read ahead before they are filled: the order, the stages, and what a failure leaves untouched."""

from __future__ import annotations

from random import Random
from typing import Any, cast

import pytest
import torch

from bucketline.errors import StoreError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.collate.batch_builder import BatchBuilder
from bucketline.loader.prefetch import ahead
from bucketline.loader.prefetch.ahead import WARM_AFTER, WINDOW, ColdDetector, Readahead
from bucketline.loader.prefetch.stream import CudaCopier
from bucketline.store import Store
from bucketline.store.shard.mapped import AddressRange

Pair = tuple[int, int]


class Recorder:
    """Takes the place of a builder, and notes what it is asked to do, in order."""

    buffer_bytes = ahead.AHEAD_BYTES // 2  # two batches between stages

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad
        self.done: list[tuple[str, object]] = []

    def open_lines(self) -> None:
        """Every shard is on this machine."""

    def locate(self, pairs: list[Pair]) -> list[Pair]:
        if self.bad in [step for step, _ in pairs]:
            raise StoreError(f"step {self.bad} cannot be located")
        self.done.append(("locate", tuple(pairs)))
        return list(pairs)

    def is_resident(self, pending: Pair) -> bool:
        del pending
        return False

    def ask_rows(self, pending: Pair) -> None:
        self.done.append(("rows", pending))

    def ask_starts(self, pending: Pair) -> None:
        self.done.append(("starts", pending))

    def ask_tokens(self, pending: Pair) -> None:
        self.done.append(("tokens", pending))

    def copy_plans(self, batches: list[Pair], *, plainly: bool) -> list[Pair]:
        self.done.append(("plan plainly" if plainly else "plan", tuple(batches)))
        return batches


def run(recorder: Recorder, steps: int) -> list[Pair]:
    delivered: list[Pair] = []
    for copy_plan in Readahead(cast("BatchBuilder", recorder), iter([(step, 0) for step in range(steps)])):
        pair = cast("Pair", copy_plan)
        recorder.done.append(("fill", pair))
        delivered.append(pair)
    return delivered


@pytest.fixture(params=[True, False])
def cold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(ColdDetector, "is_cold", property(lambda _: request.param))
    return bool(request.param)


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 33, 100, 201])
def test_every_batch_is_given_once_in_order_and_located_once(*, cold: bool, steps: int) -> None:
    recorder = Recorder()
    assert run(recorder, steps) == [(step, 0) for step in range(steps)]
    located = [pair for kind, pairs in recorder.done if kind == "locate" for pair in cast("tuple[Pair, ...]", pairs)]
    assert located == [(step, 0) for step in range(steps)]
    assert any(kind == "rows" for kind, _ in recorder.done) == (cold and steps > 0)


def test_each_stage_is_asked_once_a_batch_in_order_and_two_batches_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ColdDetector, "is_cold", property(lambda _: True))
    recorder = Recorder()
    run(recorder, 150)
    when = {what: number for number, what in enumerate(recorder.done)}
    assert len([kind for kind, _ in recorder.done if kind in {"rows", "starts", "tokens", "fill"}]) == 4 * 150
    for step in range(150):
        rows, starts, tokens, fill = (when[kind, (step, 0)] for kind in ("rows", "starts", "tokens", "fill"))
        assert rows < starts < tokens < fill
        if step >= 100:  # the pipeline is full
            assert when["rows", (step, 0)] < when["fill", (step - 5, 0)]
            assert when["starts", (step, 0)] < when["fill", (step - 3, 0)]
            assert when["tokens", (step, 0)] < when["fill", (step - 1, 0)]


def test_copies_are_planned_many_at_a_time_and_plainly_if_the_store_is_cold(*, cold: bool) -> None:
    recorder = Recorder()
    run(recorder, 201)
    planned = [(kind, cast("tuple[Pair, ...]", pairs)) for kind, pairs in recorder.done if kind.startswith("plan")]
    assert [pair for _, pairs in planned for pair in pairs] == [(step, 0) for step in range(201)]
    assert {kind for kind, _ in planned} == {"plan plainly" if cold else "plan"}
    assert max(len(pairs) for _, pairs in planned) == (3 if cold else WINDOW)  # 3: two batches between stages, and the next


@pytest.mark.parametrize("seed", range(8))
def test_a_copy_is_planned_plainly_exactly_if_its_rows_were_requested_before(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    states = iter([state for _ in range(200) for state in [random.random() < 0.5] * random.randrange(1, 60)])
    monkeypatch.setattr(ColdDetector, "is_cold", property(lambda _: next(states)))
    recorder = Recorder()
    assert run(recorder, 400) == [(step, 0) for step in range(400)]
    requested, planned = set[Pair](), list[Pair]()
    for kind, what in recorder.done:
        if kind == "rows":
            requested.add(cast("Pair", what))
        elif kind.startswith("plan"):
            pairs = cast("tuple[Pair, ...]", what)
            assert {pair in requested for pair in pairs} == {kind == "plan plainly"}
            planned += pairs
    assert planned == [(step, 0) for step in range(400)]
    assert 0 < len(requested) < 400


@pytest.mark.usefixtures("cold")
def test_a_batch_that_cannot_be_located_fails_in_its_turn_after_all_before_it() -> None:
    recorder = Recorder(bad=70)
    with pytest.raises(StoreError, match="step 70 cannot be located"):
        run(recorder, 100)
    assert [what for kind, what in recorder.done if kind == "fill"] == [(step, 0) for step in range(70)]


def test_a_read_now_and_then_leaves_a_cached_store_warm_and_a_cold_one_is_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """46 page faults in 16,000 batches kept a third of them cold."""
    count, random = 0, Random(0)
    monkeypatch.setattr(ahead, "_reads", lambda: count)
    shares = []
    for share_of_reads in (46 / 16_000, 0.5):
        cold, num_cold = ColdDetector(is_warm=True), 0
        cold.note()
        for _ in range(16_000):
            count += random.random() < share_of_reads
            cold.note()
            num_cold += cold.is_cold
        shares.append(num_cold / 16_000)
    assert shares[0] < 0.04
    assert shares[1] > 0.99


def test_heat_ends_after_a_while_without_reads_and_begins_again_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    monkeypatch.setattr(ahead, "_reads", lambda: count)
    cold = ColdDetector()
    for _ in range(WARM_AFTER):
        assert cold.is_cold
        cold.note()
    assert not cold.is_cold
    cold.note()
    assert not cold.is_cold
    count = 1
    cold.note()
    assert cold.is_cold


def test_a_store_whose_first_batch_is_in_the_page_cache_is_not_taken_for_cold(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    real = ColdDetector.__init__

    def noted(cold: ColdDetector, *, is_warm: bool = False) -> None:
        seen.append(is_warm)
        real(cold, is_warm=is_warm)

    monkeypatch.setattr(ColdDetector, "__init__", noted)
    for is_resident in (True, False):
        for path in (store.path / "shards").iterdir():
            path.read_bytes()  # a kernel may take pages from its cache at any time
        if not is_resident:  # what the kernel would say of a page that is not there
            monkeypatch.setattr(AddressRange, "is_resident", lambda *_: False)
        with Loader(store, LoaderConfig(batch_size=4)) as loader:
            next(loader.forever())
    assert seen == [True, False]
    assert not ColdDetector(is_warm=True).is_cold


# Copies to a CUDA device, with a stand-in for the driver's state: which device a thread is at, and which it has touched.


class Driver:
    """A thread's current device, and the devices with a context. `stream` returns to where it was, as torch's does."""

    def __init__(self) -> None:
        self.current, self.contexts = 0, set[int]()

    def device(self, _device: torch.device) -> Any:
        return _At(self, 1, makes_context=False)  # `_maybe_exchange_device` makes none

    def stream(self, _stream: object) -> Any:
        return _At(self, 1, makes_context=True)  # `set_stream` sets the device, which makes its context


class _At:
    def __init__(self, driver: Driver, device: int, *, makes_context: bool) -> None:
        self._driver, self._device, self._makes_context = driver, device, makes_context

    def __enter__(self) -> None:
        self._before = self._driver.current
        self._go(self._device)

    def __exit__(self, *_: object) -> None:
        self._go(self._before)

    def _go(self, device: int) -> None:
        self._driver.current = device
        if self._makes_context:
            self._driver.contexts.add(device)


class _Event:
    def record(self, _stream: object) -> None: ...

    def query(self) -> bool:
        return True


def test_a_copy_to_the_second_gpu_leaves_the_first_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    for name, stand_in in {"Stream": lambda _: None, "Event": _Event, "device": driver.device, "stream": driver.stream}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    copied, _ = CudaCopier(torch.device("cpu")).copy(torch.arange(9, dtype=torch.uint8), 4, lambda: None)
    assert copied.tolist() == [0, 1, 2, 3]
    assert (driver.contexts, driver.current) == ({1}, 0)
