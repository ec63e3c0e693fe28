"""Timing: rounds by turns, medians, what a process used, the speed of memory, and the results' file.

Imports nothing heavy, so that a case's `--help` is fast.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bucketline import __version__
from bucketline.command_line import guarded, parse_command, print_json
from bucketline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A target for a subject's ratio to its limit."""

    bound: float
    is_at_most: bool = False

    def is_met_by(self, ratio: float) -> bool:
        return ratio <= self.bound if self.is_at_most else ratio >= self.bound

    def __str__(self) -> str:
        return f"{'at most' if self.is_at_most else 'at least'} {self.bound:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Something to measure: `measure` takes the round's number and returns one figure, or several by name."""

    name: str
    measure: Callable[[int], float | Mapping[str, float]]
    limit: str | None = None  # the subject that is its physical limit; None if it is a limit itself
    beside: tuple[str, ...] = ()  # other subjects to compare it with
    mark: Mark | None = None  # of its only or first figure
    marks: Mapping[str, Mark] = field(default_factory=dict)  # of the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One subject's figures. A ratio is the median over the rounds of subject ÷ other in the same round."""

    case: str
    subject: str
    unit: str
    median: float
    q1: float
    q3: float
    repeats: int
    limit_ratio: float  # 1 for a limit itself
    ratios: dict[str, float] = field(default_factory=dict)  # to other subjects, by name
    mark: Mark | None = None  # on `limit_ratio`

    @classmethod
    def of(
        cls,
        case: str,
        subject: str,
        unit: str,
        values: Sequence[float],
        *,
        ratio: float | None = None,
        mark: Mark | None = None,
    ) -> Result:
        """Return the result of a subject's values. `ratio`: to its limit; None: the median is itself a ratio, or has none."""
        median, (q1, q3) = statistics.median(values), quartiles(values)
        own = median if ratio is None else ratio
        return cls(
            case=case, subject=subject, unit=unit, median=median, q1=q1, q3=q3, repeats=len(values), limit_ratio=own, mark=mark
        )

    @property
    def is_met(self) -> bool | None:
        return None if self.mark is None else self.mark.is_met_by(self.limit_ratio)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "mark": None if self.mark is None else str(self.mark), "is_met": self.is_met}


Figures = dict[str, list[float]]  # subject → one figure per counted round
WARM_UPS = 1  # rounds that are not counted, before the others; tests of what a case prints need none


class Clock:
    """Measures what this process spends from now on."""

    def __init__(self) -> None:
        """Start it."""
        self._begun, self._used = time.perf_counter(), time.process_time()

    def spent(self) -> tuple[float, float]:
        """Return the seconds, and the CPU seconds of all threads."""
        return time.perf_counter() - self._begun, time.process_time() - self._used


def rate(run: Callable[[], int]) -> Callable[[int], float]:
    """Return a measure in GB/s of a function that does its work and returns the number of bytes moved."""

    def measure(_: int) -> float:
        begin = time.perf_counter()
        num_bytes = run()
        return num_bytes / (time.perf_counter() - begin) / 1e9

    return measure


