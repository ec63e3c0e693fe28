"""Importing another trainer's cache compared with reading its files only."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bucketline.bench.fixtures.stores import kept
from bucketline.bench.harness import Case, Clock, Mark, Result, Subject, alternate, not_measured, summarise

if TYPE_CHECKING:
    from collections.abc import Callable

MARK = Mark(bound=0.7)
READ, READ_BY_ONE, WRITE, IMPORT = "read the files", "read the files, one process", "write the rows", "import"
BOTH = "both, one after the other"
SDXL_SPREAD = 7.7  # of its VAE's latents


@dataclass(frozen=True, kw_only=True)
class Import(Case):
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
        cache = kept(folder / f"kohya-{self.samples}", self._write_cache)
        gb = sum(path.stat().st_size for path in cache.rglob("*.npz")) / 1e9
        with tempfile.TemporaryDirectory(dir=folder, prefix="stores-") as stores:
            store = Path(stores) / "s.store"
            subjects = [
                Subject(name=READ, measure=self._of(lambda: self._read(cache, len(os.sched_getaffinity(0))), gb)),
                Subject(name=READ_BY_ONE, measure=self._of(lambda: self._read(cache, 1), gb)),
                Subject(name=WRITE, measure=self._of(lambda: self._write(store), gb)),
                Subject(name=BOTH, measure=lambda _: {}),
                Subject(
                    name=IMPORT,
                    measure=self._of(lambda: self._import(cache, store), gb),
                    limit=READ,
                    beside=(READ_BY_ONE, BOTH),
                    mark=MARK,
                ),
            ]
            found = alternate(subjects, self.repeats)
        rates = {name: [one["rate"] for one in own] for name, own in found.items() if name != BOTH}
        rates[BOTH] = [1 / (1 / read + 1 / write) for read, write in zip(rates[READ], rates[WRITE], strict=True)]
        cpu = {name: [one["CPU"] for one in found[name]] for name in (READ, WRITE, IMPORT)}
        spent = [Subject(name=name, measure=not_measured, limit=READ) for name in cpu]
        return [*summarise("import", "samples/s", subjects, rates), *summarise("import, CPU", "CPU-s/GB", spent, cpu)]

    def _write_cache(self, folder: Path) -> None:
        random = np.random.default_rng(0)
        for number in range(self.samples):
            path = folder / f"{number // 1000:03d}" / f"{number:07d}_1200x1200_sdxl.npz"
            path.parent.mkdir(parents=True, exist_ok=True)
            latents = (SDXL_SPREAD * random.standard_normal((4, 128, 128))).astype(np.float32)
            np.savez(path, latents=latents, original_size=np.array([1200, 1200]), crop_ltrb=np.array([88, 88, 1112, 1112]))

    def _of(self, run: Callable[[], tuple[float, float]], gb: float) -> Callable[[int], dict[str, float]]:
        """Return a measure of what takes so many seconds and CPU seconds."""

        def measure(_: int) -> dict[str, float]:
            seconds, cpu_s = run()
            return {"rate": self.samples / seconds, "CPU": cpu_s / gb}

        return measure

    def _read(self, cache: Path, processes: int) -> tuple[float, float]:
        """Read every file in processes that have started."""
        with ProcessPoolExecutor(processes, mp_context=get_context("forkserver")) as pool:
            list(pool.map(_started, range(processes)))
            begin = time.perf_counter()
            paths = list(cache.rglob("*.npz"))
            found, cpu_s = map(sum, zip(*pool.map(_arrays, paths, chunksize=16), strict=True))
            seconds = time.perf_counter() - begin
        assert found == 3 * self.samples
        return seconds, cpu_s

    def _write(self, store: Path) -> tuple[float, float]:
        from bucketline.store import LatentColumn, StoreWriter

        latent = (SDXL_SPREAD * np.random.default_rng(1).standard_normal((4, 128, 128))).astype("<f2")
        clock = Clock()
        with StoreWriter(store, columns=[LatentColumn(channels=4)]) as writer:
            for sample in range(self.samples):
                writer.add(f"{sample}.png", "train/1024x1024", {"target": latent})
        spent = clock.spent()
        shutil.rmtree(store)
        return spent

    def _import(self, cache: Path, store: Path) -> tuple[float, float]:
        from bucketline.ingest.importers.config import ImportConfig
        from bucketline.ingest.importers.run import import_cache

        clock = Clock()
        result = import_cache(ImportConfig(kind="kohya", source=cache, place=store, vae="sdxl"))
        spent = clock.spent()
        assert (result["imported"], result["rejected"]) == (self.samples, 0)
        shutil.rmtree(store)
        return spent


def _started(_: int) -> None:
    """Take a while, so that each process has one of these calls, for which it imports this module."""
    time.sleep(0.3)


def _arrays(path: Path) -> tuple[int, float]:
    """Return how many arrays a file has, and the CPU time of reading them."""
    clock = Clock()
    with np.load(path, allow_pickle=False) as found:
        number = len([found[name] for name in found.files])
    return number, clock.spent()[1]
