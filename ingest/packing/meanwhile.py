"""`--publish-every`: publish during packing what is packed so far.

When a period is over, each rank ends its shard and, once it is sealed (and sent, if the store is in object storage), tells
rank 0. Rank 0 publishes when all ranks have told of a period, or at the latest when the next one is over: the ranks need not
agree on a moment, and none waits for another.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.store.sync.parts import SentShard, take_sent
from bucketline.typed_json import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bucketline.ingest.packing.run import PackRun
    from bucketline.ingest.parallel.ranks import PackRanks
    from bucketline.ingest.pipeline.slice_packer import SlicePacker

_ALL = 1 << 60  # the number of the period that a rank tells of when it has packed its slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """From a rank to rank 0: shards that are ready to be listed by a generation."""

    period: int  # counted from the beginning of packing; all that was packed before its end is in shards that are told of
    ready: list[str]
    sent: list[SentShard]  # the same, if they were made on a disk that rank 0 does not see


class Meanwhile:
    """The part of one rank in publishing during packing. Call `check` between images.

    A rank that makes shards on a disk of its own tells of them in any case, with what rank 0 needs to list them.
    """

    def __init__(
        self,
        every_s: float | None,
        ranks: PackRanks,
        run: PackRun | None,
        sent: Callable[[list[str]], list[SentShard]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`every_s` is the period, None for none; `run` that of rank 0; `sent` describes shards that were sent from here."""
        self._every_s, self._ranks, self._run, self._sent, self._clock = every_s, ranks, run, sent, clock
        self._began = clock()
        self._own: _OwnShards | None = None
        self._told_of = dict.fromkeys(range(ranks.world_size), 0)  # on rank 0: the last period that each rank told of
        self._waiting: list[str] = []  # on rank 0: shards to publish
        self._since = 0  # the period that was over when the first of them was told

    def begin(self, packer: SlicePacker, ready: Sequence[str]) -> None:
        """Begin to pack; `ready` are the names of the shards that a generation may list, and become more."""
        self._own = _OwnShards(packer, ready)
        self._began = self._clock()

    def check(self) -> None:
        """End the shard, or tell of it, if that is due; on rank 0, publish."""
        if self._every_s is None or self._own is None:
            return
        if (told := self._own.told_at(self._period)) is not None:
            self._tell(*told)
        self.publish_due()

    def finish(self) -> None:
        """Note that this rank packs nothing more of its slice: all of its shards are ready."""
        if self._own is not None and (self._every_s is not None or not self._ranks.shares_disk):
            self._tell(*self._own.rest())

    def take(self) -> None:
        """On rank 0, take what the others have told."""
        for rank, value in self._ranks.notes():
            self._take(rank, decode(Told, value))

    def publish_due(self) -> None:
        """Publish on rank 0 if it is time; the last generation is left to the end of the pack."""
        if self._run is None:
            return
        self.take()
        last = min(self._told_of.values())
        if self._every_s and self._waiting and last < _ALL and (last >= self._since or self._period > self._since):
            self._run.publish(self._waiting)
            self._waiting = []

    @property
    def _period(self) -> int:
        """Return how many periods are over."""
        return int((self._clock() - self._began) / self._every_s) if self._every_s else 0

    def _tell(self, period: int, ready: list[str]) -> None:
        told = Told(period=period, ready=ready, sent=self._sent(ready))
        if self._ranks.is_first:
            self._take(0, told)
        else:
            self._ranks.note(encode(told))

    def _take(self, rank: int, told: Told) -> None:
        if self._run is not None and told.sent:
            take_sent(self._run.config.store, told.sent)
        self._told_of[rank] = told.period
        if told.ready and not self._waiting:
            self._since = max(self._period, min(told.period, self._period + 1))
        self._waiting += told.ready


class _OwnShards:
    """The shards of this rank: ended when a period is over, told of when they are ready."""

    def __init__(self, packer: SlicePacker, ready: Sequence[str]) -> None:
        self._packer, self._ready = packer, ready
        self._period = 0  # the last one that was over when a shard was ended
        self._num_ended = 0
        self._is_open = False  # whether that shard is not told of yet
        self._goal: int | None = None  # how many shards must be ready for that
        self._num_told = 0

    def told_at(self, period: int) -> tuple[int, list[str]] | None:
        """End the shard if a period is over, and return the period and the shards to tell of if that is ready."""
        if period > self._period and not self._is_open:
            self._period, self._is_open, self._goal = period, True, None
            self._num_ended += 1
            self._packer.end_shard()
        if not self._is_open:
            return None
        if self._goal is None and self._packer.num_ended >= self._num_ended:
            self._goal = len(self._packer.sealed)
        if self._goal is None or len(self._ready) < self._goal:
            return None
        self._is_open = False
        return self._told(self._period)

    def rest(self) -> tuple[int, list[str]]:
        return self._told(_ALL)

    def _told(self, period: int) -> tuple[int, list[str]]:
        names = list(self._ready[self._num_told :])
        self._num_told += len(names)
        return period, names
