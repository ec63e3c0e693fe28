"""`--publish-every`: publish during packing what is packed so far.

When a period is over, each rank ends its shard. It tells rank 0 of each of its shards that is sealed (and sent, if the store is
in object storage). Rank 0 publishes what it was told of a little after each period, or as soon as there is something: the ranks
need not agree on a moment, and none waits for another.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.store.sync.parts import SentShard, take_sent
from bucketline.typed_json import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.ingest.packing.run import PackRun
    from bucketline.ingest.parallel.ranks import PackRanks
    from bucketline.ingest.pipeline.slice_packer import SlicePacker

SEALING = 0.1  # of a period, in which ranks seal the shards that they ended with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """From a rank to rank 0: shards that are ready to be listed by a generation."""

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
        packer: SlicePacker,
        sent: Callable[[list[str]], list[SentShard]],
    ) -> None:
        """`every_s` is the period, None for none; `run` that of rank 0; `sent` describes shards that were sent from here."""
        self._every_s, self._ranks, self._run, self._packer, self._sent = every_s, ranks, run, packer, sent
        self._end_at = time.monotonic() + (every_s or 0.0)
        self._publish_at = self._end_at + SEALING * (every_s or 0.0)
        self._num_told = 0  # of the packer's shards
        self._waiting: list[str] = []  # on rank 0: shards to publish

    def check(self) -> None:
        """End the shard if a period is over, and tell of shards that are ready; on rank 0, publish."""
        if self._every_s is None:
            return
        if time.monotonic() >= self._end_at:
            self._end_at = time.monotonic() + self._every_s
            self._packer.end_shard()
        self._tell()
        self.publish_due()

    def finish(self) -> None:
        """Tell of all shards: this rank packs nothing more of its slice."""
        if self._every_s is not None or not self._ranks.shares_disk:
            self._tell()

    def take(self) -> None:
        """On rank 0, take what the others have told."""
        for _, value in self._ranks.notes():
            self._take(decode(Told, value))

    def publish_due(self) -> None:
        """Publish on rank 0 if it is time."""
        if self._run is None:
            return
        self.take()
        if self._every_s and self._waiting and time.monotonic() >= self._publish_at:
            self._publish_at = time.monotonic() + self._every_s
            self._run.publish(self._waiting)
            self._waiting = []

    def _tell(self) -> None:
        ready = list(self._packer.ready[self._num_told :])
        if not ready:
            return
        self._num_told += len(ready)
        told = Told(ready=ready, sent=self._sent(ready))
        if self._ranks.is_first:
            self._take(told)
        else:
            self._ranks.note(encode(told))

    def _take(self, told: Told) -> None:
        if self._run is not None and told.sent:
            take_sent(self._run.config.store, told.sent)
        self._waiting += told.ready
