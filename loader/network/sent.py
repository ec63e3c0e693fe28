"""Counts of the batches that a server has sent to other machines, for `loader stats` and Prometheus."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bucketline.loader.collate.buffer_pool import FilledBuffer
    from bucketline.loader.prefetch.threads import ThreadStream

TOTALS = ("clients", "batches", "samples", "bytes", "errors")


@dataclass(slots=True, kw_only=True, eq=False)
class RemoteClient:
    """One client's iteration, and what it was sent."""

    address: str  # HOST:PORT
    rank: int
    world_size: int
    stream: ThreadStream
    begun: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=lambda: Counter(clients=1))

    def sent(self, filled: FilledBuffer) -> None:
        """Count a micro-batch."""
        self.counts["batches"] += 1
        self.counts["samples"] += filled.fields[0].shape[0]
        self.counts["bytes"] += filled.num_bytes

    def stats(self) -> dict[str, Any]:
        queue, seconds = self.stream.queue_stats(), time.monotonic() - self.begun
        counts = {name: self.counts[name] for name in ("batches", "samples", "bytes")}
        rates = {f"{name}_per_s": counts[name] / max(seconds, 1e-9) for name in ("samples", "bytes")}
        who = {"address": self.address, "rank": self.rank, "world_size": self.world_size, "seconds": seconds}
        return {**who, **counts, **rates, "ready": queue.ready, "depth": queue.depth}


class SentCounts:
    """The clients of a server, and the totals of those that have left. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: list[RemoteClient] = []
        self._past: Counter[str] = Counter()

    def refused(self) -> None:
        """Count a connection that was not served: wrong token, an impossible request, or too many clients."""
        with self._lock:
            self._past["refused"] += 1

    def begin(self, client: RemoteClient) -> None:
        """Count a client that is going to be sent batches."""
        with self._lock:
            self._clients.append(client)

    def end(self, client: RemoteClient) -> None:
        """Keep only the counts of a client that has left."""
        with self._lock:
            self._clients.remove(client)
            self._past.update(client.counts)

    def stats(self) -> dict[str, Any]:
        """Return the totals, those who were refused, and the clients that are connected now."""
        with self._lock:
            clients, total = list(self._clients), Counter(self._past)
        for client in clients:
            total.update(client.counts)
        totals = {("clients_so_far" if name == "clients" else name): total[name] for name in (*TOTALS, "refused")}
        return {**totals, "clients": [client.stats() for client in clients]}
