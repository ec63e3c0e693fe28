"""Cost of delivering the same samples with Bucketline, other loaders and the limits: hot, cold, and from a server."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.bench.harness import Case, Mark, Result, Subject, not_measured, summarise
from bucketline.bench.peers.registry import ENTRIES, ONE_FILE_EACH, OURS, OURS_REMOTE
from bucketline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bucketline.bench.harness import Figures
    from bucketline.bench.peers.peer_set import PeerSet
    from bucketline.bench.peers.registry import Entry, Ways
    from bucketline.bench.peers.worker import Timed

    Timings = Mapping[str, list[list[Timed]]]

HOT, COLD, REMOTE = "peers, hot", "peers, cold", "peers, remote"
LIMITS = ("memcpy", "resident batches", "O_DIRECT")
WALL, CPU, NET, FIRST = "delivered", "CPU", "CPU less touching", "first batch"
MEMCPY, TOUCHED, ONE_THREAD, BEST = (
    "memcpy, 1 thread",
    "resident batches, touched",
    f"{OURS}, 1 thread",
    "LMDB in a DataLoader",
)
FROM_SERVER = f"{OURS_REMOTE}, 1 thread"
OF_MEMCPY, OF_PAYLOAD, NO_MORE = (Mark(bound=bound, is_at_most=True) for bound in (1.15, 1.05, 1.0))
OF_BEST, OF_FILES, OF_DISK = Mark(bound=2.0), Mark(bound=10.0), Mark(bound=0.9)
MARKED_BATCHES = 96  # of all buckets: the targets apply to sets at least this large, where the start-up matters little
ROUNDS_OF_ORDER = 6  # three in each order
GATE_CACHE_BYTES = 1 << 40


@dataclass(frozen=True, kw_only=True)
class _OnPeers(Case):
    """Base class of both parts."""

    batches_per_bucket: int = 24
    """Batches in each of the four buckets. 24 batches of 32 samples take about 620 MB for each peer."""
    batch_size: int = 32
    """Samples per batch."""
    ways: int = 3
    """Number of configurations per peer (no worker processes, two, and so on), starting with the first."""
    only: tuple[str, ...] = ()
    """Measure only these peers. Default: all. Bucketline and the limits are always included."""
    environments: Path = Path("build/peers")
    """Make the peers' virtual environments in this folder and keep them."""

    def measure(self, folder: Path) -> list[Result]:
        return self.measure_and_tell(folder)[0]

    def _set(self, folder: Path) -> PeerSet:
        from bucketline.bench.peers.peer_set import PeerSet
        from bucketline.bench.peers.samples import SetShape

        return PeerSet(
            folder=(folder / f"peers-{self.batches_per_bucket * self.batch_size}x{self.batch_size}").absolute(),
            shape=SetShape.of_batches(self.batches_per_bucket, self.batch_size),
            environments=self.environments.absolute(),
        )

    def _first(self, ways: Ways) -> Ways:
        return dict(list(ways.items())[: self.ways])


@dataclass(frozen=True, kw_only=True)
class Peers(_OnPeers):
    """Compare delivery with other loaders and the limits, on the same samples in four buckets.

    Every peer is used as its documentation recommends, in a separate virtual environment with pinned versions. A peer that
    cannot be installed is reported, and the others continue. Before any timing, each must deliver every sample once per pass
    with the right bytes, in contiguous batches of one shape. Every repeat is a separate process. All of them read each byte of
    each batch, and the sums must match. `CPU less touching` excludes the cost of reading batches that are already in memory.
    When cold, pages are dropped in advance, the clock also covers opening, and a run counts only if the bytes came from the
    disk. The targets apply to 24 batches per bucket and more.

    Example: python -m bucketline.bench peers --batches-per-bucket 4 --repeats 2 --only "bucketline" "memcpy"
    """

    least_s: float = 1.0
    """Minimum total seconds of a hot repeat's passes."""

    def measure_and_tell(self, folder: Path) -> tuple[list[Result], dict[str, Any]]:
        from bucketline.bench.peers.registry import as_json

        peers = self._set(folder)
        written = peers.write(chosen([entry for entry in ENTRIES if entry.hot or entry.cold], self.only))
        passed = peers.gate(written, lambda entry: {**self._first(entry.hot), **self._first(entry.cold)})
        payload = peers.shape.payload_bytes

        def timed(ways: Callable[[Entry], Mapping[str, object]], measure: Callable[..., list[Timed]], least: float) -> Timings:
            own = [one for one in passed if one.way in ways(one.entry).values()]
            return peers.time(own, self.repeats, lambda one: measure(one, least))

        hot = timed(lambda entry: self._first(entry.hot), peers.hot, self.least_s)
        cold = timed(lambda entry: self._first(entry.cold), peers.cold, payload)
        results = [*hot_results(hot), *cold_results(cold), *disk_results(peers.disk_bytes, payload)]
        if peers.shape.num_batches < MARKED_BATCHES:
            results = [replace(result, mark=None) for result in results]
        return results, {"peers": {**peers.about(), "capabilities": as_json()}}