def alternate(subjects: Sequence[Subject], repeats: int, *, warm_up: bool = True) -> dict[str, list[Any]]:
    """Measure every subject once per round. Round 0 warms the caches and is not counted; `warm_up=False` skips it.

    Every other round has a new order, and the round after it the reverse. So no subject always runs after the same other one
    and finds its caches, and effects of the order become visible.
    """
    figures: dict[str, list[Any]] = {subject.name: [] for subject in subjects}
    for number in range(1 - WARM_UPS if warm_up else 1, repeats + 1):
        print(f"round {number} of {repeats}" + ("" if number else ", not counted"), file=sys.stderr)
        order = random.Random(number // 2).sample(subjects, len(subjects))  # noqa: S311 - an order, no secret
        for subject in reversed(order) if number % 2 else order:
            figure = subject.measure(number)
            if number:
                figures[subject.name].append(figure)
    return figures


def compare(
    case: str, units: Mapping[str, str], subjects: Sequence[Subject], repeats: int, *, warm_up: bool = True
) -> list[Result]:
    """Measure subjects that have several figures in alternation, and summarise each figure as a case of its own.

    `units` are by figure; a figure without a name is that of the case itself.
    """
    found, results = alternate(subjects, repeats, warm_up=warm_up), []
    for figure, unit in units.items():
        own = {name: [one[figure] for one in values] for name, values in found.items()}
        marked = [replace(one, mark=one.marks.get(figure)) for one in subjects] if figure else subjects
        results += summarise(f"{case}, {figure}" if figure else case, unit, marked, own)
    return results


def summarise(case: str, unit: str, subjects: Sequence[Subject], figures: Figures) -> list[Result]:
    """Return medians, quartiles and ratios; a subject's limit must be one of the figures."""
    return [
        Result(
            case=case,
            subject=subject.name,
            unit=unit,
            median=_rounded(statistics.median(own)),
            q1=_rounded(quartiles(own)[0]),
            q3=_rounded(quartiles(own)[1]),
            repeats=len(own),
            limit_ratio=_ratio(own, figures[subject.limit or subject.name]),
            ratios={name: _ratio(own, figures[name]) for name in subject.beside},
            mark=subject.mark,
        )
        for subject in subjects
        for own in [figures[subject.name]]
    ]


def not_measured(number: int) -> float:
    """Stand in for the measure of a subject whose figures are computed from those of others."""
    raise AssertionError(f"round {number}: this figure is computed from others, never measured")


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile; for a single value, that value twice.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 4.0)
    """
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def _ratio(own: Sequence[float], other: Sequence[float]) -> float:
    return _rounded(statistics.median(a / b for a, b in zip(own, other, strict=True)))


def _rounded(value: float) -> float:
    """Round to four significant digits, or to three decimal places if that is more.

    >>> _rounded(1.00612), _rounded(0.00012345), _rounded(12.34567)
    (1.0061, 0.0001235, 12.346)
    """
    return round(value, 4) if 1 <= value < 2 else float(f"{value:.4g}") if value < 1 else round(value, 3)


def header() -> dict[str, Any]:
    """Return versions, machine and commit. `commit` is present only if these files are in git."""
    about: dict[str, Any] = {
        "bucketline": __version__,
        **{name: importlib.metadata.version(name) for name in ("torch", "numpy", "lmdb")},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
    }
    torch = sys.modules.get("torch")  # only if a case has imported it
    if torch is not None and torch.cuda.is_available():
        about["gpu"] = torch.cuda.get_device_name()
    if commit := _commit():
        about["commit"] = commit
    return about


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _commit() -> str | None:
    """Return the commit, with `-dirty` if files differ from it; None if this file is not in git."""
    git, here = shutil.which("git"), Path(__file__).resolve()
    if git is None:
        return None

    def ask(*arguments: str) -> str | None:
        done = subprocess.run([git, "-C", str(here.parent), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    if ask("ls-files", "--error-unmatch", here.name) is None:
        return None
    return ask("describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*")


def report(results: Sequence[Result], *, as_json: bool, besides: Mapping[str, Any] | None = None) -> None:
    """Print the header and one line per result, or one JSON object with `besides` added to its header."""
    about = header()
    if as_json:
        about.update(besides or {})
        print_json({"header": about, "results": [result.as_json() for result in results]})
        return
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print_table([result.as_json() for result in results])


def print_table(results: Sequence[Mapping[str, Any]]) -> None:
    """Print one line per result, under the name of its case."""
    width = max((len(result["subject"]) for result in results), default=0)
    case = None
    for result in results:
        if result["case"] != case:
            case = result["case"]
            print(f"{case}: median (first to third quartile); 'of limit' is the median of each round's own ratio")
        line = f"  {result['subject']:<{width}}  {result['median']:9.4g} {result['unit']:<10}"
        line += f" ({result['q1']:.4g} to {result['q3']:.4g})" if result["repeats"] > 1 else ""
        if result["limit_ratio"] != result["median"]:  # a figure that is itself a ratio is not printed twice
            line += f"  {result['limit_ratio']:.4g} of limit"
        if result["mark"] is not None:
            line += f" [{result['mark']}: {'met' if result['is_met'] else 'MISSED'}]"
        line += "".join(f", {ratio:.4g} of {name}" for name, ratio in result["ratios"].items())
        print(line.rstrip())


@dataclass(frozen=True, kw_only=True)
class Case:
    """Base class of a case's command line. Subclasses add options and implement `measure`."""

    repeats: int = 7
    """Repeats per subject, in alternation. The first round is a warm-up and not counted."""
    stores: Path | None = None
    """Make the stores in this folder and keep them for the next run. Default: a temporary folder."""
    json: bool = False
    """Print one JSON object."""

    def measure(self, folder: Path) -> list[Result]:
        """Make the fixtures in `folder` and return the measurements."""
        raise NotImplementedError

    def measure_and_tell(self, folder: Path) -> tuple[list[Result], dict[str, Any]]:
        """Return the measurements and additional header fields."""
        return self.measure(folder), {}

    def run(self) -> int:
        """Measure, print and return the exit code."""
        for one in fields(self):
            value = getattr(self, one.name)
            if any(type(number) is int and number < 1 for number in (value if isinstance(value, tuple) else (value,))):
                raise UsageError(f"--{one.name.replace('_', '-')} is {value}, expected 1 or more")
        with self._folder() as folder:
            results, besides = self.measure_and_tell(folder)
        report(results, as_json=self.json, besides=besides)
        return 0

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        if self.stores is None:
            with tempfile.TemporaryDirectory(prefix="bucketline-bench-") as folder:
                yield Path(folder)
            return
        self.stores.mkdir(parents=True, exist_ok=True)
        yield self.stores


