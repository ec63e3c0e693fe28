"""Batches located and read ahead before they are filled: the order, the stages, and what a failure leaves untouched."""

from __future__ import annotations

import sys
import threading
from random import Random
from types import FrameType
from typing import Any, NamedTuple, cast

import pytest
import torch

from bucketline.errors import DeliveryError, StoreError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.collate.batch_builder import BatchBuilder
from bucketline.loader.prefetch import ahead
from bucketline.loader.prefetch.ahead import WARM_AFTER, WINDOW, ColdDetector, Readahead
from bucketline.loader.prefetch.stream import CudaCopier, ReorderBuffer
from bucketline.store import Store
from bucketline.store.shard.mapped import AddressRange
from tests.leftovers import wait_until

Pair = tuple[int, int]


class Pending(NamedTuple):
    """Takes the place of a `PendingBatch`."""

    step: int
    micro_step: int

    def release(self) -> None:
        """Nothing is held."""


class Recorder:
    """Takes the place of a builder, and notes what it is asked to do, in order."""

    buffer_bytes = ahead.AHEAD_BYTES // 2  # two batches between stages
    most_rows = ahead.WINDOW_ROWS

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad
        self.done: list[tuple[str, object]] = []

    def open_lines(self) -> None:
        """Every shard is on this machine."""

    def locate(self, pairs: list[Pair]) -> list[Pair]:
        if self.bad in [step for step, _ in pairs]:
            raise StoreError(f"step {self.bad} cannot be located")
        self.done.append(("locate", tuple(pairs)))
        return [Pending(*pair) for pair in pairs]

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
    for copy_plans in Readahead(cast("BatchBuilder", recorder), iter([(step, 0) for step in range(steps)])):
        for pair in cast("list[Pair]", copy_plans):
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


@pytest.mark.parametrize("share", [1, 3, 100])
def test_small_batches_are_filled_several_at_once_those_of_a_cold_store_one_by_one(*, cold: bool, share: int) -> None:
    recorder = Recorder()
    recorder.buffer_bytes = ahead.FILLED_BYTES // share
    readahead = Readahead(cast("BatchBuilder", recorder), iter([(step, 0) for step in range(201)]))
    sizes = [len(copy_plans) for copy_plans in readahead]
    assert (sum(sizes), sizes[0]) == (201, 1)
    assert max(sizes) == (1 if cold else min(share, 16))


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


# Items in order, at most so many at a time, and an end from either side; a failure is raised where it is waited for.


def test_a_failure_is_raised_after_what_came_before_it_and_again_when_asked_again() -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(4)
    buffer.put(0, 1)
    buffer.end(1, ValueError("sample x"))
    assert buffer.pop() == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="sample x"):
            buffer.pop()


def test_closing_lets_a_waiting_filler_go() -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(1)
    outcomes: list[bool] = []

    def fill() -> None:
        while buffer.put(len(outcomes), 0):
            outcomes.append(True)
        outcomes.append(False)

    thread = threading.Thread(target=fill)
    thread.start()
    assert buffer.pop() == 0
    buffer.close()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert outcomes[-1] is False
    assert buffer.pop() is None


def test_closing_lets_a_waiting_taker_go() -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(1)
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.append(buffer.pop()))
    thread.start()
    buffer.close()
    thread.join(timeout=30)
    assert found == [None]


def test_items_that_come_together_reach_a_taker_that_waits_also_if_there_is_no_room_for_all() -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(2)
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.extend(buffer.pop() for _ in range(60)))
    thread.start()
    for turn in range(60):
        assert buffer.put(turn, turn, more=turn % 6 < 5)
    thread.join(timeout=30)
    assert found == list(range(60))


def test_the_fillers_wake_once_half_of_the_room_is_free() -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(4)
    thread = threading.Thread(target=lambda: [buffer.put(turn, turn) for turn in range(6)])
    thread.start()
    assert wait_until(lambda: buffer._producers_waiting == 1)
    assert buffer.pop() == 0
    assert (buffer._producers_waiting, len(buffer)) == (1, 3)
    assert [buffer.pop() for _ in range(5)] == [1, 2, 3, 4, 5]
    thread.join(timeout=30)


