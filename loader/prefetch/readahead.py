"""Readahead: locate many batches at a time, and ask the kernel to read those that must come from the disk.

A batch passes three stages before it is filled, each some batches ahead of the next, because each needs what the previous one
read: its rows; the `starts` of its captions' tokens; the tokens.
"""

from __future__ import annotations

import resource
import threading
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from bucketline.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bucketline.loader.collate.batch_builder import BatchBuilder
    from bucketline.loader.collate.pending import PendingBatch

WINDOW = 32  # micro-batches located at once, which costs hardly more than one (`bench/store/hot_gather.py`)
AHEAD_BYTES = (
    8 << 20
)  # between two stages: 64 requests of 128 KiB; twice as many and more gave less (`bench/store/cold_gather.py --ahead`)
MAX_AHEAD = 32  # micro-batches between two stages
WARM_AFTER = 64  # micro-batches in a row without a read from the disk


class ColdDetector:
    """Detects if batches come from the disk, by the prefetch threads' block reads and major faults as counted by the kernel.

    Readahead costs a tenth of a hot batch, so it ends after a while without reads, and begins again with the first read.
    """

    def __init__(self, *, is_warm: bool = False) -> None:
        """Start cold, unless the first batch is known to be in the page cache."""
        self._counts: dict[int, int] = {}  # by thread, each updated by itself
        self._left = 0 if is_warm else WARM_AFTER

    @property
    def is_cold(self) -> bool:
        return self._left > 0

    def note(self) -> None:
        """Compare this thread's counts with those after its last batch; they begin at 0."""
        thread, count = threading.get_ident(), _reads()
        self._left = WARM_AFTER if count != self._counts.get(thread, 0) else max(0, self._left - 1)
        self._counts[thread] = count


def _reads() -> int:
    usage = resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF))
    return usage.ru_inblock + usage.ru_majflt


class Readahead:
    """Yields the micro-batches of an order one by one, located, and read ahead in time."""

    def __init__(self, builder: BatchBuilder, order: Iterator[tuple[int, int]]) -> None:
        """`order` yields (step, micro step); it is consumed as far ahead as batches are located."""
        self._builder, self._order = builder, order
        self._ahead = min(MAX_AHEAD, max(1, AHEAD_BYTES // builder.buffer_bytes))
        self._pending: deque[PendingBatch | StoreError] = (
            deque()
        )  # a failure waits for its turn: everything before it is delivered
        self._window = 1  # then 8, then all: the first batch does not wait for many, and each window has its own copy plans
        self._stages: list[tuple[int, Callable[[PendingBatch], None]]] = [
            (3 * self._ahead, builder.ask_rows),
            (2 * self._ahead, builder.ask_starts),
            (self._ahead, builder.ask_tokens),
        ]
        self._asked = [0, 0, 0]  # how many of the pending ones have passed each stage

    def __iter__(self) -> Iterator[PendingBatch]:
        """Yield the next micro-batch to be filled.

        Raises:
            StoreError: if a row or caption cannot be located.
        """
        self._locate(0)
        first = self._pending[0] if self._pending else None
        # mistaking a cached store for a cold one costs a first pass more than all other one-time work
        cold = ColdDetector(
            is_warm=first is not None and not isinstance(first, StoreError) and self._builder.is_resident(first)
        )
        while True:
            self._locate(3 * self._ahead if cold.is_cold else 0)
            if not self._pending:
                return
            if cold.is_cold:
                self._ask()
            self._asked = [max(0, asked - 1) for asked in self._asked]
            pending = self._pending.popleft()
            if isinstance(pending, StoreError):
                raise pending
            yield pending
            cold.note()

    def _locate(self, wanted: int) -> None:
        """Locate more until more than `wanted` are."""
        while len(self._pending) <= wanted:
            pairs = list(islice(self._order, self._window))
            try:
                self._pending.extend(self._builder.locate(pairs))
            except StoreError:
                self._pending.extend(map(self._locate_one, pairs))
            if len(pairs) < self._window:
                return
            self._window = min(8 * self._window, WINDOW)
            if wanted == 0 or self._window < WINDOW:
                return

    def _locate_one(self, pair: tuple[int, int]) -> PendingBatch | StoreError:
        try:
            return self._builder.locate([pair])[0]
        except StoreError as error:
            return error

    def _ask(self) -> None:
        for number, (distance, ask) in enumerate(self._stages):
            for pending in islice(self._pending, self._asked[number], distance + 1):
                if not isinstance(pending, StoreError):
                    with suppress(StoreError):  # it occurs again, and is raised, when the batch is filled
                        ask(pending)
            self._asked[number] = max(self._asked[number], min(len(self._pending), distance + 1))
