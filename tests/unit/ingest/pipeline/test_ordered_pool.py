"""Work done ahead: in order, within its room, and gone when it is no longer wanted."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from bucketline.ingest.pipeline.ordered_pool import OrderedPool, WorkLimits


def nothing() -> None:
    pass


def test_results_come_in_the_order_of_the_items_whoever_is_first_done() -> None:
    later = threading.Event()

    def work(n: int) -> int:
        if n == 0:
            assert later.wait(10)
        if n == 3:
            later.set()
        return n * n

    with OrderedPool(range(20), work, lambda _: 1, WorkLimits(num_threads=2, items=8, num_bytes=100)) as ahead:
        assert [(n, future.result()) for n, future in ahead.results(nothing)] == [(n, n * n) for n in range(20)]


@pytest.mark.parametrize(
    "room", [WorkLimits(num_threads=3, items=4, num_bytes=1000), WorkLimits(num_threads=3, items=99, num_bytes=40)]
)
def test_no_more_is_under_way_than_there_is_room_for(room: WorkLimits) -> None:
    drawn, most = 0, 0

    def items() -> Iterator[int]:
        nonlocal drawn
        for n in range(50):
            drawn += 1
            yield n

    with OrderedPool(items(), lambda n: n, lambda _: 10, room) as ahead:
        for taken, (_, future) in enumerate(ahead.results(nothing), start=1):
            future.result()
            most = max(most, drawn - taken)
    assert drawn == 50
    assert most <= 4 + 1  # one more is drawn, and waits


@pytest.mark.parametrize("num_items", [0, 1, 7, 8, 9, 50])
def test_in_bursts_nothing_runs_while_a_result_is_being_used(num_items: int) -> None:
    running: set[int] = set()

    def work(n: int) -> int:
        running.add(n)
        running.discard(n)
        return n

    def items() -> Iterator[int]:
        yield from range(num_items)

    done = []
    room = WorkLimits(num_threads=3, items=8, num_bytes=100, in_bursts=lambda: True)
    with OrderedPool(items(), work, lambda _: 1, room) as ahead:
        for item, future in ahead.results(nothing):
            assert not running
            done.append((item, future.result()))
    assert done == [(n, n) for n in range(num_items)]


def test_an_item_larger_than_all_the_room_goes_alone() -> None:
    room = WorkLimits(num_threads=2, items=8, num_bytes=5)
    with OrderedPool([1, 2, 3], str, lambda _: 100, room) as ahead:
        assert [future.result() for _, future in ahead.results(nothing)] == ["1", "2", "3"]


def test_a_source_that_fails_is_heard_of_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield from (1, 2)
        raise OSError("the cable was pulled")

    seen: list[str] = []
    room = WorkLimits(num_threads=2, items=8, num_bytes=100)
    with OrderedPool(items(), str, lambda _: 1, room) as ahead, pytest.raises(OSError, match="cable"):
        seen.extend(future.result() for _, future in ahead.results(nothing))
    assert seen == ["1", "2"]


def test_an_interruption_is_noticed_while_nothing_comes_and_no_thread_is_left() -> None:
    before = set(threading.enumerate())
    release = threading.Event()

    def interrupted() -> None:
        release.set()
        raise KeyboardInterrupt

    def run() -> None:
        room = WorkLimits(num_threads=1, items=8, num_bytes=100)
        with OrderedPool([1], lambda _: release.wait(10), lambda _: 1, room) as ahead:
            next(ahead.results(interrupted))

    with pytest.raises(KeyboardInterrupt):
        run()
    assert set(threading.enumerate()) <= before
