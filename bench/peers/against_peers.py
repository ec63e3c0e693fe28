"""Cost of delivering the same samples with Bucketline, other loaders and the limits: hot and cold, in separate processes."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, run_case, summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bucketline.bench.harness import Figures
    from bucketline.bench.peers.peer import Way
    from bucketline.bench.peers.registry import Entry
    from bucketline.bench.peers.runs import PeerSet
    from bucketline.bench.peers.samples import SetShape
    from bucketline.bench.peers.worker import Timed

HOT, COLD = "peers, hot", "peers, cold"
WALL, CPU, NET, FIRST = "delivered", "CPU", "CPU less touching", "first batch"
MEMCPY, TOUCHED, OURS, BEST = "memcpy, 1 thread", "resident batches, touched", "bucketline, 1 thread", "LMDB in a DataLoader"
OF_MEMCPY = Mark(bound=1.3, is_at_most=True)
OF_BEST, OF_FILES, OF_COLD = Mark(bound=2.0), Mark(bound=10.0), Mark(bound=3.0)
SIZES = ((128, 128), (112, 144), (144, 112), (96, 160))  # h, w of the latents' buckets
MARKED_BATCHES = 96  # of all buckets: the targets apply to sets at least this large, where the start-up matters little
ROUNDS_OF_ORDER = 6  # three in each order

Timings = dict[tuple[int, str], "Timed"]  # by round and subject


@dataclass(frozen=True, kw_only=True)
class AgainstPeers(Case):
    """Compare delivery with other loaders and the limits, on the same samples in four buckets.

    Every peer is used as its documentation recommends, in a separate virtual environment with pinned versions. A peer that
    cannot be installed is reported, and the others continue. Before any timing, each must deliver every sample once per pass
    with the right bytes, in contiguous batches of one shape. Every repeat is a separate process. All of them read each byte of
    each batch, and the sums must match. `CPU less touching` excludes the cost of reading batches that are already in memory.
    When cold, pages are dropped in advance, the clock also covers opening, and a run counts only if the bytes came from the
    disk. The targets apply to 24 batches per bucket and more.

    Example: python -m bucketline.bench peers --batches-per-bucket 4 --repeats 2 --only "bucketline" "memcpy"
    """

    batches_per_bucket: int = 24
    """Batches in each of the four buckets. 24 batches of 32 samples take about 620 MB for each peer."""
    batch_size: int = 32
    """Samples per batch."""
    least_s: float = 1.0
    """Minimum total seconds of a hot repeat's passes."""
    ways: int = 3
    """Number of configurations per peer (no worker processes, two, and so on), starting with the first."""
    only: tuple[str, ...] = ()
    """Measure only these peers. Default: all. Bucketline and the limits are always included."""
    environments: Path = Path("build/peers")
    """Make the peers' virtual environments in this folder and keep them."""

    def measure(self, folder: Path) -> list[Result]:
        return self.measure_and_tell(folder)[0]

    def measure_and_tell(self, folder: Path) -> tuple[list[Result], dict[str, Any]]:
        from bucketline.bench.peers.capabilities import as_json
        from bucketline.bench.peers.runs import PeerSet

        rows = self.batches_per_bucket * self.batch_size
        shape = shape_of(rows, self.batch_size)
        peers = PeerSet(
            folder=(folder / f"peers-{rows}x{self.batch_size}").absolute(),
            shape=shape,
            environments=self.environments.absolute(),
        )
        passed = peers.prepare(chosen(self.only), self.ways)
        payload, are_marked = payload_bytes(shape), shape.num_batches >= MARKED_BATCHES
        hot = self._timed(
            peers,
            [way for way in passed if way[1] in way[0].hot(self.ways)],
            lambda entry, way: peers.hot(entry, way, self.least_s),
        )
        cold = self._timed(
            peers,
            [way for way in passed if way[1] in way[0].cold(self.ways)],
            lambda entry, way: peers.cold(entry, way, payload),
        )
        results = [*hot_results(*hot), *cold_results(*cold), *disk_results(peers.disk_bytes, payload)]
        if not are_marked:
            results = [replace(result, mark=None) for result in results]
        return results, {"peers": {**peers.about(), "capabilities": as_json()}}

    def _timed(
        self, peers: PeerSet, ways: Sequence[tuple[Entry, str, Way]], time: Callable[[Entry, Way], Timed]
    ) -> tuple[list[str], Timings]:
        """Time all in alternation; return the names of those that never failed, and the timings."""
        from bucketline.bench.peers.registry import subject
        from bucketline.bench.peers.runs import PeerError

        timings: Timings = {}
        failed = set[str]()

        def measure(entry: Entry, name: str, way: Way) -> Callable[[int], float]:
            def measured(number: int) -> float:
                if name in failed:
                    return math.nan
                try:
                    timings[number, name] = time(entry, way)
                except PeerError as error:
                    failed.add(name)
                    peers.leave_out(name, error)
                    return math.nan
                return timings[number, name].wall_s

            return measured

        subjects = [
            Subject(name=subject(entry.name, name), measure=measure(entry, subject(entry.name, name), way))
            for entry, name, way in ways
        ]
        alternate(subjects, self.repeats, warm_up=False)
        return [one.name for one in subjects if one.name not in failed], timings


