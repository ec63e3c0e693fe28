"""Memory of packing by number of images: peaks of `ingest pack`, and bytes of a listing per image."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, run_case, summarise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.bench.workers.pack import Packing

MARK = Mark(bound=1.1, is_at_most=True)
MARKED_FROM = 600  # images of the small source: 20 MiB of rows, more than one commit holds (COMMIT_BYTES)
ROWS = ("--grid", "64x64", "--latents", "moments", "--dtype", "F32")  # 32 KiB each with a VAE that halves once
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class IngestMemory(Case):
    """Measure the peak memory of `ingest pack` over few and over many images of 64 px, in separate processes.

    `resident` is the kernel's peak (VmHWM). It includes touched pages of mapped files, such as a shard while it is sealed;
    these belong to the page cache and are evicted when memory is short. It grows to a shard's size. `private` (RssAnon, sampled
    every 5 ms) excludes them. It must not grow, and has the target, provided that the small source already fills the buffers
    of a commit. A listing of ids and captions does grow. `listing` measures its bytes per image in a process that does nothing
    else, so that the rest of the growth can be separated from it.

    Example: python -m bucketline.bench pack --memory --images 1000 20000
    """

    repeats: int = 2
    """Repeats per subject, in alternation. All are counted, since a fresh process has nothing to warm up."""
    images: tuple[int, int] = (600, 3_000)
    """Images of the small and the large source."""
    shard_size_mib: int = 2048
    """MiB at which a shard is sealed and the next one started."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.photographs import Pieces, kept_photographs
        from bucketline.bench.fixtures.random_model import ModelShape, kept_model

        model = kept_model(folder, ModelShape(vae_widths=(4, 4), text_width=32, text_layers=1))
        small, large = (kept_photographs(folder, Pieces(count=count, sides_px=(64, 64))) for count in self.images)
        runs = _Runs(model, folder / "memory.store", self.shard_size_mib)
        peaks: list[Subject] = []
        for kind, mark in (("private", MARK if self.images[0] >= MARKED_FROM else None), ("resident", None)):
            pair = [
                Subject(name=f"most {kind} memory: {count:,} images", measure=runs.mib(kind, source, count))
                for source, count in zip((small, large), self.images, strict=True)
            ]
            peaks += [pair[0], replace(pair[1], limit=pair[0].name, mark=mark)]
        lists = [Subject(name=f"listing: {self.images[1]:,} images", measure=lambda _: listing_bytes(large) / self.images[1])]
        return [
            *summarise("pack, memory", "MiB", peaks, alternate(peaks, self.repeats, warm_up=False)),
            *summarise("pack, memory", "B/image", lists, alternate(lists, self.repeats, warm_up=False)),
        ]


class _Runs:
    """Packs into a new store once per round and source. One process reports both kinds of memory."""

    def __init__(self, model: Path, store: Path, shard_size_mib: int) -> None:
        self._options = ["--model", str(model), *ROWS, "--shard-size-mib", str(shard_size_mib)]
        self._store = store
        self._done: dict[tuple[int, Path], Packing] = {}

    def mib(self, kind: str, source: Path, count: int) -> Callable[[int], float]:
        """Return a measure in MiB: `private` or `resident`."""

        def measure(number: int) -> float:
            if (number, source) not in self._done:
                self._done[number, source] = self._pack(source, count)
            packing = self._done[number, source]
            return (packing.private_bytes if kind == "private" else packing.resident_bytes) / MIB

        return measure

    def _pack(self, source: Path, count: int) -> Packing:
        from bucketline.bench.workers.pack import pack_apart

        shutil.rmtree(self._store, ignore_errors=True)
        try:
            return pack_apart([str(source), str(self._store), *self._options], expected={"packed": count})
        finally:
            shutil.rmtree(self._store, ignore_errors=True)


LIST = """
import sys
from pathlib import Path
from bucketline.bench.workers.open_store import memory_kib
from bucketline.ingest.sources.open_source import open_source
source = open_source(sys.argv[1])
before = memory_kib()["private_kib"]
listing = source.listing()
print(memory_kib()["private_kib"] - before)
"""


def listing_bytes(source: Path) -> int:
    """Return the private bytes that a listing adds to a fresh process."""
    command = [sys.executable, "-P", "-c", LIST, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    return int(done.stdout) << 10


def main() -> int:
    """Make the sources and the model, measure and print."""
    return run_case(IngestMemory)


if __name__ == "__main__":
    sys.exit(main())
