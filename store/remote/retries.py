"""Requests that are made again, and which failures may pass."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from bucketline.errors import CorruptError, StoreError
from bucketline.store.folder import DeniedError, MissingObjectError, NoRangesError

if TYPE_CHECKING:
    from collections.abc import Callable

Answer = TypeVar("Answer")
MAX_WRONG = 3  # answers that are wrong, or say that an object is missing, before that is believed


def is_wrong(error: BaseException) -> bool:
    """Return whether an answer came that is another one than expected; the next ones will hardly be different."""
    return isinstance(error, CorruptError | MissingObjectError | NoRangesError)


def asked_again(
    request: Callable[[], Answer],
    deadline_s: float,
    *,
    most_wrong: int | None = MAX_WRONG,
    is_over: threading.Event | None = None,
) -> Answer:
    """Return what a function returns that requests an object; call it again after failures that may pass.

    After half of the deadline no new try begins, since the last one may take as long. `most_wrong`: see `MAX_WRONG`; None: only
    the deadline counts for these too. What is denied is never requested again, and nothing once `is_over` is set.
    """
    end, tries, wrong = time.monotonic() + deadline_s / 2, 0, 0
    is_over = is_over or threading.Event()
    while True:
        try:
            return request()
        except DeniedError:
            raise
        except StoreError as error:
            tries, wrong = tries + 1, wrong + is_wrong(error)
            pause = pause_after(tries)
            if is_over.is_set() or wrong == most_wrong or time.monotonic() + pause > end:
                raise
            is_over.wait(pause)


FIRST_S, LONGEST_S = 0.1, 5.0


def pause_after(tries: int) -> float:
    """Return the seconds to wait after so many tries: exponential backoff with full jitter."""
    return random.uniform(0.0, min(LONGEST_S, FIRST_S * 2.0 ** min(tries, 16)))  # noqa: S311 - nothing secret


Found = TypeVar("Found")
IN_TIME = 15 / 16  # of a deadline: what is given up then has reached the caller before the deadline has passed


def within(deadline_s: float, place: str, call: Callable[[], Found]) -> Found:
    """Return what a function returns that requests objects at `place`; its thread is left to itself after the deadline."""
    found: list[Found] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    thread = threading.Thread(target=run, name="bucketline-open", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if failed:
        raise failed[0]
    if not found:
        raise StoreError(f"{place} has not answered within {deadline_s:g} s; check the address and the network, then try again")
    return found[0]
