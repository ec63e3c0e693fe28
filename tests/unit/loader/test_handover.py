"""Items in order, at most so many at a time, and an end from either side; a failure is raised where it is waited for."""

from __future__ import annotations

import threading

import pytest

from bucketline.loader.handover import Handover


def test_items_arrive_in_order_and_then_comes_the_end() -> None:
    handover: Handover[int] = Handover(3)

    def fill() -> None:
        for n in range(1000):
            assert handover.put(n)
        handover.end()

    thread = threading.Thread(target=fill)
    thread.start()
    found = []
    while (item := handover.take()) is not None:
        found.append(item)
    thread.join()
    assert found == list(range(1000))
    assert handover.take() is None


def test_never_more_wait_than_there_is_room_for() -> None:
    handover: Handover[int] = Handover(2)
    most = []

    def fill() -> None:
        for n in range(200):
            handover.put(n)
            most.append(len(handover._items))
        handover.end()

    thread = threading.Thread(target=fill)
    thread.start()
    while handover.take() is not None:
        pass
    thread.join()
    assert max(most) <= 2


def test_a_failure_is_raised_after_what_came_before_it_and_again_when_asked_again() -> None:
    handover: Handover[int] = Handover(4)
    handover.put(1)
    handover.end(ValueError("sample x"))
    assert handover.take() == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="sample x"):
            handover.take()


def test_closing_lets_a_waiting_filler_go() -> None:
    handover: Handover[int] = Handover(1)
    outcomes: list[bool] = []

    def fill() -> None:
        while handover.put(0):
            outcomes.append(True)
        outcomes.append(False)

    thread = threading.Thread(target=fill)
    thread.start()
    assert handover.take() == 0
    handover.close()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert outcomes[-1] is False
    assert handover.take() is None


def test_closing_lets_a_waiting_taker_go() -> None:
    handover: Handover[int] = Handover(1)
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.append(handover.take()))
    thread.start()
    handover.close()
    thread.join(timeout=30)
    assert found == [None]
