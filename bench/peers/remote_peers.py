"""Cost of delivering the same samples from a server with Bucketline and other loaders, near and far, with a small cache."""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.bench.harness import Case, Result, Subject, alternate, quartiles, run_case, summarise
from bucketline.bench.peers.against_peers import payload_bytes, shape_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bucketline.bench.fixtures.server_process import ServerProcess
    from bucketline.bench.peers.peer import Way
    from bucketline.bench.peers.registry import Entry
    from bucketline.bench.peers.runs import PeerSet
    from bucketline.bench.peers.worker import Streamed

REMOTE = "peers, remote"
OURS = "bucketline, pushed, 1 thread"
GATE_CACHE_BYTES = 1 << 40
SPEED: Mapping[str, tuple[str, Callable[[Streamed, int], float]]] = {  # name: unit, of a pass and the number of its samples
    "samples": ("samples/s", lambda one, samples: samples / one.wall_s),
    "CPU": ("s/GB", lambda one, _: one.cpu_s / one.num_bytes * 1e9),
}
BYTES: Mapping[str, Callable[[Streamed], int]] = {
    "bytes sent": lambda one: one.sent_bytes,
    "cache": lambda one: one.cached_bytes,
}
FIRST = "first batch"


@dataclass(frozen=True, kw_only=True)
class RemotePeers(Case):
    """Compare delivery from a server on this machine with other loaders, on the same samples in four buckets.

    Every peer reads its format as its documentation recommends: MosaicML Streaming and LitData by S3, WebDataset by HTTP. One
    server answers all of them, in a process of its own; it speaks HTTP, and as much of S3 as reading needs, and is not the
    limit: `stream` measures it. Each repeat is a separate process that begins with an empty cache folder for a share
    of the data and makes some passes. It reads every byte of each batch, and the sums must match. The first pass includes
    opening. Before any timing, each peer must deliver every sample once per pass with the right bytes.

    Example: python -m bucketline.bench peers --remote --batches-per-bucket 4 --repeats 1 --latency-ms 0 --ways 1
    """

    batches_per_bucket: int = 64
    """Batches in each of the four buckets. 64 batches of 32 samples take about 1.7 GB for each peer, and as much while it is
    measured. With a cache of half of it, fewer have no room for the lines that Bucketline mixes."""
    batch_size: int = 32
    """Samples per batch."""
    latency_ms: tuple[float, ...] = (0.0, 30.0)
    """Milliseconds before each of the server's answers; each is measured."""
    passes: int = 2
    """Passes of a repeat, in one process."""
    cache_share: float = 0.5
    """Bytes that the cache may hold, as a share of the samples' bytes."""
    ways: int = 2
    """Number of configurations per peer (no worker processes, two), starting with the first."""
    only: tuple[str, ...] = ()
    """Measure only these peers. Default: all. Bucketline is always included."""
    environments: Path = Path("build/peers")
    """Make the peers' virtual environments in this folder and keep them."""

    def measure(self, folder: Path) -> list[Result]:
        return self.measure_and_tell(folder)[0]

    def measure_and_tell(self, folder: Path) -> tuple[list[Result], dict[str, Any]]:
        from bucketline.bench.fixtures.server_process import ServerProcess
        from bucketline.bench.peers.registry import subject
        from bucketline.bench.peers.runs import PeerSet

        rows = self.batches_per_bucket * self.batch_size
        shape = shape_of(rows, self.batch_size)
        peers = PeerSet(
            folder=(folder / f"peers-{rows}x{self.batch_size}").absolute(),
            shape=shape,
            environments=self.environments.absolute(),
        )
        written = peers.written(chosen(self.only))
        results: list[Result] = []
        with ServerProcess(peers.folder.parent) as server:
            ways = [way for one in written for way in peers.gated_remotely(one, self.ways, server.url, GATE_CACHE_BYTES)]
            for latency_ms in self.latency_ms:
                server.set_latency(latency_ms / 1000)
                timings = self._timed(peers, ways, server, int(self.cache_share * payload_bytes(shape)))
                ways = [way for way in ways if subject(way[0].name, way[1]) in timings]
                case = f"{REMOTE}, {latency_ms:g} ms"
                results += remote_results(case, timings, shape.num_samples, payload_bytes(shape))
        return results, {"peers": peers.about()}

    def _timed(
        self, peers: PeerSet, ways: list[tuple[Entry, str, Way]], server: ServerProcess, cache_bytes: int
    ) -> dict[str, list[list[Streamed]]]:
        """Time all in alternation; return the passes of each round, by subject, of those that never failed."""
        from bucketline.bench.peers.registry import subject
        from bucketline.bench.peers.runs import PeerError

        timings: dict[str, list[list[Streamed]]] = {subject(entry.name, name): [] for entry, name, _ in ways}

        def measure(entry: Entry, name: str, way: Way) -> Callable[[int], float]:
            def measured(_: int) -> float:
                if name in timings:
                    try:
                        timings[name].append(peers.stream(entry, way, server.url, cache_bytes, self.passes))
                    except PeerError as error:
                        del timings[name]
                        peers.leave_out(name, error)
                return math.nan

            return measured

        subjects = [
            Subject(name=subject(entry.name, name), measure=measure(entry, subject(entry.name, name), way))
            for entry, name, way in ways
        ]
        alternate(subjects, self.repeats, warm_up=False)
        return timings


def chosen(only: tuple[str, ...]) -> list[Entry]:
    """Return the registry's entries that can read from a server, those with these names or all, and Bucketline.

    Raises:
        UsageError: if a name is not one of them.
    """
    from bucketline.bench.peers.registry import ENTRIES, OURS_REMOTE
    from bucketline.errors import UsageError

    remote = {entry.name: entry for entry in ENTRIES if entry.remote_ways is not None}
    if unknown := [name for name in only if name not in remote]:
        raise UsageError(f"--only has {', '.join(unknown)}; expected names from {', '.join(remote)}")
    return [entry for name, entry in remote.items() if not only or name in {*only, OURS_REMOTE}]


def remote_results(case: str, timings: Mapping[str, list[list[Streamed]]], samples: int, payload: int) -> list[Result]:
    """Return each pass's figures next to ours, and the seconds to the first batch."""
    results = _compared(f"{case}, {FIRST}", "s", {name: [one[0].first_batch_s for one in own] for name, own in timings.items()})
    for number in range(min((len(one) for own in timings.values() for one in own), default=0)):
        for figure, (unit, of_pass) in SPEED.items():
            values = {name: [of_pass(one[number], samples) for one in own] for name, own in timings.items()}
            results += _compared(f"{case}, pass {number + 1}, {figure}", unit, values)
        for figure, of_bytes in BYTES.items():
            shares = {name: [of_bytes(one[number]) / payload for one in own] for name, own in timings.items()}
            results += [_share(f"{case}, pass {number + 1}, {figure}", name, own) for name, own in shares.items()]
    return results


def _share(case: str, subject: str, values: list[float]) -> Result:
    median, (q1, q3) = statistics.median(values), quartiles(values)
    return Result(
        case=case, subject=subject, unit="of payload", median=median, q1=q1, q3=q3, repeats=len(values), limit_ratio=median
    )


def _compared(case: str, unit: str, figures: dict[str, list[float]]) -> list[Result]:
    limit = OURS if OURS in figures else None
    subjects = [Subject(name=name, measure=lambda _: math.nan, limit=None if name == limit else limit) for name in figures]
    return summarise(case, unit, subjects, figures)


def main() -> int:
    """Write the samples in every format, serve them, measure and print."""
    return run_case(RemotePeers)


if __name__ == "__main__":
    sys.exit(main())