@dataclass(frozen=True, kw_only=True)
class StoreCase(Case):
    """Base class of the cases that read a store of latents and captions at random."""

    num_shards: int = 32
    """Shards of the store. A batch spans most of them."""
    rows_per_shard: int = 128
    """Rows per shard."""
    row_kib: int = 128
    """KiB per row of latents."""
    batch_size: int = 32
    """Rows per batch."""

    @property
    def one_pass(self) -> int:
        """The batches that deliver every row once."""
        return self.num_shards * self.rows_per_shard // self.batch_size

    def kept_store(self, folder: Path, **shape: Any) -> Path:  # noqa: ANN401 - fields of a `StoreShape`
        """Return the store in `folder`; create it if missing."""
        from bucketline.bench.fixtures.stores import StoreShape, kept_store, latent_shape

        sizes = {
            "num_shards": self.num_shards,
            "rows_per_shard": self.rows_per_shard,
            "latent_shape": latent_shape(self.row_kib),
        }
        return kept_store(folder, StoreShape(**{**sizes, **shape}))


def bytes_taken(batches: Iterator[Any], number: int) -> int:
    """Take batches; return the bytes of their tensors."""
    return sum(sum(tensor.nbytes for tensor in next(batches).tensors()) for _ in range(number))


def run_case(case: type[Case], args: Sequence[str] | None = None) -> int:
    """Parse a case's command line, measure, print and return the exit code."""

    def parse_and_run() -> int:
        return parse_command(case, sys.argv[1:] if args is None else args, "python -m bucketline.bench").run()

    return guarded(parse_and_run)


FROM_DISK = 0.95  # minimum fraction of the payload that a cold run reads from the disk
TRIES = 3  # of a cold run


def drop_pages(path: Path) -> None:
    """Write the pages of a file, or of all files in a folder, to the disk and drop them from the page cache.

    Pages that a process has mapped stay, so call this before mapping them.
    """
    for file in [path] if path.is_file() else path.rglob("*"):
        if not file.is_file():
            continue
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


# ---------------------------------------------------------------------------------------------------------------------- memcpy
# The limit of reads from memory: copies of the same size by libc.

_libc = ctypes.CDLL(None)  # its calls run without Python's lock
memcpy = _libc.memcpy
memcpy.restype = ctypes.c_void_p
memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Copies:
    """Copies into buffers in turn, as a loader fills them, from a source as large as the store: no cache holds it.

    numpy requests huge pages for it, which a file's map does not have, so the limit is that of memory, not of the page table.
    """

    def __init__(self, buffer_bytes: int, num_buffers: int, source_bytes: int) -> None:
        """Allocate source and buffers, and touch their pages."""
        self._buffer_bytes = buffer_bytes
        self._buffers = [torch.zeros(buffer_bytes, dtype=torch.uint8) for _ in range(num_buffers)]
        num_bytes = max(source_bytes, buffer_bytes)
        words = np.random.default_rng(0).integers(0, 1 << 63, -(-num_bytes // 8), dtype=np.int64)
        self._source = torch.from_numpy(words).view(torch.uint8)
        self._at = 0

    def memcpy(self, batches: int, num_threads: int, row_bytes: int | None = None) -> Callable[[], int]:
        """Prepare `memcpy` of `batches` batches; each thread copies its share of every batch.

        `row_bytes`: of the rows that a batch is copied by, each from a random place; None if it is one piece.
        """
        piece = row_bytes or self._buffer_bytes // num_threads
        pieces, num_places = self._buffer_bytes // piece, self._source.numel() // piece
        places = np.random.default_rng(0).permutation(num_places).tolist() if row_bytes else range(num_places)

        def work(thread: int) -> None:
            own = range(pieces * thread // num_threads, pieces * (thread + 1) // num_threads)
            for number in range(self._at, self._at + batches):
                to, first = self._buffers[number % len(self._buffers)].data_ptr(), number * pieces
                for at in own:
                    memcpy(to + at * piece, self._source.data_ptr() + places[(first + at) % num_places] * piece, piece)

        def run() -> int:
            in_threads(num_threads, work)
            self._at += batches
            return batches * pieces * piece

        return run


def in_threads(num_threads: int, work: Callable[[int], None]) -> None:
    """Call `work` with 0 to `num_threads` - 1, each in a separate thread, and raise the first failure."""
    if num_threads == 1:
        work(0)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(work, range(num_threads)))