def shape_of(rows: int, batch_size: int) -> SetShape:
    """Return the shape of a set with `rows` rows in each bucket."""
    from bucketline.bench.peers.samples import SetShape

    return SetShape(buckets=tuple((height, width, rows) for height, width in SIZES), batch_size=batch_size)


def payload_bytes(shape: SetShape) -> int:
    """Return the total bytes of the samples: latents, tokens without padding, sizes."""
    from bucketline.bench.peers.samples import sample

    tokens = sum(len(sample(shape, number).tokens) for number in range(shape.num_samples))
    latents = sum(2 * shape.channels * height * width * rows for height, width, rows in shape.buckets)
    return latents + 2 * shape.token_width * tokens + 16 * shape.num_samples


def chosen(only: Sequence[str]) -> list[Entry]:
    """Return the registry's entries with these names, or all; Bucketline and the limits are always included.

    Raises:
        UsageError: if a name is unknown.
    """
    from bucketline.bench.peers.registry import BY_NAME, ENTRIES
    from bucketline.errors import UsageError

    if unknown := [name for name in only if name not in BY_NAME]:
        raise UsageError(f"--only has {', '.join(unknown)}; expected names from {', '.join(BY_NAME)}")
    always = {"resident batches", "memcpy", "O_DIRECT", "bucketline"}
    local = [entry for entry in ENTRIES if entry.hot(1) or entry.cold(1)]
    return [entry for entry in local if not only or entry.name in {*only, *always}]


def hot_results(names: Sequence[str], timings: Timings) -> list[Result]:
    """Return the hot figures: GB/s, CPU seconds per GB with and without touching, peers against us, and the order check."""
    wall = _figures(names, timings, lambda one: one.num_bytes / one.wall_s / 1e9)
    cpu = _figures(names, timings, lambda one: one.cpu_s / one.num_bytes * 1e9)
    touched = cpu[TOUCHED]
    net = {
        name: [max(1e-6, own - touch) for own, touch in zip(cpu[name], touched, strict=True)]
        for name in names
        if name != TOUCHED
    }
    results = _beside(f"{HOT}, {WALL}", "GB/s", wall, MEMCPY, {})
    for case, figures in ((CPU, cpu), (NET, net)):
        results += _beside(f"{HOT}, {case}", "s/GB", figures, MEMCPY, {OURS: OF_MEMCPY, "bucketline, service": OF_MEMCPY})
        others = {name: values for name, values in figures.items() if not _is_limit(name)}
        results += _beside(f"{HOT}, {case}, against Bucketline", "s/GB", others, OURS, _marks_of_peers(others))
    return [*results, *order_results(f"{HOT}, order", wall)]


