"""Time of an `ingest pack` over unchanged images, against a walk of their folder and the start of Python."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Figures, Result, Subject, alternate, run_case, summarise

if TYPE_CHECKING:
    from collections.abc import Callable

START, ONE, AGAIN = "python -c pass", "again over 1 image", "again"
WALK = """
import os, sys
for folder, _, names in os.walk(sys.argv[1]):
    for name in names:
        os.stat(os.path.join(folder, name))
"""


@dataclass(frozen=True, kw_only=True)
class IngestAgain(Case):
    """Measure a repeated `ingest pack` over an unchanged source, in seconds from the start of its process to its end.

    The limit is a Python process that walks the source's folder and reads the metadata of each file, images and captions.
    The same command over one unchanged image is what a run costs before it compares anything. `--check content` also reads and
    hashes every file. CPU seconds are those of all threads, user and system, which a busy machine changes less.

    The stores' rows are made without encoding: `ingest pack` packs one image, and the store's own writer adds rows of zeros
    with the ids, captions, sizes, mtimes and digests of the others.

    Example: python -m bucketline.bench pack --again --images 20000
    """

    repeats: int = 3
    """Repeats per subject, in alternation. All are counted: making the stores already warms the caches."""
    images: int = 500
    """Images of the source, 64 px each, in folders of a thousand."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.photographs import Pieces, kept_photographs
        from bucketline.bench.fixtures.random_model import ModelShape, kept_model

        model = kept_model(folder, ModelShape(vae_widths=(4, 4), text_width=32, text_layers=1))
        one, many = (kept_photographs(folder, Pieces(count=count, sides_px=(64, 64))) for count in (1, self.images))
        name = f"{self.images:,} images"
        walk, again = f"walk and stat of {name}", f"{AGAIN} over {name}"
        with tempfile.TemporaryDirectory(dir=folder, prefix="stores-") as stores:
            runs = _Runs(model, one, Path(stores))
            subjects = [
                Subject(name=START, measure=runs.python("pass")),
                Subject(name=walk, measure=runs.python(WALK, str(many))),
                Subject(name=ONE, measure=runs.again(one, 1), limit=START),
                Subject(name=again, measure=runs.again(many, self.images), limit=walk, beside=(ONE,)),
            ]
            by_content = runs.again(many, self.images, "--check", "content")
            subjects.append(Subject(name=f"{again}, --check content", measure=by_content, limit=walk, beside=(ONE,)))
            seconds = alternate(
                [Subject(name=s.name, measure=runs.noting(s.name, s.measure)) for s in subjects], self.repeats, warm_up=False
            )
        return [
            *summarise("pack, again", "s", subjects, seconds),
            *summarise("pack, again", "CPU-s", [_of_cpu(subject) for subject in subjects], runs.cpu_seconds),
        ]


def _of_cpu(subject: Subject) -> Subject:
    """Return a subject under the name that its CPU time has."""
    limit, beside = subject.limit and _cpu(subject.limit), tuple(map(_cpu, subject.beside))
    return Subject(name=_cpu(subject.name), measure=subject.measure, limit=limit, beside=beside)


def _cpu(name: str) -> str:
    return f"CPU time: {name}"


class _Runs:
    """Runs processes; the stores, and each run's CPU time, stay until the end."""

    def __init__(self, model: Path, one: Path, stores: Path) -> None:
        self._options, self._one, self._stores = ["--model", str(model), "--grid", "64x64"], one, stores
        self._cpu_seconds = 0.0  # of the last run
        self.cpu_seconds: Figures = {}

    def noting(self, name: str, measure: Callable[[int], float]) -> Callable[[int], float]:
        """Return a measure that also notes the CPU time."""

        def noted(number: int) -> float:
            seconds = measure(number)
            self.cpu_seconds.setdefault(_cpu(name), []).append(self._cpu_seconds)
            return seconds

        return noted

    def python(self, code: str, *arguments: str) -> Callable[[int], float]:
        """Return a measure in seconds of a Python process."""
        from bucketline.bench.workers.pack import cpu_seconds_of_children

        def measure(_: int) -> float:
            begin, cpu_begin = time.perf_counter(), cpu_seconds_of_children()
            subprocess.run([sys.executable, "-P", "-c", code, *arguments], check=True, stdin=subprocess.DEVNULL)
            self._cpu_seconds = cpu_seconds_of_children() - cpu_begin
            return time.perf_counter() - begin

        return measure

    def again(self, source: Path, count: int, *options: str) -> Callable[[int], float]:
        """Return a measure in seconds of packing into a store that already has everything."""
        store = self._stores / f"{source.name}.store"

        def measure(_: int) -> float:
            if not store.exists():
                self._make(source, store)
            return self._pack(source, store, *options, unchanged=count)

        return measure

    def _make(self, source: Path, store: Path) -> None:
        from bucketline.bench.fixtures.packed_store import add_unencoded

        self._pack(self._one, store, packed=1)
        self._pack(self._one, store, unchanged=1)  # the first run does not record a model that was made just before it
        if source != self._one:
            add_unencoded(source, store)

    def _pack(self, source: Path, store: Path, *options: str, packed: int = 0, unchanged: int = 0) -> float:
        from bucketline.bench.workers.pack import pack_apart

        command = [str(source), str(store), *self._options, *options]
        packing = pack_apart(command, expected={"packed": packed, "unchanged": unchanged, "rejected": 0})
        self._cpu_seconds = packing.cpu_seconds
        return packing.seconds


def main() -> int:
    """Make the sources and the model, measure and print."""
    return run_case(IngestAgain)


if __name__ == "__main__":
    sys.exit(main())