def test_several_threads_hand_over_in_turn_and_a_failure_waits_for_its_own() -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(3)
    turns = iter(range(400))
    lock, most = threading.Lock(), list[int]()

    def fill() -> None:
        while True:
            with lock:
                turn = next(turns)
            most.append(len(buffer))
            if turn == 300:
                buffer.end(turn, ValueError("at 300"))
                return
            if not buffer.put(turn, turn):
                return

    threads = [threading.Thread(target=fill) for _ in range(4)]
    for thread in threads:
        thread.start()
    found = [buffer.pop() for _ in range(300)]
    with pytest.raises(ValueError, match="at 300"):
        buffer.pop()
    for thread in threads:
        thread.join(timeout=30)
    assert found == list(range(300))
    assert max(most) <= 3
    assert not any(thread.is_alive() for thread in threads)


def test_a_filling_side_that_is_gone_without_a_word_is_an_error() -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(1)
    buffer.put(0, 7)
    assert buffer.pop(lambda: False) == 7
    with pytest.raises(DeliveryError, match="the prefetch threads are gone"):
        buffer.pop(lambda: False)


def test_what_is_done_before_its_turn_lies_ready_and_nobody_waits_for_another() -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(3)
    assert buffer.put(2, 2)
    assert buffer.put(1, 1)
    assert len(buffer) == 2
    assert buffer.put(0, 0)
    buffer.end(3)
    assert [buffer.pop() for _ in range(5)] == [0, 1, 2, None, None]


def test_the_earliest_failure_counts_and_what_comes_after_it_is_not_taken() -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(4)
    buffer.end(3, ValueError("at 3"))
    assert buffer.put(2, 2)
    buffer.end(1, ValueError("at 1"))
    assert not buffer.put(3, 3)
    assert buffer.put(0, 0)
    assert buffer.pop() == 0
    with pytest.raises(ValueError, match="at 1"):
        buffer.pop()


def test_an_interrupt_between_any_two_bytecodes_of_taking_loses_no_turn() -> None:
    outcomes = set()
    for number in range(200):
        buffer: ReorderBuffer[int] = ReorderBuffer(4)
        for turn in range(3):
            assert buffer.put(turn, turn)
        buffer.end(3)
        left = [number]

        def interrupt(frame: FrameType, event: str, _: object, left: list[int] = left) -> Any:
            if frame.f_code is not ReorderBuffer.pop.__code__:
                return None
            frame.f_trace_opcodes = True
            left[0] -= event == "opcode"
            if left[0] < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            return interrupt

        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            first = buffer.pop()
        except KeyboardInterrupt:
            first = None
        finally:
            sys.settrace(before)
        rest = []
        while (item := buffer.pop(lambda: False)) is not None:
            rest.append(item)
        assert (first, rest) in [(0, [1, 2]), (None, [0, 1, 2]), (None, [1, 2])]
        outcomes.add(first)
        if first is not None:
            break
    assert outcomes == {0, None}


def test_closing_gives_what_was_not_taken() -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(3)
    buffer.put(0, 5)
    buffer.put(2, 7)
    assert buffer.close() == [5, 7]
    assert not buffer.put(1, 6)


def test_room_grows_only_once_both_sides_have_had_to_wait() -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(7, first_depth=2)
    left: list[int] = []

    def fill(turns: range) -> threading.Thread:
        thread = threading.Thread(target=lambda: left.extend(turn for turn in turns if not buffer.put(turn, turn)))
        thread.start()
        return thread

    assert [buffer.put(turn, turn) for turn in (0, 1)] == [True, True]
    assert [buffer.pop() for _ in range(2)] == [0, 1]
    waiting = fill(range(2, 3))
    assert buffer.pop() == 2  # the taking side may have waited, the filling side has not
    waiting.join()
    assert buffer.depth == 2
    first = fill(range(3, 6))
    assert wait_until(lambda: buffer._producers_waiting)
    assert [buffer.pop() for _ in range(3)] == [3, 4, 5]
    first.join()
    with pytest.raises(DeliveryError):
        buffer.pop(lambda: False)
    assert buffer.depth == 4
    second = fill(range(6, 12))
    assert wait_until(lambda: buffer._producers_waiting)
    assert len(buffer) == 4
    buffer.close()
    second.join()
