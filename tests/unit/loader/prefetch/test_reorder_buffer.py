"""Items in order, at most so many at a time, and an end from either side; a failure is raised where it is waited for."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import pytest

from bucketline.errors import DeliveryError
from bucketline.loader.prefetch.stream import ReorderBuffer
from tests.leftovers import wait_until


def test_a_failure_is_raised_after_what_came_before_it_and_again_when_asked_again() -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(4)
    buffer.put(0, 1)
    buffer.end(1, ValueError("sample x"))
    assert buffer.take() == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="sample x"):
            buffer.take()


def test_closing_lets_a_waiting_filler_go() -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(1)
    outcomes: list[bool] = []

    def fill() -> None:
        while buffer.put(len(outcomes), 0):
            outcomes.append(True)
        outcomes.append(False)

    thread = threading.Thread(target=fill)
    thread.start()
    assert buffer.take() == 0
    buffer.close()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert outcomes[-1] is False
    assert buffer.take() is None


def test_closing_lets_a_waiting_taker_go() -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(1)
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.append(buffer.take()))
    thread.start()
    buffer.close()
    thread.join(timeout=30)
    assert found == [None]


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
    found = [buffer.take() for _ in range(300)]
    with pytest.raises(ValueError, match="at 300"):
        buffer.take()
    for thread in threads:
        thread.join(timeout=30)
    assert found == list(range(300))
    assert max(most) <= 3
    assert not any(thread.is_alive() for thread in threads)


def test_a_filling_side_that_is_gone_without_a_word_is_an_error() -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(1)
    buffer.put(0, 7)
    assert buffer.take(lambda: False) == 7
    with pytest.raises(DeliveryError, match="the prefetch threads are gone"):
        buffer.take(lambda: False)


def test_what_is_done_before_its_turn_lies_ready_and_nobody_waits_for_another() -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(3)
    assert buffer.put(2, 2)
    assert buffer.put(1, 1)
    assert len(buffer) == 2
    assert buffer.put(0, 0)
    buffer.end(3)
    assert [buffer.take() for _ in range(5)] == [0, 1, 2, None, None]


def test_the_earliest_failure_counts_and_what_comes_after_it_is_not_taken() -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(4)
    buffer.end(3, ValueError("at 3"))
    assert buffer.put(2, 2)
    buffer.end(1, ValueError("at 1"))
    assert not buffer.put(3, 3)
    assert buffer.put(0, 0)
    assert buffer.take() == 0
    with pytest.raises(ValueError, match="at 1"):
        buffer.take()


def test_an_interrupt_between_any_two_bytecodes_of_taking_loses_no_turn() -> None:
    outcomes = set()
    for number in range(200):
        buffer: ReorderBuffer[int] = ReorderBuffer(4)
        for turn in range(3):
            assert buffer.put(turn, turn)
        buffer.end(3)
        left = [number]

        def interrupt(frame: FrameType, event: str, _: object, left: list[int] = left) -> Any:
            if frame.f_code is not ReorderBuffer.take.__code__:
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
            first = buffer.take()
        except KeyboardInterrupt:
            first = None
        finally:
            sys.settrace(before)
        rest = []
        while (item := buffer.take(lambda: False)) is not None:
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
    assert [buffer.take() for _ in range(2)] == [0, 1]
    waiting = fill(range(2, 3))
    assert buffer.take() == 2  # the taking side may have waited, the filling side has not
    waiting.join()
    assert buffer.depth == 2
    first = fill(range(3, 6))
    assert wait_until(lambda: buffer._fillers_waiting)
    assert [buffer.take() for _ in range(3)] == [3, 4, 5]
    first.join()
    with pytest.raises(DeliveryError):
        buffer.take(lambda: False)
    assert buffer.depth == 4
    second = fill(range(6, 12))
    assert wait_until(lambda: buffer._fillers_waiting)
    assert len(buffer) == 4
    buffer.close()
    second.join()
