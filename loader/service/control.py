"""The control page of a client's shared memory: numbers that the service and the client tell each other without a system call.

Each number has one side that writes it. A batch is announced by its slab's number in a ring of announcements and then by the
count of those announced; the client follows with the count of those taken. A slab's state is a byte: the service takes free
slabs, the client frees them.
"""

from __future__ import annotations

import json
import threading
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

MAX_SLABS = 1 << 16
_WORDS, _ANNOUNCEMENTS, _FAILURE_BYTES = 64, 1024, 1 << 16
_ANNOUNCED_AT = 8 * _WORDS
_STATES_AT = _ANNOUNCED_AT + 4 * _ANNOUNCEMENTS
_FAILURE_AT = _STATES_AT + MAX_SLABS
CONTROL_BYTES = -(-(_FAILURE_AT + _FAILURE_BYTES) // 4096) * 4096
FREE, TAKEN = 0, 1


class Word(IntEnum):
    """Where a number stands in the page. Each has a cache line of its own."""

    ANNOUNCED = 0  # by the service: micro-batches filled so far
    STATE = 8  # by the service, after the last announcement
    FAILURE_BYTES = 9
    SLABS = 10  # by the service: slabs that there are
    SERVICE_WAITS = 16  # by the service: wake it when there is room
    TAKEN = 24  # by the client: micro-batches taken so far
    CLIENT_WAITS = 32  # by the client: wake it when there is news


class State(IntEnum):
    """Whether more will be announced."""

    RUNNING = 0
    ENDED = 1
    FAILED = 2


def fence() -> None:
    """Order memory: what was written before is seen by others before what is written after, and likewise for reads.

    A lock that nobody else has is taken twice: each taking and each release is an atomic operation on it, and together they
    order what stands before and after. On x86 a single one would do; 64-bit ARM reorders more. A quarter of a microsecond.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


class Control:
    """The control page, as either side sees it."""

    def __init__(self, page: NDArray[np.uint8]) -> None:
        """`page`: `[CONTROL_BYTES]` of shared memory, zeros to begin with."""
        whole = memoryview(page)  # type: ignore[arg-type]
        self.words = whole[: 8 * _WORDS].cast("Q")
        self.states = whole[_STATES_AT:_FAILURE_AT]
        self.state_bytes = page[_STATES_AT:_FAILURE_AT]  # the same, for numpy
        self._announced = whole[_ANNOUNCED_AT:_STATES_AT].cast("I")
        self._failure = whole[_FAILURE_AT : _FAILURE_AT + _FAILURE_BYTES]

    def announce(self, slab: int) -> None:
        """Say that a slab is filled."""
        announced = self.words[Word.ANNOUNCED]
        self._announced[announced % _ANNOUNCEMENTS] = slab
        fence()
        self.words[Word.ANNOUNCED] = announced + 1

    def announced(self, number: int) -> int:
        """Give the slab of a micro-batch that was announced, by its number from the iteration's beginning."""
        return self._announced[number % _ANNOUNCEMENTS]

    def ready(self) -> int:
        """Give how many are announced and not taken; a client that writes nonsense gets nonsense."""
        return self.words[Word.ANNOUNCED] - self.words[Word.TAKEN]

    def end(self, failure: Mapping[str, Any] | None) -> None:
        """Say that nothing more will be announced."""
        if self.words[Word.STATE] != State.RUNNING:
            return
        if failure is not None:
            text = json.dumps({**failure, "message": str(failure["message"])[: _FAILURE_BYTES // 8]}).encode()
            self._failure[: len(text)] = text
            self.words[Word.FAILURE_BYTES] = len(text)
        fence()
        self.words[Word.STATE] = State.ENDED if failure is None else State.FAILED

    def failure(self) -> dict[str, Any]:
        """Give the failure of a state that is FAILED."""
        found: dict[str, Any] = json.loads(bytes(self._failure[: self.words[Word.FAILURE_BYTES]]))
        return found