def cold_results(names: Sequence[str], timings: Timings) -> list[Result]:
    """Return the cold figures: GB/s against O_DIRECT reads and LMDB, CPU seconds per GB, seconds to the first batch."""
    wall = _figures(names, timings, lambda one: one.num_bytes / one.wall_s / 1e9)
    cpu = _figures(names, timings, lambda one: one.cpu_s / one.num_bytes * 1e9)
    ours = [name for name in names if name.startswith("bucketline")]
    direct = _best(wall, "O_DIRECT")
    results: list[Result] = []
    if direct is not None:
        results = [
            *_beside(f"{COLD}, {WALL}", "GB/s", wall, direct, {}),
            *_beside(f"{COLD}, {CPU}", "s/GB", cpu, direct, {}),
        ]
    if (best := _best(wall, BEST)) is not None:
        beside = {name: wall[name] for name in [best, *ours]}
        results += _beside(f"{COLD}, {WALL}, against LMDB", "GB/s", beside, best, dict.fromkeys(ours, OF_COLD))
    if OURS in names:
        results += _beside(f"{COLD}, {FIRST}", "s", _figures(names, timings, lambda one: one.first_batch_s), OURS, {})
    return [*results, *order_results(f"{COLD}, order", wall)]


def disk_results(disk_bytes: Mapping[str, int], payload: int) -> list[Result]:
    """Return each format's disk space per byte of the samples."""
    values = {name: round(own / payload, 6) for name, own in disk_bytes.items() if own}
    return [_single("peers, disk", name, "of payload", value, None) for name, value in values.items()]


def _figures(names: Sequence[str], timings: Timings, figure: Callable[[Timed], float]) -> Figures:
    return {name: [figure(one) for (_, own), one in sorted(timings.items()) if own == name] for name in names}


def _beside(case: str, unit: str, figures: Figures, limit: str, marks: Mapping[str, Mark]) -> list[Result]:
    subjects = [
        Subject(name=name, measure=lambda _: math.nan, limit=None if name == limit else limit, mark=marks.get(name))
        for name in figures
    ]
    return summarise(case, unit, subjects, figures)


def _is_limit(name: str) -> bool:
    return name.startswith(("memcpy", "resident", "O_DIRECT"))


def _marks_of_peers(names: Mapping[str, object]) -> dict[str, Mark]:
    from bucketline.bench.peers.registry import ONE_FILE_EACH

    files = {name: OF_FILES for name in names if name.startswith(ONE_FILE_EACH)}
    return {**files, f"{BEST}, 0 workers": OF_BEST}


def _best(figures: Figures, start: str) -> str | None:
    """Return the fastest subject whose name begins with `start`."""
    import statistics

    own = {name: statistics.median(values) for name, values in figures.items() if name.startswith(start)}
    return max(own, key=lambda name: own[name], default=None)


def order_results(case: str, figures: Figures) -> list[Result]:
    """Count pairs of subjects whose ranking depends on the order of measurement; return nothing for few rounds.

    Each second round is measured in the reverse order of the one before. A pair counts if odd and even rounds clearly rank it
    differently: the two subjects' figures overlap in neither.
    """
    if min(map(len, figures.values()), default=0) < ROUNDS_OF_ORDER:
        return []
    names = sorted(figures)
    pairs = [(a, b) for at, a in enumerate(names) for b in names[at + 1 :]]
    turned = sum(
        _clearly_above(figures[a][::2], figures[b][::2]) * _clearly_above(figures[a][1::2], figures[b][1::2]) < 0
        for a, b in pairs
    )
    result = _single(case, f"of {len(pairs)} pairs, ranked by the order of measuring", "pairs", float(turned), None)
    return [replace(result, mark=Mark(bound=0, is_at_most=True))]


def _clearly_above(first: Sequence[float], second: Sequence[float]) -> int:
    """Return 1 if all of the first are above all of the second, -1 if all are below, else 0."""
    return (min(first) > max(second)) - (max(first) < min(second))


def _single(case: str, name: str, unit: str, value: float, mark: Mark | None) -> Result:
    return Result(case=case, subject=name, unit=unit, median=value, q1=value, q3=value, repeats=1, limit_ratio=value, mark=mark)


def main() -> int:
    """Write the samples in every format, measure and print."""
    return run_case(AgainstPeers)


if __name__ == "__main__":
    sys.exit(main())