@dataclass(frozen=True, kw_only=True)
class RemotePeers(_OnPeers):
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
    latency_ms: tuple[float, ...] = (0.0, 30.0)
    """Milliseconds before each of the server's answers; each is measured."""
    passes: int = 2
    """Passes of a repeat, in one process."""
    cache_share: float = 0.5
    """Bytes that the cache may hold, as a share of the samples' bytes."""
    ways: int = 2
    """Number of configurations per peer (no worker processes, two), starting with the first."""

    def measure_and_tell(self, folder: Path) -> tuple[list[Result], dict[str, Any]]:
        from bucketline.bench.fixtures.server_process import ServerProcess

        peers, results = self._set(folder), list[Result]()
        written, payload = (
            peers.write(chosen([entry for entry in ENTRIES if entry.remote], self.only)),
            peers.shape.payload_bytes,
        )
        with ServerProcess(peers.folder.parent) as server:
            place = {"endpoint": server.url, "cache_bytes": GATE_CACHE_BYTES}
            passed = peers.gate(written, lambda entry: self._first(entry.remote), **place)
            for latency_ms in self.latency_ms:
                server.set_latency(latency_ms / 1000)
                cache_bytes = int(self.cache_share * payload)
                found = peers.time(
                    passed,
                    self.repeats,
                    lambda one, room=cache_bytes: peers.stream(one, server.url, room, self.passes),  # type: ignore[misc]
                )
                passed = [one for one in passed if one.name in found]
                results += remote_results(f"{REMOTE}, {latency_ms:g} ms", found, peers.shape.num_samples, payload)
        return results, {"peers": peers.about()}


def chosen(entries: Sequence[Entry], only: Sequence[str]) -> list[Entry]:
    """Return the entries with these names, or all; Bucketline and the limits are always included."""
    names = [entry.name for entry in entries]
    if unknown := [name for name in only if name not in names]:
        raise UsageError(f"--only has {', '.join(unknown)}; expected names from {', '.join(names)}")
    return [entry for entry in entries if not only or entry.name in only or not entry.environment]


def hot_results(timings: Timings) -> list[Result]:
    """Return the hot figures: GB/s, CPU seconds per GB with and without touching, peers against us, and the order check."""
    wall, cpu = _wall(timings), _cpu(timings)
    net = {
        name: [max(1e-6, one - touch) for one, touch in zip(own, cpu[TOUCHED], strict=True)]
        for name, own in cpu.items()
        if name != TOUCHED
    }
    results = _held(f"{HOT}, {WALL}", "GB/s", wall, MEMCPY)
    for case, figures in ((CPU, cpu), (NET, net)):
        ours = dict.fromkeys((ONE_THREAD, f"{OURS}, service"), OF_MEMCPY)
        results += _held(f"{HOT}, {case}", "s/GB", figures, MEMCPY, ours)
        others = {name: own for name, own in figures.items() if not name.startswith(LIMITS)}
        marks = {name: OF_FILES for name in others if name.startswith(ONE_FILE_EACH)} | {f"{BEST}, 0 workers": OF_BEST}
        results += _held(f"{HOT}, {case}, against Bucketline", "s/GB", others, ONE_THREAD, marks)
    return [*results, *order_results(f"{HOT}, order", wall)]


def cold_results(timings: Timings) -> list[Result]:
    """Return the cold figures: GB/s against O_DIRECT reads and LMDB, CPU seconds per GB, seconds to the first batch."""
    wall = _wall(timings)
    direct, best, results = _fastest(wall, "O_DIRECT"), _fastest(wall, BEST), list[Result]()
    cpu, ours = _cpu(timings), [name for name in wall if name.startswith(OURS)]
    if direct is not None:
        results += _held(f"{COLD}, {WALL}", "GB/s", wall, direct, dict.fromkeys(ours, OF_DISK))
        results += _held(f"{COLD}, {CPU}", "s/GB", cpu, direct)
    if best is not None:
        for case, unit, figures in ((WALL, "GB/s", wall), (CPU, "s/GB", cpu)):
            marks = dict.fromkeys(ours, NO_MORE) if case == CPU else {}
            held = {name: figures[name] for name in [best, *ours]}
            results += _held(f"{COLD}, {case}, against LMDB", unit, held, best, marks)
    if ONE_THREAD in wall:
        results += first_batch_results(f"{COLD}, {FIRST}", timings, ONE_THREAD)
    return [*results, *order_results(f"{COLD}, order", wall)]


