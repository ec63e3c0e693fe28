"""The control page of a client's shared memory: numbers that the service and the client exchange without system calls.

Only one side writes each number. To announce a batch, the service writes its buffer's number into a ring of announcements and
then increments the count of announced batches. The client follows with the count of popped batches. A buffer's state is one
byte: the service acquires free buffers, the client frees them.
"""

from __future__ import annotations

import json
import threading
from enum import IntEnum
from typing import TYPE_CHECKING

from bucketline.loader.service.wire import failure_as_json, failure_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bucketline.errors import BucketlineError
    from bucketline.loader.stats import Stats

MAX_SLABS = 1 << 16
_WORDS, _ANNOUNCEMENTS, _FAILURE_BYTES = 64, 1024, 1 << 16
_ANNOUNCED_AT = 8 * _WORDS
_STATES_AT = _ANNOUNCED_AT + 4 * _ANNOUNCEMENTS
_FAILURE_AT = _STATES_AT + MAX_SLABS
CONTROL_BYTES = -(-(_FAILURE_AT + _FAILURE_BYTES) // 4096) * 4096
FREE, TAKEN = 0, 1


class Word(IntEnum):
    """Index of a number in the page. Numbers that change often have separate cache lines."""

    ANNOUNCED = 0  # by the service: micro-batches filled so far
    HAS_ENDED = 8  # by the service, after the last announcement
    FAILURE_BYTES = 9  # of the failure's text; 0 if all batches were announced
    SLABS = 10  # by the service: number of buffers
    SERVICE_WAITS = 16  # by the service: wake it when there is room
    TAKEN = 24  # by the client: micro-batches popped so far
    CLIENT_WAITS = 32  # by the client: wake it when there is news
    WAITS = 33  # by the client: how often it had to wait for a micro-batch
    WAITED_US = 34  # by the client: for how long, in microseconds


def fence() -> None:
    """Issue a memory fence: writes before it become visible to others before writes after it, and likewise for reads.

    It acquires a lock that nobody else has, twice. Each acquire and each release is an atomic operation, and together they
    order the code before and after. On x86 a single one would be enough; 64-bit ARM reorders more. Takes 0.25 us.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


class ControlPage:
    """Access to the control page, for both sides."""

    def __init__(self, page: NDArray[np.uint8]) -> None:
        """Wrap a page. `page`: `[CONTROL_BYTES]` of shared memory, initially zeros."""
        whole = memoryview(page)  # type: ignore[arg-type]
        self.words = whole[: 8 * _WORDS].cast("Q")
        self.states = whole[_STATES_AT:_FAILURE_AT]
        self.state_bytes = page[_STATES_AT:_FAILURE_AT]  # the same, for numpy
        self._announced = whole[_ANNOUNCED_AT:_STATES_AT].cast("I")
        self._failure = whole[_FAILURE_AT : _FAILURE_AT + _FAILURE_BYTES]

    def announce(self, buffer: int) -> None:
        """Announce that a buffer is filled."""
        announced = self.words[Word.ANNOUNCED]
        self._announced[announced % _ANNOUNCEMENTS] = buffer
        fence()
        self.words[Word.ANNOUNCED] = announced + 1

    def announced(self, number: int) -> int:
        """Return the buffer of an announced micro-batch, by its index since the iteration's start."""
        return self._announced[number % _ANNOUNCEMENTS]

    def note_queue(self, stats: Stats) -> None:
        """Set what is announced and not popped, and how often the client had to wait; wrong if it writes nonsense."""
        stats.ready = max(0, self.words[Word.ANNOUNCED] - self.words[Word.TAKEN])
        stats.buffers, stats.waits = self.words[Word.SLABS], self.words[Word.WAITS]
        stats.is_waiting = bool(self.words[Word.CLIENT_WAITS])

    def end(self, failure: BaseException | None) -> None:
        """Announce that no more batches will follow, because of a failure if there is one. The first end counts."""
        if self.words[Word.HAS_ENDED]:
            return
        if failure is not None:
            told = failure_as_json(failure)
            text = json.dumps({**told, "message": told["message"][: _FAILURE_BYTES // 16]}).encode()
            self._failure[: len(text)] = text
            self.words[Word.FAILURE_BYTES] = len(text)
        fence()
        self.words[Word.HAS_ENDED] = 1

    def failure(self) -> BucketlineError | None:
        """Return the failure of an iteration that has ended."""
        num_bytes = self.words[Word.FAILURE_BYTES]
        return failure_of(json.loads(bytes(self._failure[:num_bytes]))) if num_bytes else None
