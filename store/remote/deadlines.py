"""A deadline for several requests together, each of which has time limits of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from bucketline.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

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