def remote_results(case: str, timings: Timings, samples: int, payload: int) -> list[Result]:
    """Return each pass's figures next to ours, and the seconds to the first batch."""
    ours = FROM_SERVER if FROM_SERVER in timings else None
    results = first_batch_results(f"{case}, {FIRST}", timings, ours, "WebDataset")
    for part in range(min((len(one) for own in timings.values() for one in own), default=0)):
        at = f"{case}, pass {part + 1}"
        results += _held(f"{at}, samples", "samples/s", _values(timings, lambda one: samples / one.wall_s, part), ours)
        cpu = _cpu(timings, part)
        results += _held(f"{at}, CPU", "s/GB", cpu, ours)
        if ours is not None:
            results.append(Result.of(f"{at}, CPU, of one GB", ours, "s/GB", cpu[ours], mark=NO_MORE))
        sent, cached = _values(timings, lambda one: one.sent_bytes, part), _values(timings, lambda one: one.cached_bytes, part)
        for figure, values in (("bytes sent", sent), ("cache", cached)):
            shares = {name: [one / payload for one in own] for name, own in values.items()}
            marks = {FROM_SERVER: OF_PAYLOAD} if values is sent else {}
            results += [
                Result.of(f"{at}, {figure}", name, "of payload", own, mark=marks.get(name)) for name, own in shares.items()
            ]
    return results


def first_batch_results(case: str, timings: Timings, ours: str | None, among: str = "") -> list[Result]:
    """Return the seconds to the first batch next to ours, and ours next to those of the first peer of those `among`."""
    first = _values(timings, lambda one: one.first_batch_s)
    results = _held(case, "s", first, ours)
    others = {name: own for name, own in first.items() if name.startswith(among) and not name.startswith((OURS, *LIMITS))}
    if ours is not None and others:
        best = min(others, key=lambda name: statistics.median(others[name]))
        held = {name: first[name] for name in (best, ours)}
        results += _held(f"{case}, against the first peer", "s", held, best, {ours: NO_MORE})
    return results


def disk_results(disk_bytes: Mapping[str, int], payload: int) -> list[Result]:
    return [Result.of("peers, disk", name, "of payload", [round(own / payload, 6)]) for name, own in disk_bytes.items() if own]


def order_results(case: str, figures: Figures) -> list[Result]:
    """Count pairs of subjects whose ranking depends on the order of measurement; return nothing for few rounds.

    Each second round is measured in the reverse order of the one before. A pair counts if odd and even rounds clearly rank it
    differently: the two subjects' figures overlap in neither.
    """
    if min(map(len, figures.values()), default=0) < ROUNDS_OF_ORDER:
        return []
    names = sorted(figures)
    pairs = [(figures[a], figures[b]) for at, a in enumerate(names) for b in names[at + 1 :]]
    turned = sum(_clearly_above(a[::2], b[::2]) * _clearly_above(a[1::2], b[1::2]) < 0 for a, b in pairs)
    subject = f"of {len(pairs)} pairs, ranked by the order of measuring"
    return [Result.of(case, subject, "pairs", [float(turned)], mark=Mark(bound=0, is_at_most=True))]


def _clearly_above(first: Sequence[float], second: Sequence[float]) -> int:
    """Return 1 if all of the first are above all of the second, -1 if all are below, else 0."""
    return (min(first) > max(second)) - (max(first) < min(second))


def _values(timings: Timings, figure: Callable[[Timed], float], part: int = 0) -> Figures:
    return {name: [figure(one[part]) for one in rounds] for name, rounds in timings.items()}


def _wall(timings: Timings) -> Figures:
    return _values(timings, lambda one: one.num_bytes / one.wall_s / 1e9)


def _cpu(timings: Timings, part: int = 0) -> Figures:
    return _values(timings, lambda one: one.cpu_s / one.num_bytes * 1e9, part)


def _held(case: str, unit: str, figures: Figures, limit: str | None, marks: Mapping[str, Mark] | None = None) -> list[Result]:
    """Return the results of figures, each next to those of the limit."""
    subjects = [
        Subject(name=name, measure=not_measured, limit=None if name == limit else limit, mark=(marks or {}).get(name))
        for name in figures
    ]
    return summarise(case, unit, subjects, figures)


def _fastest(figures: Figures, start: str) -> str | None:
    """Return the fastest subject whose name begins with `start`."""
    own = {name: statistics.median(values) for name, values in figures.items() if name.startswith(start)}
    return max(own, key=lambda name: own[name], default=None)
