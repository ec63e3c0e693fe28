"""Importing another trainer's cache compared with reading its files only."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, run_case, summarise
from bucketline.store import LatentColumn, StoreWriter

if TYPE_CHECKING:
    from collections.abc import Callable

MARK = Mark(bound=0.7)
READ, READ_BY_ONE, WRITE, IMPORT = "read the files", "read the files, one process", "write the rows", "import"
BOTH = "both, one after the other"
CPU = ", CPU"
SDXL_SPREAD = 7.7  # of its VAE's latents


@dataclass(frozen=True, kw_only=True)
class IngestImport(Case):
    """Measure `ingest import kohya` against reading the same npz files with numpy, and against writing rows, in samples/s.

    `read the files` opens every file and reads every array in it, in as many processes as there are cores, as the
    workers of kohya's data loader do. `write the rows` takes the same rows from memory through the store's own
    writer to the published store. Both need the cores, so R and W samples/s make 1/(1/R + 1/W) together, which no import
    exceeds. An import goes from the listing to the published store, in this process; it also compares the latents' spread with
    the VAE's, and converts them to F16. All files are in the page cache. The latents are random, of 1024 x 1024 px in SDXL,
    without text. `CPU` is the processor time of each, of all its processes, by GB of the cache's files.

    Example: python -m bucketline.bench import --samples 4000
    """

    samples: int = 600
    """Files of the cache, 257 KiB each."""

    def measure(self, folder: Path) -> list[Result]:
        cache = kept_cache(folder, self.samples)
        with tempfile.TemporaryDirectory(dir=folder, prefix="stores-") as stores:
            runs = _Runs(cache, Path(stores), self.samples)
            alone = [
                Subject(name=READ, measure=runs.read(len(os.sched_getaffinity(0)))),
                Subject(name=READ_BY_ONE, measure=runs.read(1)),
                Subject(name=WRITE, measure=runs.write),
            ]
            whole = Subject(name=IMPORT, measure=runs.imported, limit=READ, beside=(READ_BY_ONE, BOTH), mark=MARK)
            figures = alternate([*alone, whole], self.repeats)
            figures[BOTH] = [1 / (1 / read + 1 / write) for read, write in zip(figures[READ], figures[WRITE], strict=True)]
            limit = Subject(name=BOTH, measure=_computed)
            cpu = [Subject(name=name + CPU, measure=_computed, limit=READ + CPU) for name in (READ, WRITE, IMPORT)]
            return [
                *summarise("import", "samples/s", [*alone, limit, whole], figures),
                *summarise("import", "CPU-s/GB", cpu, runs.cpu_s_per_gb),
            ]


def _computed(number: int) -> float:
    raise AssertionError(f"round {number}: the limit is computed from the other figures, never measured")


def kept_cache(folder: Path, count: int) -> Path:
    """Make a cache of `count` samples in `folder`, in folders of a thousand, unless it is there already."""
    cache = folder / f"kohya-{count}"
    if cache.exists():
        return cache
    making = folder / f"kohya-{count}.making"
    shutil.rmtree(making, ignore_errors=True)
    random = np.random.default_rng(0)
    for number in range(count):
        path = making / f"{number // 1000:03d}" / f"{number:07d}_1200x1200_sdxl.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        latents = (SDXL_SPREAD * random.standard_normal((4, 128, 128))).astype(np.float32)
        np.savez(path, latents=latents, original_size=np.array([1200, 1200]), crop_ltrb=np.array([88, 88, 1112, 1112]))
    making.rename(cache)
    return cache


class _Runs:
    """Reads or imports the cache."""

    def __init__(self, cache: Path, stores: Path, samples: int) -> None:
        self._cache, self._stores, self._samples = cache, stores, samples
        self._gb = sum(path.stat().st_size for path in cache.rglob("*.npz")) / 1e9
        self.cpu_s_per_gb: dict[str, list[float]] = {name + CPU: [] for name in (READ, WRITE, IMPORT)}

    def _note(self, subject: str, number: int, cpu_s: float) -> None:
        if number:  # round 0 is not counted
            self.cpu_s_per_gb[subject + CPU].append(cpu_s / self._gb)

    def read(self, processes: int) -> Callable[[int], float]:
        """Return a function that reads every file in processes that have started, and returns samples/s."""

        def measure(number: int) -> float:
            with ProcessPoolExecutor(processes, mp_context=get_context("forkserver")) as pool:
                list(pool.map(time.sleep, [0.3] * processes))  # so that each has started and imported this module
                begin = time.perf_counter()
                paths = list(self._cache.rglob("*.npz"))
                found, cpu_s = map(sum, zip(*pool.map(_arrays, paths, chunksize=16), strict=True))
                seconds = time.perf_counter() - begin
            assert found == 3 * self._samples
            if processes > 1:
                self._note(READ, number, cpu_s)
            return self._samples / seconds

        return measure

    def write(self, number: int) -> float:
        """Write as many rows to a new store, publish it, and return samples/s."""
        store = self._stores / f"{number}.written.store"
        latent = (SDXL_SPREAD * np.random.default_rng(1).standard_normal((4, 128, 128))).astype("<f2")
        begin, cpu_s = time.perf_counter(), time.process_time()
        with StoreWriter(store, columns=[LatentColumn(channels=4)]) as writer:
            for sample in range(self._samples):
                writer.add(f"{sample}.png", "train/1024x1024", {"target": latent})
        seconds = time.perf_counter() - begin
        self._note(WRITE, number, time.process_time() - cpu_s)
        shutil.rmtree(store)
        return self._samples / seconds

    def imported(self, number: int) -> float:
        """Import the cache into a new store and return samples/s."""
        from bucketline.ingest.importers.config import ImportConfig
        from bucketline.ingest.importers.run import import_cache

        store = self._stores / f"{number}.store"
        begin, cpu_s = time.perf_counter(), time.process_time()
        result = import_cache(ImportConfig(kind="kohya", source=self._cache, place=store, vae="sdxl"))
        seconds = time.perf_counter() - begin
        self._note(IMPORT, number, time.process_time() - cpu_s)
        assert result is not None
        assert (result.imported, result.rejected) == (self._samples, 0)
        shutil.rmtree(store)
        return self._samples / seconds


def _arrays(path: Path) -> tuple[int, float]:
    """Return how many arrays a file has, and the CPU time of reading them."""
    begin = time.process_time()
    with np.load(path, allow_pickle=False) as found:
        number = len([found[name] for name in found.files])
    return number, time.process_time() - begin


def main() -> int:
    """Make the cache, measure and print."""
    return run_case(IngestImport)


if __name__ == "__main__":
    sys.exit(main())
