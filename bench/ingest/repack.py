"""Time of a second `ingest pack` over unchanged images, and its share of the first run's time."""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Result, Subject, alternate, run_case, summarise

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST, ONE, AGAIN = "first run", "again over 1 image", "again"


@dataclass(frozen=True, kw_only=True)
class IngestAgain(Case):
    """Measure a repeated `ingest pack` over an unchanged source, in seconds from the start of its process to its end.

    The limit is the same command over one unchanged image: Python's start, torch and the model. `--check content` also reads
    and hashes every file. Each result is also a share of the first run of the same round, which packs into a new store with a
    very small model; with a real model the share is smaller.

    Example: python -m bucketline.bench.ingest.repack --images 10000
    """

    repeats: int = 3
    """Repeats per subject, in alternation. All are counted: the first store already warms the caches."""
    images: int = 500
    """Images of the source, 64 px each."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.photographs import Pieces, kept_photographs
        from bucketline.bench.fixtures.random_model import ModelShape, kept_model

        model = kept_model(folder, ModelShape(vae_widths=(4, 4), text_width=32, text_layers=1))
        one, many = (kept_photographs(folder, Pieces(count=count, sides_px=(64, 64))) for count in (1, self.images))
        name = f"{self.images:,} images"
        by_stamp, by_content = f"{AGAIN} over {name}", f"{AGAIN} over {name}, --check content"
        with tempfile.TemporaryDirectory(dir=folder, prefix="stores-") as stores:
            runs = _Runs(model, Path(stores))
            subjects = [
                Subject(name=f"{FIRST} over {name}", measure=runs.first(many, self.images)),
                Subject(name=ONE, measure=runs.again(one, 1)),
            ]
            for subject, options in ((by_stamp, ()), (by_content, ("--check", "content"))):
                measure = runs.again(many, self.images, *options)
                subjects.append(Subject(name=subject, measure=measure, limit=ONE, beside=(subjects[0].name,)))
            return summarise("ingest_again", "s", subjects, alternate(subjects, self.repeats, warm_up=False))


class _Runs:
    """Runs first packs into stores that are removed immediately, and repeated packs into stores that stay until the end."""

    def __init__(self, model: Path, stores: Path) -> None:
        self._options, self._stores = ["--model", str(model), "--grid", "64x64"], stores

    def first(self, source: Path, count: int) -> Callable[[int], float]:
        """Return a measure in seconds of packing into a new store."""
        store = self._stores / "first.store"

        def measure(_: int) -> float:
            try:
                return self._pack(source, store, packed=count)
            finally:
                shutil.rmtree(store, ignore_errors=True)

        return measure

    def again(self, source: Path, count: int, *options: str) -> Callable[[int], float]:
        """Return a measure in seconds of packing into a store that already has everything."""
        store = self._stores / f"{source.name}.store"

        def measure(_: int) -> float:
            if not store.exists():
                self._pack(source, store, packed=count)
            return self._pack(source, store, *options, unchanged=count)

        return measure

    def _pack(self, source: Path, store: Path, *options: str, packed: int = 0, unchanged: int = 0) -> float:
        from bucketline.bench.workers.pack import pack_apart

        command = [str(source), str(store), *self._options, *options]
        return pack_apart(command, expected={"packed": packed, "unchanged": unchanged, "rejected": 0}).seconds


def main() -> int:
    """Make the sources and the model, measure and print."""
    return run_case(IngestAgain)


if __name__ == "__main__":
    sys.exit(main())
