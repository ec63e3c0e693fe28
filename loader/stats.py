"""Statistics of iterations: what was delivered, and how long was waited; of a loader, and of the clients of a server."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bucketline.loader.collate.buffer_pool import FilledBuffer
    from bucketline.store.remote.cache.fetch_threads import FetchStats

SUMMED = ("batches", "samples", "bytes", "waits", "waited_s", "errors")  # over clients


@dataclass(slots=True, kw_only=True)
class Stats:
    """Counts of an iteration: of a loader's present or last one, see `Loader.stats`, or of what a server fills for a client."""

    seconds: float = 0.0  # from the first `next()` to the end of the last
    batches: int = 0  # micro-batches consumed by the caller
    samples: int = 0
    bytes: int = 0  # of their tensors
    waits: int = 0  # for a micro-batch that was not ready, since reading ahead began
    waited_s: float = 0.0  # of the seconds, inside `next()`
    is_waiting: bool = False  # at this moment
    errors: int = 0  # 1 if a server's iteration for a client ended with an error
    ready: int = 0  # micro-batches filled and not yet consumed
    depth: int = 0  # micro-batches that are filled ahead at present; grows if the caller had to wait
    buffers: int = 0  # allocated so far: ready, held by the caller or free
    by_bucket: dict[str, int] = field(default_factory=dict)  # samples
    fetched: tuple[FetchStats, ...] = ()  # of each store in object storage that this process reads, since it was opened
    begun: float | None = field(default=None, repr=False, compare=False)  # by `time.perf_counter`

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def waited(self) -> float:
        """The fraction of the time that the caller waited."""
        return self.waited_s / self.seconds if self.seconds else 0.0

    def count(self, filled: FilledBuffer, asked: float | None = None) -> None:
        """Count a micro-batch that is delivered now; the time since it was `asked` for is waiting."""
        samples = filled.fields[0].shape[0]
        self.batches += 1
        self.samples += samples
        self.bytes += filled.num_bytes
        self.by_bucket[filled.bucket] = self.by_bucket.get(filled.bucket, 0) + samples
        if asked is not None:
            now = time.perf_counter()
            if self.begun is None:
                self.begun = asked
            self.seconds = now - self.begun
            self.waited_s += now - asked

    def until_now(self) -> Stats:
        """Return a copy whose seconds end now; of counts that have `begun`."""
        assert self.begun is not None
        return replace(self.copy(), seconds=time.perf_counter() - self.begun)

    def copy(self, fetched: tuple[FetchStats, ...] = ()) -> Stats:
        """Return a copy that counts no more."""
        return replace(self, by_bucket=dict(sorted(self.by_bucket.copy().items())), fetched=fetched)

    def as_json(self) -> dict[str, Any]:
        """Return the counts of a server's client as JSON values."""
        names = (*SUMMED, "seconds", "samples_per_s", "bytes_per_s", "is_waiting", "ready", "depth", "buffers", "by_bucket")
        return {name: getattr(self, name) for name in names}


class ClientCounts:
    """The clients of a server, and the totals of those that have left. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connected: dict[object, tuple[dict[str, Any], Callable[[], Stats]]] = {}
        self._past: dict[tuple[str, ...], Counter[str]] = {}  # by stores
        self._num_refused = 0

    def refuse(self) -> None:
        """Count a client that was not served: wrong token, an impossible request, or too many clients."""
        with self._lock:
            self._num_refused += 1

    @contextmanager
    def client(self, who: dict[str, Any], stats: Callable[[], Stats]) -> Iterator[None]:
        """Count a client as connected until the block ends. `who` has its stores, as the server knows them."""
        key = object()
        with self._lock:
            self._connected[key] = who, stats
        try:
            yield
        finally:
            with self._lock:
                del self._connected[key]
                _add(self._past, {**who, **stats().as_json()})

    def as_json(self) -> dict[str, Any]:
        """Return the totals, those by stores, who was refused, and the clients that are connected now, as JSON values."""
        with self._lock:
            clients = [{**who, **stats().as_json()} for who, stats in self._connected.values()]
            past = {stores: Counter(counts) for stores, counts in self._past.items()}
            num_refused = self._num_refused
        for client in clients:
            _add(past, client)
        by_stores = [
            {"stores": list(stores), **{name: counts[name] for name in ("clients", *SUMMED)}}
            for stores, counts in sorted(past.items())
        ]
        return {
            "clients_so_far": sum(one["clients"] for one in by_stores),
            **{name: sum(one[name] for one in by_stores) for name in SUMMED},
            "refused": num_refused,
            "by_stores": by_stores,
            "clients": clients,
        }


def _add(past: dict[tuple[str, ...], Counter[str]], client: dict[str, Any]) -> None:
    counts = past.setdefault(tuple(client["stores"]), Counter())
    counts.update({"clients": 1, **{name: client[name] for name in SUMMED}})
