"""Batches made as a loader's prefetch threads make them, in pooled buffers, without delivery to a caller."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from bucketline.bench.memcpy import in_threads
from bucketline.loader.collate.batch_builder import BatchBuilder
from bucketline.loader.collate.buffer_pool import BufferPool
from bucketline.loader.plan.make_plan import plan_of
from bucketline.loader.prefetch.readahead import Readahead

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bucketline.loader import LoaderConfig
    from bucketline.loader.collate.buffer_pool import FilledBuffer
    from bucketline.loader.collate.window import CopyPlan
    from bucketline.store import OpenShards

NUM_BUFFERS = 3  # of a loader whose caller never waits: two filled ahead, and the caller's own


class Batches:
    """A store's micro-batches by the loader's plan, from step 0 on. Buffers are reused in turn."""

    def __init__(self, store: OpenShards, config: LoaderConfig) -> None:
        """Plan, and touch the buffers; reads none of the rows."""
        self._builder = BatchBuilder(store, plan_of(store, config, 1), config, 0, 1)
        self._pool = BufferPool(self._builder.buffer_bytes, NUM_BUFFERS, pinned=False)
        self.buffers = [self._pool.take().fill_(0) for _ in range(NUM_BUFFERS)]
        for buffer in self.buffers:
            self._pool.give_back(buffer)

    def planned(self, count: int, together: int) -> Iterator[CopyPlan]:
        """Yield the copy plans of the first `count` micro-batches; `together` of them are located and planned at once."""
        steps = [(step, 0) for step in range(count)]
        for first in range(0, count, together):
            yield from self._builder.copy_plans(self._builder.locate(steps[first : first + together]), plainly=False)

    def read_ahead(self, count: int) -> Iterator[CopyPlan]:
        """Yield the copy plans of the first `count` micro-batches through the loader's readahead."""
        return iter(Readahead(self._builder, iter([(step, 0) for step in range(count)])))

    def fill(self, copy_plans: Iterable[CopyPlan], num_threads: int = 1) -> list[FilledBuffer]:
        """Fill a buffer with each micro-batch, in threads; only the last results' buffers still hold their bytes."""
        turn, rest, filled = threading.Lock(), iter(copy_plans), []

        def work(_: int) -> None:
            torch.get_num_threads()  # before the setting of this thread, which the first call would replace
            torch.set_num_threads(1)
            while True:
                with turn:
                    one = next(rest, None)
                if one is None:
                    return
                buffer = self._pool.take()
                filled.append(self._builder.fill(buffer, one))
                self._pool.give_back(buffer)

        in_threads(num_threads, work)
        return filled
